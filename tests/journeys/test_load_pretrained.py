"""`noria.load_pretrained` streams files of weights into the home. The model then trains to the bits of one that was
loaded by its own means and wrapped; what does not fit is refused before anything is taken."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
import transformers
from noria import _C
from noria.testing import assert_same_bits, on_machine
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, LATE_UPDATES, Net, Side, adamw, assert_moved, loss_of, state_tensors
from tests.ranks import asked_for, assert_fine, in_turn_on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20


def config(**more: Any) -> transformers.LlamaConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return transformers.LlamaConfig(**{**sizes, **heads, **more})


def llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(config(**more))


def from_pretrained(folder: Any) -> Any:
    with torch.device("cpu"):
        return transformers.LlamaForCausalLM.from_pretrained(folder)


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for number in range(steps):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator(DEVICE).manual_seed(number))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def as_shards(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def as_one_file(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)
    assert (folder / "model.safetensors").exists()


def as_bin(model: nn.Module, folder: Path) -> None:
    """As transformers wrote it before version 5: a tied weight under both names."""
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def as_bin_shards(model: nn.Module, folder: Path) -> None:
    model.config.save_pretrained(folder)
    index = {}
    for number, names in enumerate((list(model.state_dict())[::2], list(model.state_dict())[1::2])):
        file = f"pytorch_model-{number}.bin"
        torch.save({name: model.state_dict()[name].clone() for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


FORMS = {"shards": as_shards, "one file": as_one_file, "bin": as_bin, "bin shards": as_bin_shards}

POLICIES: dict[str, dict[str, Any]] = {
    "fp32 torch": {"kernel": "torch"},
    "fp32 fused": {"kernel": "fused"},
    "bf16 torch": {"kernel": "torch", "dtype": torch.bfloat16},
    "bf16 fused": {"kernel": "fused", "dtype": torch.bfloat16},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a model of random weights, in shards."""
    torch.manual_seed(5)
    with torch.device("cpu"):
        as_shards(llama(), tmp_path)
    return tmp_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_from_files_trains_with_the_bits_of_from_pretrained(form, tied, policy, tmp_path):
    torch.manual_seed(5)
    with torch.device("cpu"):
        FORMS[form](llama(tie_word_embeddings=tied), tmp_path)
    hostility = LATE_UPDATES if "fused" in policy else HOSTILE
    options = {"device": DEVICE, "window": 2, **POLICIES[policy]}
    twin = from_pretrained(tmp_path)
    if policy == "fp32 torch":
        twin.to(DEVICE)  # plain PyTorch
    its = adamw(twin.parameters())
    if policy != "fp32 torch":
        noria.wrap(twin, its, **options)
    torch.manual_seed(99)
    with on_machine(hostility=hostility):
        model, optimizer = noria.load_pretrained(
            lambda: llama(tie_word_embeddings=tied), tmp_path, functools.partial(torch.optim.AdamW, lr=1e-2), **options
        )
    assert_same_bits(model.state_dict(), twin.state_dict())
    assert_same_bits(dict(model.named_buffers()), dict(twin.named_buffers()))
    for side in ((twin, its), (model, optimizer)):
        train(*side)
    assert_same_bits(model.state_dict(), twin.state_dict())
    assert_same_bits(state_tensors(optimizer), state_tensors(its))
    assert_moved(model)


