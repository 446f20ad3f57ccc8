"""Every parameter has exactly one unit, and the module that computes with it has announced that unit."""

import itertools

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from noria._errors import UsageError
from noria.model.partition import Partition, partition, parts_of, split_units
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Toy(nn.Module):
    """Direct parameters beside blocks, an embedding, a head, something without parameters."""

    def __init__(self, num_blocks=3, tied=False):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.embed, self.drop = nn.Embedding(7, 4), nn.Dropout(0.0)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.drop(self.embed(tokens)) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Shell(nn.Module):
    """A module without a forward of its own."""


class Caller(nn.Module):
    def forward(self):
        raise NotImplementedError("never run: only what is in it matters")


def unit_names(found: Partition) -> list[str]:
    return [unit.name for unit in found.units]


def needs_by_name(found: Partition) -> dict[str, list[str]]:
    return {hook.name: [found.units[i].name for i in hook.needs] for hook in found.hooks}


def all_names(roots: list[nn.Module]) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for i, root in enumerate(roots):
        for name, parameter in root.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name if len(roots) == 1 else f"{i}.{name}")
    return names


def is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | Shell)


def check(found: Partition, roots: list[nn.Module]) -> None:
    """What holds for every partition of every model."""
    names = all_names(roots)
    held = [parameter for unit in found.units for parameter in unit.parameters]
    assert len(held) == len(set(held)) == len(names) and set(held) == set(names)
    assert all(unit.parameters and len(unit.parameters) == len(unit.names) for unit in found.units)
    for unit in found.units:
        for parameter, given_names in zip(unit.parameters, unit.names, strict=True):
            assert list(given_names) == names[parameter]
    assert len(set(unit_names(found))) == len(found.units)
    for unit, other in itertools.permutations([unit for unit in found.units if unit.module is not None], 2):
        assert unit.module not in set(other.module.modules()), f"{unit.name} lies in {other.name}"

    index = {parameter: i for i, unit in enumerate(found.units) for parameter in unit.parameters}
    hooks = {hook.module: hook for hook in found.hooks}
    assert len(hooks) == len(found.hooks)
    assert all(hooks[unit.module].is_block == unit.is_block for unit in found.units if unit.module is not None)
    for hook in found.hooks:
        assert hook.needs and list(hook.needs) == sorted(set(hook.needs))
    for root in roots:
        check_covered(root, [root], hooks, index)

    order = list(dict.fromkeys(module for root in roots for module in root.modules()))
    positions = [order.index(hook.module) for hook in found.hooks]
    assert positions == sorted(positions)
    rank = {parameter: i for i, parameter in enumerate(names)}
    firsts = [rank[unit.parameters[0]] for unit in found.units if unit.module is not None]
    assert firsts == sorted(firsts)


def check_covered(module, path, hooks, index) -> None:
    """The nearest called module above a parameter, or the block or root it is part of, announces its unit."""
    for parameter in module.parameters(recurse=False):
        called = next((m for m in reversed(path) if is_called(m)), path[0])
        blocks = [m for m in path if m in hooks and hooks[m].is_block]
        announcer = blocks[0] if blocks else called
        assert announcer in hooks and index[parameter] in hooks[announcer].needs
    for child in module.children():
        check_covered(child, [*path, child], hooks, index)


class Watch(TorchDispatchMode):
    """Fails when an operator reads a parameter whose unit the latest announcement does not name."""

    def __init__(self, found: Partition):
        super().__init__()
        self.found, self.needs, self.num_reads = found, (), 0
        self.unit_at = {p.data_ptr(): i for i, unit in enumerate(found.units) for p in unit.parameters}
        self.direct = {i for i, unit in enumerate(found.units) if unit.module is None}
        for hook in found.hooks:
            hook.module.register_forward_pre_hook(lambda *_, needs=hook.needs: setattr(self, "needs", needs))

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            unit = self.unit_at.get(tensor.data_ptr()) if isinstance(tensor, torch.Tensor) else None
            if unit is not None and unit not in self.direct:  # those are used before and after the children's calls
                assert unit in self.needs, f"{operator} reads {self.found.units[unit].name}, which was not announced"
                self.num_reads += 1
        return operator(*args, **(kwargs or {}))


def run_watched(model: nn.Module, found: Partition, **inputs) -> None:
    with torch.no_grad(), Watch(found) as watch:
        model(**inputs)
    assert watch.num_reads >= len(found.units) - len(watch.direct)


