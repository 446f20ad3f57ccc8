"""Moments in fewer bits, as a user meets them: the same bits in any window, units and drafts; plain tensors in every
checkpoint; and a run that is resumed goes on as if nothing had happened.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by

from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    OPTIMIZERS,
    Net,
    Side,
    adamw,
    assert_moved,
    both,
    loss_of,
    new_side,
    state_tensors,
    wrap_side,
)
from tests.ranks import assert_fine, in_turn_on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

REDUCED = ["bf16", "8bit"]
reduced = pytest.mark.parametrize("state_dtype", REDUCED)
dtypes = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16 weights"])
optimizers = pytest.mark.parametrize("optimizer", ["adamw", "momentum", "lion"])


def new(seed: int, optimizer: str = "adamw", *, wrapped: bool = True, **policy) -> Side:
    side = new_side(seed, OPTIMIZERS[optimizer])
    return wrap_side(side, **{"window": 3, **policy}) if wrapped else side


def all_bits(side: Side) -> dict[str, torch.Tensor]:
    """Weights, low bits, and the moments as the home keeps them."""
    found = dict(side.model.state_dict()) | state_tensors(side.optimizer)
    for number, values in enumerate(side.optimizer.state.values()):
        found |= {f"{number}.{key} at home": value for key, value in values.items() if isinstance(value, torch.Tensor)}
    return {key: value.clone() for key, value in found.items()}


# ---- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@reduced
@dtypes
@optimizers
def test_any_window_units_and_drafts_give_the_same_bits(optimizer, dtype, state_dtype):
    results = []
    for policy in (
        {"window": "auto", "update": "blocking"},
        {"window": 2},
        {"units": ["blocks.*.expand", "blocks.*.norm"]},
        {"draft_memory": "64MiB"},
        {"draft_memory": "64MiB", "units": ["blocks.*.expand"]},
    ):
        side = new(0, optimizer, state_dtype=state_dtype, dtype=dtype, **policy)
        before = {key: value.clone() for key, value in side.model.state_dict().items()}
        side.train(0, 5)
        wrapped_by(side.model).context.engine.idle()
        results.append(all_bits(side))
        assert sum(not torch.equal(before[key], results[-1][key]) for key in before) > len(before) / 2
        report = noria.report(side.model)
        assert report.ledger_agrees, str(report)
        if "draft_memory" in policy:
            assert report.drafts["kept"] > 0
        assert_moved(side.model, None)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@reduced
def test_another_seed_gives_other_bits_and_fp32_does_not_look_at_it(state_dtype):
    def trained(seed, state):
        side = new(0, state_dtype=state, rounding_seed=seed)
        side.train(0, 3)
        return all_bits(side)

    first, second = trained(1, state_dtype), trained(2, state_dtype)
    assert any(not torch.equal(first[key], second[key]) for key in first)
    assert_same_bits(trained(1, "fp32"), trained(2, "fp32"))


@reduced
def test_what_the_user_does_between_backward_and_step_counts(state_dtype):
    """Drafts are dropped or redone, state is edited, replaced and deleted; a twin without drafts does the same."""

    def journey(side):
        weight = side.model.blocks[2].expand.weight
        for number in range(9):
            loss_of(side.model, number).backward()
            wrapped_by(side.model).context.engine.idle()
            state = side.optimizer.state
            if number == 2:
                torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05)
            elif number == 3:
                state[weight]["exp_avg"].zero_()
            elif number == 4:
                state[weight]["exp_avg"] = torch.full(weight.shape, 1e-3)
            elif number == 5:
                del state[weight]
            elif number == 6:
                side.optimizer.load_state_dict(side.optimizer.state_dict())
            elif number == 7:
                side.optimizer.param_groups[0]["lr"] *= 0.5
            side.optimizer.step()
            side.optimizer.zero_grad()
        for key, value in state[weight].items():
            side.keep(key, value)

    both(
        journey,
        kernel="fused",
        window=3,
        hostility=HOSTILE,
        state_dtype=state_dtype,
        draft_memory="64MiB",
    )


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@reduced
@dtypes
@optimizers
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(optimizer, dtype, state_dtype, tmp_path):
    policy = {"state_dtype": state_dtype, "dtype": dtype}
    straight = new(0, optimizer, **policy)
    straight.train(0, 3)
    noria.save(tmp_path / "run.pt", straight.model, straight.optimizer)
    at_home = all_bits(straight)
    resumed = new(9, optimizer, **policy)
    resumed.train(5, 6)
    noria.load(tmp_path / "run.pt", resumed.model, resumed.optimizer)
    assert_same_bits(all_bits(resumed), at_home)
    for side in (straight, resumed):
        side.train(3, 6)
    assert_same_bits(all_bits(resumed), all_bits(straight))


@optimizers
def test_8bit_state_dicts_hold_floats_under_torchs_own_keys(optimizer):
    plain, ours = new(0, optimizer, wrapped=False), new(0, optimizer, state_dtype="8bit")
    for side in (plain, ours):
        side.train(0, 1)
    for theirs, mine in zip(
        plain.optimizer.state_dict()["state"].values(), ours.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert [key for key in mine if key != "rounding_step"] == list(theirs)
        for key, value in theirs.items():
            assert (mine[key].dtype, mine[key].shape, mine[key].stride()) == (value.dtype, value.shape, value.stride())
            if key != "step":  # one rounding: less than the gap between two codes
                torch.testing.assert_close(mine[key], value.cpu(), rtol=1 / 8, atol=2.0**-18 * float(value.abs().max()))
    for values in ours.optimizer.state.values():
        assert {value.dtype for key, value in values.items() if key.startswith(("exp_avg", "momentum"))} <= {
            torch.int8,
            torch.uint8,
            torch.float32,
        }


def saved(side, path):
    noria.save(path, side.model, side.optimizer)
    return torch.load(path, weights_only=True)["optimizer"]


@dtypes
@optimizers
def test_files_keep_the_codes_of_8bit_moments(optimizer, dtype, tmp_path):
    side = new(0, optimizer, state_dtype="8bit", dtype=dtype)
    side.train(0, 3)
    held = [dict(values) for values in side.optimizer.state.values()]
    state = saved(side, tmp_path / "run.pt")
    assert state["noria"] == {"moments": "8bit", "block": 256, "version": 2}
    num_codes = 0
    for values, own in zip(state["state"].values(), held, strict=True):
        moments = [key for key, value in own.items() if getattr(value, "dtype", None) in (torch.int8, torch.uint8)]
        num_codes += len(moments)
        assert all(isinstance(values[key], str) for key in moments)  # a plain optimizer finds words, rather than codes
        for key in moments:
            assert_same_bits({key: values[f"{key}_codes"]}, {key: own[key].cpu()})
            assert_same_bits({key: values[f"{key}_scales"]}, {key: own[f"{key}_scales"].cpu()})
    assert num_codes
    floats = side.optimizer.state_dict()
    plain = noria.plain_state_dict(state)
    assert plain.keys() == floats.keys() and plain["param_groups"] == floats["param_groups"]
    for number, values in floats["state"].items():
        assert plain["state"][number].keys() == values.keys()
        for key, value in values.items():
            assert_same_bits({key: torch.as_tensor(plain["state"][number][key])}, {key: torch.as_tensor(value)})
    assert noria.plain_state_dict(floats) == floats


@pytest.mark.parametrize("to", ["fp32", "bf16", "8bit", "plain PyTorch", "torch"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_every_optimizer_loads_a_file_of_codes(optimizer, to, tmp_path):
    """What comes of it is what comes of the floats that the codes stand for."""
    one = new(0, optimizer, state_dtype="8bit")
    one.train(0, 3)
    state = saved(one, tmp_path / "run.pt")
    sides = []
    for seed in (1, 2):
        if to == "plain PyTorch":
            sides.append(new(seed, optimizer, wrapped=False))
        else:
            sides.append(new(seed, optimizer, **({"kernel": "torch"} if to == "torch" else {"state_dtype": to})))
    noria.load(tmp_path / "run.pt", sides[0].model, sides[0].optimizer)
    sides[1].model.load_state_dict(one.model.state_dict())
    sides[1].optimizer.load_state_dict(noria.plain_state_dict(state))
    assert_same_bits(*(state_tensors(side.optimizer) for side in sides))
    for side in sides:
        side.train(3, 5)
    assert_same_bits(*(side.model.state_dict() for side in sides))
    assert_same_bits(*(state_tensors(side.optimizer) for side in sides))


@pytest.mark.parametrize("to", ["fp32", "8bit"])
def test_a_file_of_an_older_versions_codes_loads_as_the_floats_that_it_read(to):
    """The older version wrote the file. It holds the codes, and the floats that the older version made of them."""
    old = torch.load(Path(__file__).with_name("codes_of_version_1.pt"), weights_only=True)
    model = torch.nn.Linear(40, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    noria.wrap(model, optimizer, device="cpu", state_dtype=to)
    assert old["coded"]["noria"]["version"] == 1
    for number, values in noria.plain_state_dict(old["coded"])["state"].items():
        assert_same_bits(values, old["plain"]["state"][number])
    loaded = []
    for state in old.values():
        optimizer.load_state_dict(state)
        loaded.append(state_tensors(optimizer))
    assert_same_bits(*loaded)


def loads_codes(rank: int, size: int, path: str) -> None:
    """Ranks count blocks inside of their shards, so that they take floats."""
    side = new(1, state_dtype="fp32")
    noria.load(path, side.model, side.optimizer)
    found = side.optimizer.state_dict()["state"]
    wanted = noria.plain_state_dict(torch.load(path, weights_only=True)["optimizer"])["state"]
    for number, values in wanted.items():
        assert_same_bits({key: found[number][key].cpu() for key in values}, values)
    side.train(3, 4)


def test_ranks_load_a_file_of_codes(tmp_path):
    one = new(0, state_dtype="8bit")
    one.train(0, 3)
    noria.save(tmp_path / "run.pt", one.model, one.optimizer)
    found = in_turn_on_ranks(2, {"loads": (loads_codes, (str(tmp_path / "run.pt"),))})
    assert_fine(found, "loads")


def test_an_unknown_format_of_codes_is_refused_before_anything_changes(tmp_path):
    side = new(0, "adamw", state_dtype="8bit")
    side.train(0, 2)
    state = saved(side, tmp_path / "run.pt")
    state["noria"]["version"] = 3
    before = all_bits(side)
    for act in (side.optimizer.load_state_dict, noria.plain_state_dict):
        with pytest.raises(noria.UsageError, match=r"'version': 2.*'version': 3.*version of noria"):
            act(state)
    assert_same_bits(all_bits(side), before)


@optimizers
def test_plain_optimizers_that_load_codes_by_themselves_raise(optimizer, tmp_path):
    one, plain = new(0, optimizer, state_dtype="8bit"), new(0, optimizer, wrapped=False)
    one.train(0, 2)
    plain.optimizer.load_state_dict(saved(one, tmp_path / "run.pt"))
    with pytest.raises((AttributeError, TypeError)):
        plain.train(2, 3)


def test_codes_without_their_scales_are_refused(tmp_path):
    one = new(0, "adamw", state_dtype="8bit")
    one.train(0, 2)
    state = saved(one, tmp_path / "run.pt")
    state["state"][0]["exp_avg_scales"] = state["state"][0]["exp_avg_scales"][:1]
    with pytest.raises(noria.UsageError, match="scales in fp32"):
        noria.plain_state_dict(state)


def test_hooks_of_the_state_dict_see_floats_in_files_too(tmp_path):
    side = new(0, "adamw", state_dtype="8bit")
    side.train(0, 2)
    seen = []

    def look(optimizer, state):
        seen.append(state["state"][0]["exp_avg"].dtype)

    side.optimizer.register_state_dict_post_hook(look)
    assert "noria" not in saved(side, tmp_path / "run.pt")
    assert seen == [torch.float32]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("to", ["fp32", "bf16", "8bit", "plain PyTorch", "torch"])
@pytest.mark.parametrize("source", ["fp32", "bf16", "8bit", "plain PyTorch"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_every_format_reads_the_state_of_every_other(optimizer, source, to):
    def of(kind, seed):
        if kind == "plain PyTorch":
            return new(seed, optimizer, wrapped=False)
        return new(seed, optimizer, **({"kernel": "torch"} if kind == "torch" else {"state_dtype": kind}))

    one, other = of(source, 0), of(to, 1)
    one.train(0, 3)
    other.model.load_state_dict(one.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))  # plain ones would share their buffers
    first, second = state_tensors(one.optimizer), state_tensors(other.optimizer)
    assert first.keys() == second.keys()
    for key, value in first.items():
        gap = {"bf16": 2.0**-8, "8bit": 1 / 16}.get(to, 0.0)
        atol = 2.0**-19 * float(value.abs().max()) if to == "8bit" else 0.0
        torch.testing.assert_close(second[key].float().cpu(), value.float().cpu(), rtol=gap, atol=atol)
    for side in (one, other):
        side.train(3, 5)
    for (key, value), theirs in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(theirs.cpu(), value.cpu(), rtol=0.1, atol=0.05, msg=key)


@pytest.mark.cpu_only("a copied optimizer has its state on the CPU, and its parameters where the model's are")
@reduced
@optimizers
def test_unwrap_and_pickle_give_plain_optimizers_that_train_on(optimizer, state_dtype):
    side = new(0, optimizer, state_dtype=state_dtype)
    side.train(0, 3)
    values = {key: value.float() for key, value in state_tensors(side.optimizer).items()}
    with noria.materialize(side.model, read_only=True):
        copied = pickle.loads(pickle.dumps(side.optimizer))
        deep = copy.deepcopy(side.optimizer)
    noria.unwrap(side.model, side.optimizer)
    for made in (copied, deep, side.optimizer):
        assert_same_bits({key: value.clone() for key, value in state_tensors(made).items()}, values)
        for parameter in (p for group in made.param_groups for p in group["params"]):
            parameter.grad = torch.ones_like(parameter)
        before = made.param_groups[0]["params"][0].detach().clone()
        made.step()
        assert not torch.equal(made.param_groups[0]["params"][0], before)
    noria.wrap(side.model, side.optimizer, device=DEVICE, window=3, state_dtype=state_dtype)
    side.train(3, 5)


# ---- memory, names and misuse --------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("draft_memory", [0, "64MiB"])
def test_moments_take_a_half_and_a_quarter_to_the_byte(dtype, draft_memory):
    rows = {}
    for state_dtype in ("fp32", "bf16", "8bit"):
        side = new(0, state_dtype=state_dtype, dtype=dtype, draft_memory=draft_memory)
        side.train(0, 3)
        report = noria.report(side.model)
        assert report.ledger_agrees, str(report)
        rows[state_dtype] = {row.purpose: row.taken for row in report.ledger}
        assert ("with moments in" in report.kernels[0]) == (state_dtype != "fp32")
        assert report.kernels[0] in str(wrapped_by(side.model).context.plan)
    for purpose in ("first moments", "second moments"):
        assert rows["fp32"][purpose] == 2 * rows["bf16"][purpose] == 4 * rows["8bit"][purpose] > 0
        scales = purpose.removesuffix("s") + " scales"
        assert scales not in rows["fp32"] and scales not in rows["bf16"]
        sizes = [
            -(-4 * sum(-(-p.numel() // 256) for p in members) // 512) * 512
            for members in ([s.parameter for s in unit.parameters] for unit in wrapped_by(side.model).context.units)
        ]
        assert rows["8bit"][scales] == sum(sizes)


def test_what_torch_updates_keeps_its_own_state_and_the_plan_says_so():
    model = Net()
    chosen = list(model.blocks[1].parameters())
    others = [p for p in model.parameters() if all(p is not each for each in chosen)]
    pair = [adamw(others), torch.optim.Adagrad(chosen, lr=0.01)]
    noria.wrap(model, pair, device=DEVICE, window=3, state_dtype="8bit")
    for number in range(3):
        loss_of(model, number).backward()
        for each in pair:
            each.step()
            each.zero_grad()
    notes = [note for note in noria.report(model).notes if "8bit" in note]
    assert len(notes) == 1 and notes[0].startswith("Adagrad keeps its own state") and "1 of 1 units" in notes[0]
    assert all(values["sum"].dtype is torch.float32 for values in pair[1].state.values())
    assert all(values["exp_avg"].dtype is torch.int8 for values in pair[0].state.values())


def test_momentum_that_is_turned_on_later_is_fp32_and_outside_of_the_home():
    def journey(side):
        side.train(0, 2)
        side.optimizer.param_groups[0]["momentum"] = 0.9
        side.train(2, 5)
        assert all(values["momentum_buffer"].dtype is torch.float32 for values in side.optimizer.state.values())

    both(journey, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), kernel="fused", state_dtype="8bit")


def test_parameters_that_are_not_contiguous_keep_their_own_order():
    """Channels last: blocks and random bits follow the order in memory."""

    class Images(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.second = torch.nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last)

        def forward(self, x):
            return self.second(self.first(x).relu()).square().mean()

    for state_dtype in REDUCED:
        torch.manual_seed(0)
        model = Images()
        optimizer = adamw(model.parameters())
        noria.wrap(model, optimizer, device=DEVICE, state_dtype=state_dtype)
        for _ in range(3):
            model(torch.ones(2, 3, 8, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = {key: value.clone() for key, value in state_tensors(optimizer).items()}
        at_home = [{k: v.clone() for k, v in values.items()} for values in optimizer.state.values()]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_same_bits({key: value.clone() for key, value in state_tensors(optimizer).items()}, before)
        for values, others in zip(optimizer.state.values(), at_home, strict=True):
            assert_same_bits(values, others)


@reduced
def test_torchs_own_kernel_with_fewer_bits_is_refused(state_dtype):
    with pytest.raises(
        noria.UsageError, match=r'expected state_dtype="fp32" with kernel="torch".*Remedy: leave kernel'
    ):
        noria.wrap(Net(), None, device=DEVICE, kernel="torch", state_dtype=state_dtype)