class Shifted(Net):
    """Has a saved buffer, a frozen parameter, one without dimensions, and one whose elements lie in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((1, 16), 0.5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[1].requires_grad_(False)
        expand = self.blocks[0].expand
        expand.weight = nn.Parameter(torch.rand(16, 32).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def other_values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.rand(tensor.shape))
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("built", ["by a function", "on meta", "with values"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_is_built_in_any_way(built, policy, tmp_path):
    torch.manual_seed(5)
    with torch.device("cpu"):
        save_file(
            {name: value.contiguous() for name, value in other_values(Shifted()).state_dict().items()},
            tmp_path / "weights.safetensors",
        )
    twin = Shifted().cpu()
    twin.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    its = adamw(twin.parameters())
    options = {"device": DEVICE, "window": 2, **POLICIES[policy]}
    noria.wrap(twin, its, **options)
    with torch.device("meta" if built == "on meta" else "cpu"):
        model: Any = Shifted if built == "by a function" else Shifted()
    made = adamw(model.parameters()) if built != "by a function" else adamw
    path = tmp_path if built == "on meta" else tmp_path / "weights.safetensors"
    model, optimizer = noria.load_pretrained(model, path, made, **options)
    for side in (Side(twin, its, True), Side(model, optimizer, True)):
        side.train(0, 3)
    assert_same_bits(model.state_dict(), twin.state_dict())
    assert_same_bits(state_tensors(optimizer), state_tensors(its))


def test_without_an_optimizer_it_returns_the_model(saved):
    model = noria.load_pretrained(llama, saved / "model.safetensors.index.json", device=DEVICE)
    twin = from_pretrained(saved)
    assert noria.is_wrapped(model)
    assert_same_bits(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize(("of_file", "of_model"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_values_are_converted_to_the_dtypes_of_the_model(of_file, of_model, tmp_path):
    torch.manual_seed(5)
    with torch.device("cpu"):
        file = Net().to(of_file).state_dict()
        save_file(file, tmp_path / "model.safetensors")
    model = noria.load_pretrained(lambda: Net().to(of_model), tmp_path, device=DEVICE)
    assert_same_bits(model.state_dict(), {name: value.to(of_model) for name, value in file.items()})


def test_a_large_weight_is_converted_in_pieces_to_the_same_bits(tmp_path, monkeypatch):
    """Into plain and split masters. Its pieces end inside of rows."""
    monkeypatch.setattr("noria.runtime.masters._PIECE", 37)
    torch.manual_seed(5)
    with torch.device("cpu"):
        value = {"weight": torch.randn(61, 17), "bias": torch.randn(61)}
        save_file(value, tmp_path / "model.safetensors")
    for kernel in ("torch", "fused"):
        options = {"device": DEVICE, "dtype": torch.bfloat16, "kernel": kernel}
        with torch.device("cpu"):
            make = functools.partial(nn.Linear, 17, 61)
        model, optimizer = noria.load_pretrained(make, tmp_path, torch.optim.AdamW, **options)
        model(torch.ones(1, 17, dtype=torch.bfloat16)).sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        states = state_tensors(optimizer)
        for number, name in enumerate(("weight", "bias")):
            high = model.state_dict()[name].view(torch.int16).to(torch.int32) << 16
            master = (high + states[f"{number}.low_bits"]).view(torch.float32)
            assert_same_bits({name: master}, {name: value[name]})


def test_the_bar_counts_all_bytes(saved, monkeypatch):
    told = []

    class Bar:
        def __init__(self, what: str, total: int) -> None:
            told.append((what, total))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def tell(self, before: int, now: int) -> None:
            told.append(before + now)

    monkeypatch.setattr("noria.pretrained.Bar", Bar)
    model = noria.load_pretrained(llama, saved, device=DEVICE)
    total = sum(value.nbytes for value in model.state_dict().values())
    assert told[0] == ("loading weights", total)
    assert told[-1] == total
    assert told[1:] == sorted(told[1:])
    assert len(told) > 30


# ---- models that are made by a function ------------------------------------------------------------------------


class Tied(nn.Module):
    """Ties by giving two modules a parameter that neither has made."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.a.weight = self.b.weight = weight
            self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.on_meta = self.a.weight.is_meta


def test_parameters_get_no_memory_and_buffers_get_values(tmp_path):
    torch.save({"a.weight": torch.full((4, 4), 2.0)}, tmp_path / "model.bin")
    model = noria.load_pretrained(Tied, tmp_path / "model.bin", device=DEVICE)
    assert model.on_meta
    assert model.a.weight is model.b.weight
    assert not model.a.weight.requires_grad
    assert model.angles.tolist() == [0, 1, 2, 3]
    assert all((value == 2).all() for value in model.state_dict().values())
    assert not Tied().on_meta


def test_models_that_other_threads_make_meanwhile_have_memory(tmp_path):
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "model.bin")
    others = []

    def make() -> nn.Module:
        thread = threading.Thread(target=lambda: others.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2, bias=False)

    noria.load_pretrained(make, tmp_path / "model.bin", device=DEVICE)
    assert not others[0].weight.is_meta


# ---- refusals --------------------------------------------------------------------------------------------------


def without(saved: Path, name: str) -> None:
    for file in saved.glob("*.safetensors"):
        values = {key: value for key, value in load_file(file).items() if name not in key}
        save_file(values, file)