# ---- models of others ----

SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 16,
    "vocab_size": 19,
}
GROUPED = {"num_key_value_heads": 1, "max_position_embeddings": 16}
T5_SIZES = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 3, "num_heads": 2, "vocab_size": 19}
WHISPER_SIZES = {"d_model": 8, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2}
WHISPER_SIZES |= {
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 19,
}
WHISPER_SIZES |= {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
TOKENS = torch.arange(6).reshape(1, 6)

HUGGING_FACE = {  # the configuration, the model class, the inputs, the number of blocks
    "gpt2": ("GPT2Config", {"n_embd": 8, "n_head": 2, "n_layer": 3, "vocab_size": 19}, "GPT2LMHeadModel", 3),
    "llama": ("LlamaConfig", SIZES | GROUPED, "LlamaForCausalLM", 3),
    "qwen3": ("Qwen3Config", SIZES | GROUPED | {"head_dim": 4}, "Qwen3ForCausalLM", 3),
    "bert": ("BertConfig", SIZES, "BertForMaskedLM", 3),
    "t5": ("T5Config", T5_SIZES, "T5ForConditionalGeneration", 6),
    "mixtral": ("MixtralConfig", SIZES | GROUPED | {"num_local_experts": 2}, "MixtralForCausalLM", 3),
    "albert": ("AlbertConfig", SIZES | {"embedding_size": 4}, "AlbertForMaskedLM", 0),
    "whisper": ("WhisperConfig", WHISPER_SIZES, "WhisperForConditionalGeneration", 5),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_transformers_announce_every_unit_before_an_operator_reads_it(name):
    config, sizes, model_class, num_blocks = HUGGING_FACE[name]
    config = getattr(transformers, config)(**sizes, **SPECIAL)
    model = getattr(transformers, model_class)(config).eval()
    found = partition(model)
    check(found, [model])
    assert sum(unit.is_block for unit in found.units) == num_blocks
    inputs = {"input_ids": TOKENS}
    if name == "t5":
        inputs["decoder_input_ids"] = TOKENS
    if name == "whisper":
        inputs = {"input_features": torch.ones(1, 4, 12), "decoder_input_ids": TOKENS}
    run_watched(model, found, **inputs)


def test_the_tied_head_of_gpt2_needs_the_embedding_and_has_no_unit():
    sizes = HUGGING_FACE["gpt2"][1]
    found = partition(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    blocks = [f"transformer.h.{i}" for i in range(3)]
    assert unit_names(found) == ["transformer.wte", "transformer.wpe", *blocks, "transformer.ln_f"]
    assert needs_by_name(found)["lm_head"] == ["transformer.wte"]
    assert found.units[0].names == [("transformer.wte.weight", "lm_head.weight")]


def test_the_tied_head_of_bert_needs_its_own_unit_and_the_embeddings():
    found = partition(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)))
    assert needs_by_name(found)["cls.predictions.decoder"] == ["bert.embeddings", "cls"]


# ---- models of our own ----


def test_a_toy_falls_into_direct_parameters_blocks_and_the_modules_around_them():
    model = Toy()
    found = partition(model)
    check(found, [model])
    run_watched(model, found, tokens=TOKENS)
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert unit_names(found) == ["Toy (direct)", "embed", *blocks, "norm", "head"]
    assert [unit.is_block for unit in found.units] == [False, False, True, True, True, False, False]
    assert needs_by_name(found) == {
        "Toy": ["Toy (direct)"],  # what lies around the blocks announces itself
        **{name: [name] for name in ["embed", *blocks, "norm", "head"]},
    }


def test_a_fully_tied_head_has_a_hook_and_no_unit():
    model = Toy(tied=True)
    found = partition(model)
    check(found, [model])
    run_watched(model, found, tokens=TOKENS)
    assert "head" not in unit_names(found)
    assert needs_by_name(found)["head"] == ["embed"]


def test_a_block_whose_parameters_all_belong_to_another_has_a_hook_and_no_unit():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    found = partition(model)
    check(found, [model])
    assert unit_names(found) == ["0", "1"]
    assert needs_by_name(found) == {"0": ["0"], "1": ["1"], "2": ["0"]}
    assert [hook.is_block for hook in found.hooks] == [True, True, True]


def test_the_layers_of_a_sequential_are_blocks_and_layers_without_parameters_are_nothing():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    found = partition(model)
    check(found, [model])
    run_watched(model, found, input=torch.ones(1, 4))
    assert unit_names(found) == ["0", "2", "4"]
    assert all(unit.is_block for unit in found.units)


def test_a_model_without_lists_is_one_unit_with_a_hook_on_every_module_that_owns_parameters():
    model = Block()
    found = partition(model)
    check(found, [model])
    assert needs_by_name(found) == {"Block": ["Block"], "up": ["Block"], "down": ["Block"]}


def test_two_big_lists_give_blocks_and_a_small_one_stays_one_unit():
    model = Caller()
    model.encoder = nn.ModuleList([Block(16) for _ in range(3)])
    model.decoder = nn.ModuleList([Block(8) for _ in range(2)])
    model.probe = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = partition(model)
    check(found, [model])
    assert unit_names(found) == ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1", "probe"]
    assert [unit.is_block for unit in found.units] == [True] * 5 + [False]


def test_a_list_that_mixes_classes_gives_a_block_for_each():
    model = Caller()
    model.layers = nn.ModuleList([Block(), nn.Linear(4, 4), Block()])
    assert unit_names(partition(model)) == ["layers.0", "layers.1", "layers.2"]


def test_the_list_that_repeats_is_found_inside_a_sequential_that_strings_the_model_together():
    inner = nn.Sequential(*[Block() for _ in range(4)])
    model = nn.Sequential(nn.Embedding(7, 4), inner, nn.Linear(4, 7))
    found = partition(model)
    check(found, [model])
    run_watched(model, found, input=TOKENS)
    assert unit_names(found) == ["0", "1.0", "1.1", "1.2", "1.3", "2"]


def test_a_layer_that_is_a_mere_list_is_never_called_so_its_parts_are_the_blocks():
    model = Caller()
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), Block()]) for _ in range(2)])
    found = partition(model)
    check(found, [model])
    assert unit_names(found) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert all(hook.is_block for hook in found.hooks)


def test_parameters_in_a_parameter_list_are_announced_by_the_module_that_is_called():
    model = Caller()
    model.blocks = nn.ModuleList([Block(), Block()])
    model.prompts = nn.ParameterList([torch.ones(2), torch.ones(3)])
    found = partition(model)
    check(found, [model])
    assert unit_names(found) == ["Caller (direct)", "blocks.0", "blocks.1"]
    assert found.units[0].names == [("prompts.0",), ("prompts.1",)]


def test_direct_parameters_below_the_root_are_a_unit_named_after_their_module():
    model = Caller()
    model.transformer = Toy()
    assert "transformer (direct)" in unit_names(partition(model))


def test_two_hooks_of_one_shared_module_are_one():
    model = Caller()
    shared = nn.Linear(4, 4)
    model.first, model.blocks, model.last = shared, nn.ModuleList([Block(), Block()]), shared
    found = partition(model)
    check(found, [model])
    assert found.units[0].names == [("first.weight", "last.weight"), ("first.bias", "last.bias")]


def test_several_models_are_numbered_and_share_what_they_share():
    teacher, student = Toy(), Toy(num_blocks=2)
    student.embed = teacher.embed
    found = partition([teacher, student])
    check(found, [teacher, student])
    assert "0.blocks.2" in unit_names(found) and "1.blocks.1" in unit_names(found)
    assert "1.embed" not in unit_names(found)
    assert ("0.embed.weight", "1.embed.weight") in found.units[1].names
    assert found.roots == [teacher, student]


def test_the_small_lists_of_a_small_model_are_blocks_beside_a_big_model():
    big, small = (
        nn.Sequential(nn.Linear(99, 99), nn.Linear(99, 99)),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    )
    assert all(unit.is_block for unit in partition([big, small]).units)


def test_a_model_and_a_part_of_it_do_not_nest_their_units():
    model = Caller()
    model.encoder, model.blocks = Toy(), nn.ModuleList([Toy(), Toy()])
    found = partition([model.blocks[0], model])
    check(found, [model.blocks[0], model])


# ---- units that the caller chooses ----


def test_classes_choose_the_units_and_the_outermost_match_wins():
    model = Toy()
    found = partition(model, [Block, nn.Linear])
    check(found, [model])
    run_watched(model, found, tokens=TOKENS)
    assert [u.name for u in found.units if u.is_block] == ["blocks.0", "blocks.1", "blocks.2", "head"]