def drop_from_index(saved: Path, name: str) -> None:
    path = saved / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {key: file for key, file in index["weight_map"].items() if name not in key}
    path.write_text(json.dumps(index))


def change(saved: Path, name: str, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for file in saved.glob("*.safetensors"):
        save_file({key: act(value) if key == name else value for key, value in load_file(file).items()}, file)


def disagree(saved: Path) -> None:
    for file in saved.glob("*"):
        if "safetensors" in file.name:
            file.unlink()
    with torch.device("cpu"):
        save_file(llama().state_dict(), saved / "model.safetensors")


def on_meta(**more: Any) -> nn.Module:
    with torch.device("meta"):
        return llama(**more)


UP = "model.layers.0.mlp.up_proj.weight"

REFUSED: dict[str, tuple[Callable[[Path], Any], Callable[[], Any], list[str]]] = {
    "missing": (lambda saved: drop_from_index(saved, "up_proj"), llama, [f'"{UP}"', "and 1 more", "was saved"]),
    "unexpected": (lambda saved: None, functools.partial(llama, num_hidden_layers=2), ['"model.layers.2', "not have"]),
    "shape": (lambda saved: None, functools.partial(llama, intermediate_size=48), ["(48, 32)", "(64, 32)", "config"]),
    "quantised": (lambda saved: change(saved, UP, lambda its: its.to(torch.int8)), llama, [UP, "torch.int8"]),
    "8 bit floats": (
        lambda saved: change(saved, UP, lambda its: its.to(torch.float8_e4m3fn)),
        llama,
        ["float8"],
    ),
    "tied, other values": (disagree, functools.partial(llama, tie_word_embeddings=True), ["which the model ties"]),
    "buffers on meta": (lambda saved: None, on_meta, ['"model.rotary_emb.inv_freq"', "noria.load_pretrained(lambda:"]),
    "no such path": (lambda saved: saved / "nothing", llama, ["no file or folder", "snapshot_download"]),
    "an empty folder": (
        lambda saved: (saved / "empty").mkdir() or saved / "empty",
        llama,
        ["none of model."],
    ),
    "a shard is gone": (lambda saved: next(saved.glob("*-00002-*")).unlink(), llama, ["all shards", "00002"]),
    "a shard is cut": (
        lambda saved: os.truncate(next(saved.glob("*-00002-*")), 3000),
        llama,
        ["a file of safetensors", "download it again"],
    ),
    "a shard lacks one": (lambda saved: without(saved, "up_proj"), llama, ["up_proj", "a file without"]),
    "an index without a map": (
        lambda saved: (saved / "model.safetensors.index.json").write_text("{}"),
        llama,
        ["weight_map", "KeyError"],
    ),
    "a file of noria.save": (
        lambda saved: torch.save({"model": {}}, saved / "run.pt") or saved / "run.pt",
        llama,
        ['"model", no tensor', "noria.load"],
    ),
    "no file of weights": (lambda saved: saved / "config.json", llama, ["weight_map"]),
    "no pickle": (
        lambda saved: (saved / "a.bin").write_text("text") and saved / "a.bin",
        llama,
        ["Error", "state_dict"],
    ),
    "no model": (lambda saved: None, lambda: 3, ["one that returns int"]),
}


@contextlib.contextmanager
def nothing_taken() -> Iterator[None]:
    before = _C.living()
    yield
    assert _C.living() == before


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_taken(name, saved):
    spoil, make, words = REFUSED[name]
    path = spoil(saved)
    path = path if isinstance(path, Path) else saved
    made = make() if name == "buffers on meta" else make
    optimizers: list[Any] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(parameters)
        return adamw(parameters)

    with nothing_taken(), pytest.raises(noria.UsageError) as caught:
        noria.load_pretrained(made, path, optimizer, device=DEVICE)
    for word in words:
        assert word in str(caught.value)
    assert not optimizers


def test_a_model_stays_as_it_was_if_files_do_not_fit(saved):
    model = llama(num_hidden_layers=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(noria.UsageError):
        noria.load_pretrained(model, saved, device=DEVICE)
    assert not noria.is_wrapped(model)
    assert_same_bits(model.state_dict(), before)


def test_a_wrapped_model_is_refused(saved):
    model = noria.wrap(llama(), device=DEVICE)
    with pytest.raises(noria.UsageError, match=r"load it by model\.load_state_dict"):
        noria.load_pretrained(model, saved)


def test_without_safetensors_the_error_names_the_package(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with nothing_taken(), pytest.raises(noria.UsageError, match="pip install safetensors"):
        noria.load_pretrained(llama, saved, device=DEVICE)


def test_noria_imports_no_safetensors_by_itself():
    code = "import sys, noria; assert 'safetensors' not in sys.modules"
    paths = os.pathsep.join([os.path.dirname(os.path.dirname(noria.__file__)), "."])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=True)


def test_a_model_whose_files_break_off_is_not_used(saved, monkeypatch):
    """A disk fails after the headers were read: what has no values raises, and another load makes it good."""
    from noria.checkpoint import weight_files

    made = []
    read = weight_files.WeightFiles._read

    def fails(self: Any, file: str, names: list[str]) -> Any:
        if "00003" in file:
            raise OSError("the disk is gone")
        return read(self, file, names)

    monkeypatch.setattr(weight_files.WeightFiles, "_read", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        noria.load_pretrained(lambda: made.append(llama()) or made[0], saved, device=DEVICE)
    [model] = made
    with pytest.raises(noria.UsageError, match="not loaded since"):
        model(torch.zeros(1, 4, dtype=torch.long))
    twin = from_pretrained(saved)
    model.load_state_dict(twin.state_dict())
    assert_same_bits(model.state_dict(), twin.state_dict())


# ---- other loaders, on a wrapped model without values ----------------------------------------------------------


class Head(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    return noria.wrap(model, device=DEVICE, window=2)


@pytest.mark.parametrize("make", [Net, Head, Shifted], ids=["untied", "tied", "with buffers"])
def test_safetensors_loads_a_wrapped_model_without_values(make, tmp_path):
    torch.manual_seed(5)
    with torch.device("cpu"):
        twin = other_values(make())
    if make is Shifted:
        twin.blocks[0].expand.weight.data = twin.blocks[0].expand.weight.data.contiguous()
    save_model(twin, str(tmp_path / "model.safetensors"))
    model = empty(make)
    assert load_model(model, str(tmp_path / "model.safetensors")) == (set(), [])
    assert_same_bits(model.state_dict(), twin.state_dict())
    loss_of(model, 0)


def test_until_it_is_loaded_a_model_shows_names_and_shapes_and_is_not_saved(tmp_path):
    model = empty(Shifted)
    twin = Shifted().state_dict()
    shown = model.state_dict()
    assert list(shown) == list(twin)
    for name, value in shown.items():
        assert value.is_meta
        assert (value.shape, value.stride(), value.dtype) == (twin[name].shape, twin[name].stride(), twin[name].dtype)
    model.load_state_dict({"head.bias": torch.ones(23)}, strict=False)
    assert (model.state_dict()["head.bias"] == 1).all()
    with pytest.raises(noria.UsageError, match=r"noria\.save of a model that has all its values"):
        noria.save(tmp_path / "run.pt", model)
    with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor"):
        empty(Shifted).load_state_dict(shown)


@pytest.mark.cpu_only("torch moves a whole file to the device first")
def test_a_loader_that_gives_a_model_its_own_tensors_gives_it_no_values():
    """As torch.distributed.checkpoint does with names that a file lacks, and accelerate by it."""
    model, twin = empty(Shifted), Shifted().state_dict()
    first = {name: value for name, value in twin.items() if "blocks" in name}
    rest = {name: value for name, value in twin.items() if name not in first}
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict(first), options=options)
    lacking = {name for name, value in model.state_dict().items() if value.is_meta}
    assert lacking == set(rest)
    set_model_state_dict(model, dict(rest), options=options)
    assert_same_bits(model.state_dict(), twin)


# ---- ranks -----------------------------------------------------------------------------------------------------


def loads_shards(rank: int, size: int, folder: str, policy: str) -> None:
    options = {"device": DEVICE, "window": 2, **POLICIES[policy]}
    model, optimizer = noria.load_pretrained(llama, folder, adamw, **options)
    twin = from_pretrained(folder)
    its = adamw(twin.parameters())
    noria.wrap(twin, its, **options)
    assert_same_bits(model.state_dict(), twin.state_dict())
    for side in ((twin, its), (model, optimizer)):
        train(*side)
    assert_same_bits(model.state_dict(), twin.state_dict())
    assert_same_bits(state_tensors(optimizer), state_tensors(its))


def raises_on_all(rank: int, size: int, folder: str, other: str, words: str) -> None:
    with pytest.raises(noria.UsageError, match=words):
        noria.load_pretrained(llama, other if rank else folder, adamw, device=DEVICE)


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    folders = [tmp_path_factory.mktemp("shards") for _ in range(2)]
    with torch.device("cpu"):
        for seed, folder in enumerate(folders):
            torch.manual_seed(seed)
            as_shards(llama(), folder)
    one, two = map(str, folders)
    acts: dict[str, Any] = {
        **{f"shards, {policy}": (loads_shards, (one, policy)) for policy in ("fp32 torch", "bf16 fused")},
        "other values": (raises_on_all, (one, two, "the same contents to load on all ranks")),
        "no files": (raises_on_all, (one, "/nowhere", "no file or folder /nowhere")),
    }
    return in_turn_on_ranks(2, asked_for(request, acts))


@pytest.mark.parametrize("name", ["shards, fp32 torch", "shards, bf16 fused", "other values", "no files"])
def test_ranks(found, name):
    assert_fine(found, name)


# ---- memory ----------------------------------------------------------------------------------------------------

PROGRAM = """
import gc, json, sys
import psutil, torch, noria
from noria import _C
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

folder, how, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
dtype = torch.bfloat16 if settings["bfloat16"] else None
options = {"device": "cpu", "window": 2, "dtype": dtype}
make = torch.optim.AdamW if settings["trains"] else None

def load(config, folder, how):
    if how == "whole":  # for comparison: all of the files at once
        model = LlamaForCausalLM(config)
        state = {}
        for file in settings["files"] if folder else ():
            state |= {name: value.clone() for name, value in load_file(f"{folder}/{file}").items()}
        model.load_state_dict(state, strict=bool(folder))
        given = noria.wrap(model, make(model.parameters()) if make else None, **options)
    else:
        given = noria.load_pretrained(lambda: LlamaForCausalLM(config), folder, make, **options)
    return given[0] if make else given

tiny = LlamaConfig.from_pretrained(folder, num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8,
                                   num_attention_heads=1, num_key_value_heads=1, head_dim=8)
load(tiny, None, "whole")  # imports what a load imports
gc.collect()
_C.return_freed_memory()
before = psutil.Process().memory_info().rss
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
model = load(LlamaConfig.from_pretrained(folder), folder, how)
with open("/proc/self/status") as file:
    [peak] = [int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM")]
rows = noria.report(model).ledger
print(json.dumps({"growth": peak - before, "home": sum(row.planned for row in rows if row.place == "host")}))
"""

OTHER_BYTES = 24 * MIB
"""What the growth has beside home and shard: modules, hooks, threads of the pool, pieces that are converted. Measured:
7 MiB without the pool, 18 with it."""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, list[str]]:
    """A model of 49 M parameters, 188 MiB, in shards of at most 32 MiB."""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(5)
    with torch.device("cpu"):
        sizes = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 5}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        model.save_pretrained(folder, max_shard_size="32MB")
    files = sorted(each.name for each in folder.glob("*.safetensors"))
    assert len(files) > 5
    return folder, files


def growth(large: tuple[Path, list[str]], how: str, **settings: Any) -> tuple[int, int]:
    """Returns how much the process grows at most, and what it may: the window has not been touched yet."""
    folder, files = large
    paths = os.pathsep.join([os.path.dirname(os.path.dirname(noria.__file__)), "."])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), how, json.dumps({**settings, "files": files})],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shard = max(os.path.getsize(folder / file) for file in files)
    return found["growth"], found["home"] + shard + OTHER_BYTES


@pytest.mark.cpu_only("the pretend device's memory is the process's own")
@pytest.mark.parametrize(
    ("bfloat16", "trains"),
    [
        pytest.param(False, False, marks=pytest.mark.rest),
        pytest.param(True, True, marks=pytest.mark.long),
        pytest.param(False, True, marks=pytest.mark.long),
    ],
)
def test_the_process_grows_by_no_more_than_the_plan_and_a_shard(large, bfloat16, trains):
    found, most = growth(large, "streamed", bfloat16=bfloat16, trains=trains)
    assert found <= most, (found / MIB, most / MIB)
    if not trains:
        found, most = growth(large, "whole", bfloat16=bfloat16, trains=trains)
        assert found > most, "the control arm has the model twice"