def test_patterns_choose_the_units_by_name():
    model = Toy()
    found = partition(model, ["blocks.[01].*", "head"])
    check(found, [model])
    run_watched(model, found, tokens=TOKENS)
    blocks = [unit.name for unit in found.units if unit.is_block]
    assert blocks == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
    assert "blocks.2" in unit_names(found)


def test_a_pattern_that_names_a_list_means_what_is_in_it():
    blocks = [unit.name for unit in partition(Toy(), ["blocks"]).units if unit.is_block]
    assert blocks == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_pattern_for_everything_means_the_outermost_modules_and_not_the_model_itself():
    model = Toy()
    found = partition(model, ["*"])
    check(found, [model])
    blocks = [unit.name for unit in found.units if unit.is_block]
    assert blocks == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]


def test_patterns_match_the_names_of_each_of_several_models():
    found = partition([Toy(1), Toy(1)], ["blocks.*"])
    assert [unit.name for unit in found.units if unit.is_block] == ["0.blocks.0", "1.blocks.0"]


def test_the_class_of_a_compiled_block_chooses_the_wrapper_that_is_called():
    model = nn.Sequential(torch.compile(Block()), nn.Linear(4, 4))
    found = partition(model, [Block])
    check(found, [model])
    assert [unit.module for unit in found.units if unit.is_block] == [model[0]]


@pytest.mark.parametrize("choice", [nn.Conv2d, "layers.*", nn.Dropout, "drop", "Blocks.*"])
def test_a_choice_that_matches_nothing_with_parameters_is_refused(choice):
    with pytest.raises(UsageError, match=r"expected .*, but found none for .*\. Remedy: .*Block"):
        partition(Toy(), [Block, choice])


# ---- parameters that cannot be moved ----


class Odd(torch.Tensor):
    pass


def expanded():
    return nn.Parameter(torch.ones(1, 4).expand(3, 4))


BAD_PARAMETERS = {
    "sparse": lambda: nn.Parameter(torch.eye(3).to_sparse()),
    "not initialised": lambda: nn.UninitializedParameter(),
    "Odd": lambda: nn.Parameter(torch.ones(2).as_subclass(Odd)),
    "strides": expanded,
    r"strides \(8, 1\)": lambda: nn.Parameter(torch.ones(4, 8)[:, :5]),
}


def test_a_unit_of_several_dtypes_comes_apart_and_its_hooks_need_all_of_it():
    toy = Toy()
    toy.blocks[1].up.double()
    toy.blocks[1].down.bias.requires_grad_(False)
    toy.blocks[2].requires_grad_(False).up.double()
    whole = partition(toy)
    found = split_units(whole, lambda parameter: parameter.dtype)
    (block,) = [hook for hook in found.hooks if hook.name == "blocks.1"]
    first, second = (found.units[index] for index in block.needs)
    assert (first.name, second.name) == ("blocks.1", "blocks.1 in torch.float32")
    assert [names for (names,) in first.names] == ["blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.bias"]
    assert [names for (names,) in second.names] == ["blocks.1.down.weight"]
    assert len(found.units) == len(whole.units) + 1  # what is frozen is not summed
    for hook, before in zip(found.hooks, whole.hooks, strict=True):
        held = {each for index in hook.needs for each in found.units[index].parameters}
        assert held == {each for index in before.needs for each in whole.units[index].parameters}
        assert hook.needs == tuple(sorted(hook.needs))
    assert split_units(whole, lambda parameter: torch.float32) == whole


@pytest.mark.parametrize("found", BAD_PARAMETERS)
def test_a_parameter_that_cannot_be_moved_is_refused_by_name(found):
    model = Toy()
    model.blocks[1].up.weight = BAD_PARAMETERS[found]()
    with pytest.raises(UsageError, match=rf'expected .*, but found "blocks.1.up.weight" .*{found}.*\. Remedy: '):
        partition(model)


def test_two_parameters_over_the_same_bytes_are_refused():
    model = Toy()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    with pytest.raises(UsageError, match=r'"embed.weight" and "head.weight"'):
        partition(model)


def test_a_buffer_over_bytes_of_a_parameter_is_refused():
    model = Toy()
    model.register_buffer("decoder", model.embed.weight.detach().t()[:, 1:])
    with pytest.raises(UsageError, match=r'"decoder", a buffer over bytes of the parameter "embed.weight"'):
        partition(model)


def test_buffers_may_share_memory_among_themselves_and_lie_beside_a_parameter():
    model = Block()
    flat = torch.randn(64)
    model.up.weight = nn.Parameter(flat[:32].view(8, 4))
    model.register_buffer("beside", flat[32:])
    model.register_buffer("within", flat[40:48].expand(3, 8))
    check(partition(model), [model])


def test_parameters_side_by_side_in_one_storage_of_any_dtype_and_order_of_strides_are_fine():
    model = Block()
    flat = torch.randn(64)
    model.up.weight = nn.Parameter(flat[:32].view(8, 4))
    model.down.weight = nn.Parameter(flat[32:].view(8, 4).t())
    model.up.bias = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)
    model.down.bias = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    model.none = nn.Parameter(torch.empty(0, 3))
    check(partition(model), [model])


# ---- any model ----


@st.composite
def modules(draw, depth=3):
    """A tree of modules; later some of its parameters and modules are made to occur twice."""
    leaves = ["linear", "relu", "direct", "parameters"]
    kind = draw(st.sampled_from(leaves + ["sequential", "list", "dict", "caller", "shell"] * 2 if depth else leaves))
    if kind == "linear":
        return nn.Linear(draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    if kind == "relu":
        return nn.ReLU()
    if kind == "parameters":
        return nn.ParameterList([torch.ones(draw(st.integers(1, 9)))])
    children = [] if kind == "direct" else draw(st.lists(modules(depth=depth - 1), max_size=4))
    if kind in ("sequential", "list"):
        return nn.Sequential(*children) if kind == "sequential" else nn.ModuleList(children)
    if kind == "dict":
        return nn.ModuleDict({f"m{i}": child for i, child in enumerate(children)})
    module = Shell() if kind == "shell" else Caller()
    if kind == "direct" or draw(st.booleans()):
        module.p = nn.Parameter(torch.ones(draw(st.integers(1, 9))))
    for i, child in enumerate(children):
        module.add_module(f"m{i}", child)
    return module


@st.composite
def models(draw):
    root = Caller()
    root.body = draw(modules())
    for i in range(draw(st.integers(0, 2))):
        root.add_module(f"again{i}", draw(st.sampled_from(list(root.body.modules()))))
    owners = [(m, name) for m in root.modules() for name, _ in m.named_parameters(recurse=False)]
    for _ in range(draw(st.integers(0, 2)) if len(owners) > 1 else 0):
        (first, a), (second, b) = draw(st.sampled_from(owners)), draw(st.sampled_from(owners))
        setattr(second, b, getattr(first, a))
    return root


def is_worth_a_unit(module: nn.Module) -> bool:
    return is_called(module) and any(True for _ in module.parameters())


@settings(max_examples=300)
@given(roots=st.lists(models(), min_size=1, max_size=2))
def test_any_model_is_divided_so_that_every_parameter_has_one_unit_and_its_user_announces_it(roots):
    found = partition(roots if len(roots) > 1 else roots[0])
    check(found, roots)
    again = partition(roots if len(roots) > 1 else roots[0])
    assert unit_names(again) == unit_names(found) and again.hooks == found.hooks


@settings(max_examples=200)
@given(root=models(), data=st.data())
def test_any_choice_of_modules_is_divided_just_as_well(root, data):
    names = [name for name, module in root.named_modules() if name and any(map(is_worth_a_unit, module.modules()))]
    if names:
        choice = data.draw(st.lists(st.sampled_from(names), min_size=1))
        found = partition(root, choice)
        check(found, [root])


class OwnAttention(nn.MultiheadAttention):
    """Uses the weight of its out_proj without calling it, as torch's does."""


@pytest.mark.parametrize(
    ("module", "num_parts"),
    [
        (Block(), 2),
        (nn.Sequential(Block(), nn.ReLU(), Block()), 2),
        (nn.MultiheadAttention(4, 2), 0),
        (OwnAttention(4, 2), 0),
        (nn.TransformerEncoderLayer(4, 2, 8), 0),
        (torch.compile(Block(), backend="eager"), 0),
        (nn.Linear(4, 4), 0),
        (Toy(), 6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_are_split_only_where_their_parts_are_called(module, num_parts):
    assert len(parts_of(module)) == num_parts
