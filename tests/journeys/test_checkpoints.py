"""Checkpoints are torch's: plain tensors under the original names, exchanged with plain PyTorch both ways; and a run
that was saved and resumed has the bits of one that never stopped.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re

import noria
import numpy as np
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from safetensors.torch import load_file, save_file
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    LATE_UPDATES,
    VOCAB,
    Net,
    Side,
    adamw,
    assert_moved,
    both,
    go_on_here,
    lion,
    loss_of,
    new_side,
    sgd,
    state_tensors,
    wrap_side,
)

KINDS = {
    "fp32 torch": {"kernel": "torch"},
    "fp32 fused": {"kernel": "fused"},
    "bf16 torch": {"kernel": "torch", "dtype": torch.bfloat16},
    "bf16 fused": {"kernel": "fused", "dtype": torch.bfloat16},
}
kinds = pytest.mark.parametrize("kind", KINDS)


pytestmark = pytest.mark.usefixtures("one_thread")


def wrapped(seed=0, optimizer=adamw, model=Net, **policy):
    policy.setdefault("kernel", "torch")
    hostility = LATE_UPDATES if policy["kernel"] == "fused" else HOSTILE
    return wrap_side(new_side(seed, optimizer, model), hostility, window=2, **policy)


def same(a: Side, b: Side) -> None:
    assert_same_bits(a.model.state_dict(), b.model.state_dict())
    assert_same_bits(state_tensors(a.optimizer), state_tensors(b.optimizer))


def through_a_file(contents):
    file = io.BytesIO()
    torch.save(contents, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Loaded:
    """The part of an optimizer that its checkpoint holds."""

    def __init__(self, states):
        self.states = states

    def state_dict(self):
        return self.states


def both_states(side):
    return through_a_file({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()})


def load(side, states):
    side.model.load_state_dict(states["model"])
    side.optimizer.load_state_dict(states["optimizer"])


# ---- resume ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@kinds
@pytest.mark.parametrize("by", ["state_dict", "noria.save"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(kind, by, tmp_path):
    straight = wrapped(**KINDS[kind])
    straight.train(0, 6)
    first = wrapped(**KINDS[kind])
    first.train(0, 3)
    second = wrapped(seed=99, **KINDS[kind])  # other weights: all must come from the checkpoint
    if by == "state_dict":
        load(second, both_states(first))
    else:
        noria.save(tmp_path / "run.pt", first.model, first.optimizer, step=3, note="halfway")
        assert noria.load(tmp_path / "run.pt", second.model, second.optimizer) == {
            "step": 3,
            "note": "halfway",
        }
    second.train(3, 6)
    same(second, straight)
    for side in (straight, second):
        assert_moved(side.model)


class WithScale(Net):
    """As CLIP has it: a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


@pytest.mark.parametrize("kind", [*KINDS, "8bit", "8bit of bf16"])
def test_a_run_with_a_parameter_without_dimensions_is_resumed(kind, tmp_path):
    low = {"state_dtype": "8bit", "kernel": "fused", "dtype": torch.bfloat16 if kind == "8bit of bf16" else None}
    policy = KINDS.get(kind, low)
    straight = wrapped(model=WithScale, **policy)
    straight.train(0, 3)
    noria.save(tmp_path / "run.pt", straight.model, straight.optimizer)
    resumed = wrapped(seed=9, model=WithScale, **policy)
    noria.load(tmp_path / "run.pt", resumed.model, resumed.optimizer)
    same(resumed, straight)
    for side in (straight, resumed):
        side.train(3, 6)
    same(resumed, straight)


@pytest.mark.sampled(5)
@kinds
@pytest.mark.parametrize("order", ["optimizer first", "between two models", "model last again"])
def test_model_and_optimizer_are_loaded_in_any_order(kind, order):
    straight = wrapped(**KINDS[kind])
    straight.train(0, 3)
    states = both_states(straight)
    straight.train(3, 6)
    resumed = wrapped(seed=99, **KINDS[kind])
    if order != "optimizer first":
        other = wrapped(seed=7, **KINDS[kind]) if order == "between two models" else straight
        resumed.model.load_state_dict(through_a_file(other.model.state_dict()))
    resumed.optimizer.load_state_dict(states["optimizer"])
    if order == "model last again":
        resumed.model.load_state_dict(through_a_file(straight.model.state_dict()))
    resumed.model.load_state_dict(states["model"])
    assert_same_bits(state_tensors(resumed.optimizer), state_tensors(Loaded(states["optimizer"])))
    resumed.train(3, 6)
    same(resumed, straight)


@pytest.mark.parametrize("kind", ["bf16 torch", "bf16 fused"])
def test_an_optimizer_state_that_belongs_to_other_weights_spoils_none(kind):
    trained, fresh = wrapped(**KINDS[kind]), wrapped(seed=4, **KINDS[kind])
    trained.train(0, 3)
    fresh.model.load_state_dict({"head.bias": torch.zeros(23)}, strict=False)
    fresh.optimizer.load_state_dict(through_a_file(trained.optimizer.state_dict()))
    assert not fresh.model.state_dict()["head.bias"].any(), "values are the model's"
    fresh.train(0, 2)
    assert fresh.model.state_dict()["head.bias"].all(), "every element moves"
    assert all(value.isfinite().all() for value in fresh.model.state_dict().values())


@kinds
def test_loading_in_the_middle_of_training_takes_the_run_back(kind):
    side = wrapped(**KINDS[kind])
    side.train(0, 2)
    states = both_states(side)
    side.train(2, 4)
    after = both_states(side)
    side.train(7, 9)
    load(side, states)
    side.train(2, 4)
    assert_same_bits(side.model.state_dict(), after["model"])
    assert_same_bits(
        state_tensors(side.optimizer),
        {f"{n}.{k}": v for n, each in after["optimizer"]["state"].items() for k, v in each.items()},
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernels_read_each_others_checkpoints(dtype):
    torch_side, fused_side = wrapped(**KINDS[f"{dtype} torch"]), wrapped(**KINDS[f"{dtype} fused"])
    torch_side.train(0, 3)
    states = both_states(torch_side)
    load(fused_side, states)
    same(fused_side, torch_side)
    assert (dtype == "bf16") == any("low_bits" in each for each in states["optimizer"]["state"].values())
    fused_side.train(3, 5)
    back = wrapped(seed=5, **KINDS[f"{dtype} torch"])
    load(back, both_states(fused_side))
    same(back, fused_side)
    straight = wrapped(seed=6, **KINDS[f"{dtype} fused"])
    load(straight, both_states(fused_side))
    straight.train(5, 7)
    fused_side.train(5, 7)
    same(straight, fused_side)


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_checkpoints_are_exchanged_with_plain_pytorch(optimizer):
    plain, ours = new_side(optimizer=optimizer), wrapped(seed=1, optimizer=optimizer)
    plain.train(0, 3)
    load(ours, both_states(plain))
    same(ours, plain)
    ours.train(3, 6)
    plain.train(3, 6)
    same(ours, plain)
    fresh = new_side(seed=2, optimizer=optimizer)
    load(fresh, both_states(ours))
    same(fresh, plain)
    fresh.train(6, 8)
    plain.train(6, 8)
    ours.train(6, 8)
    same(fresh, plain)
    same(ours, plain)
    assert_moved(ours.model)


def test_state_dicts_are_those_of_torch_in_names_order_shape_and_metadata():
    def journey(side):
        side.train(0, 2)
        names = list(side.model.state_dict())
        side.keep("names", torch.tensor([hash(name) % 2**31 for name in names]))
        assert names == [name for name, _ in side.model.named_parameters()]
        state = side.optimizer.state_dict()
        assert state["state"].keys() == dict(enumerate(names)).keys()
        assert list(state["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]
        assert side.model.state_dict()._metadata.keys() >= {"", "blocks.0"}
        assert not any(value.requires_grad for value in side.model.state_dict().values())

    both(journey)


def test_strict_and_partial_loading_say_what_torch_says():
    def journey(side):
        side.train(0, 1)
        partial = {"head.weight": torch.full((23, 16), 0.5), "nonsense": torch.zeros(1)}
        result = side.model.load_state_dict(partial, strict=False)
        assert result.unexpected_keys == ["nonsense"]
        assert "embed.weight" in result.missing_keys and "head.weight" not in result.missing_keys
        with pytest.raises(RuntimeError, match="Unexpected key"):
            side.model.load_state_dict(partial)
        with pytest.raises(RuntimeError, match="size mismatch"):
            side.model.load_state_dict({"head.weight": torch.zeros(2, 2)}, strict=False)
        side.train(1, 3)

    both(journey)


def test_the_state_dict_of_a_submodule_is_saved_and_loaded_by_itself():
    def journey(side):
        side.train(0, 2)
        saved = through_a_file(side.model.blocks[1].state_dict())
        assert next(iter(saved)) == "norm.weight"
        side.train(2, 4)
        side.model.blocks[1].load_state_dict(saved)
        side.model.blocks[3].load_state_dict(saved)
        side.train(4, 6)

    both(journey)


def test_safetensors_files(tmp_path):
    plain, ours = new_side(), wrapped()
    plain.train(0, 2)
    ours.train(0, 2)
    save_file(ours.model.state_dict(), tmp_path / "ours.safetensors")
    assert_same_bits(load_file(tmp_path / "ours.safetensors"), plain.model.state_dict())
    ours.train(2, 4)
    ours.model.load_state_dict(load_file(tmp_path / "ours.safetensors"))
    assert_same_bits(ours.model.state_dict(), plain.model.state_dict())


def test_files_hold_only_the_bytes_of_the_tensors_in_them():
    side = wrapped(kernel="fused", dtype=torch.bfloat16)
    side.train(0, 1)
    for contents in (side.model.state_dict(), side.optimizer.state_dict(), side.model.blocks[0].state_dict()):
        tensors = []
        torch.utils._pytree.tree_map_only(torch.Tensor, tensors.append, contents)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert needed == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        file = io.BytesIO()
        torch.save(contents, file)
        assert needed < file.tell() < needed + 1024 * (1 + len(tensors))


def test_an_interrupted_save_leaves_the_old_file(tmp_path):
    side = wrapped()
    noria.save(tmp_path / "run.pt", side.model, side.optimizer)
    before = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(Exception, match="pickle"):
        noria.save(tmp_path / "run.pt", side.model, side.optimizer, wrong=lambda: None)
    assert (tmp_path / "run.pt").read_bytes() == before


def test_a_checkpoint_without_what_is_asked_for_is_refused(tmp_path):
    side = wrapped()
    noria.save(tmp_path / "model.pt", side.model)
    with pytest.raises(noria.UsageError, match="a checkpoint with 'optimizer'"):
        noria.load(tmp_path / "model.pt", side.model, side.optimizer)
    plain = new_side()
    noria.save(tmp_path / "plain.pt", plain.model, plain.optimizer)
    noria.load(tmp_path / "plain.pt", side.model, side.optimizer)


@pytest.mark.parametrize(
    "extra",
    [{"best": np.float64(1)}, {"history": {"losses": [1.0, np.float32(2)]}}, {"lr": None}],
    ids=["a numpy number", "one inside", "one in the optimizer"],
)
def test_what_could_not_be_loaded_is_not_saved(extra, tmp_path):
    path = tmp_path / "run.pt"
    side = wrapped()
    side.train(0, 1)
    noria.save(path, side.model, side.optimizer, step=1)
    name = next(iter(extra))
    if name == "lr":
        side.optimizer.param_groups[0]["lr"], name, extra = np.float64(0.1), "optimizer", {}
    with pytest.raises(noria.UsageError, match=f"'{name}'.*convert"):
        noria.save(path, side.model, side.optimizer, **extra)
    assert os.listdir(tmp_path) == ["run.pt"]
    assert noria.load(path, side.model, side.optimizer) == {"step": 1}


def test_lists_are_saved_and_loaded_as_they_are_wrapped(tmp_path):
    def pair(seed):
        sides = [new_side(seed), new_side(seed + 1)]
        models, optimizers = [side.model for side in sides], [side.optimizer for side in sides]
        noria.wrap(models, optimizers, device=DEVICE, window=2)
        return sides, models, optimizers

    sides, models, optimizers = pair(0)
    for side in sides:
        side.train(0, 2)
    noria.save(tmp_path / "both.pt", models, optimizers, note="two")
    others, *loaded = pair(10)
    assert noria.load(tmp_path / "both.pt", *loaded) == {"note": "two"}
    for side, other in zip(sides, others, strict=True):
        side.train(2, 4)
        other.train(2, 4)
        same(other, side)
    with pytest.raises(noria.UsageError, match="2 of 'model'"):
        noria.load(tmp_path / "both.pt", models[0])


# ---- the optimizer's state, seen directly ------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_optimizer_state_is_current_whenever_one_looks(kernel):
    def journey(side):
        weight = side.model.blocks[3].expand.weight
        for number in range(3):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            state = side.optimizer.state
            if number == 0:
                assert weight in state
                assert len(state) == len(list(side.model.parameters()))
                assert {id(p) for p in state} == {id(p) for p in side.model.parameters()}
            side.keep(f"first moment {number}", state[weight]["exp_avg"])
            side.keep(f"step {number}", state.get(weight)["step"])
            side.keep(f"sum {number}", sum(each["exp_avg_sq"].sum() for each in state.values()))
            side.keep(f"sum by items {number}", sum(each["exp_avg"].sum() for _, each in state.items()))
            side.optimizer.zero_grad()

    both(journey, kernel=kernel, hostility=LATE_UPDATES)


def edit(optimizer):
    for each in optimizer.state.values():
        each["exp_avg"].mul_(0.5)


def replace(optimizer):
    for each in optimizer.state.values():
        each["exp_avg"] = torch.full_like(each["exp_avg"], 0.01)
        each["step"] = torch.tensor(1.0)


def clear(optimizer):
    optimizer.state.clear()


def forget_some(optimizer):
    for parameter in optimizer.param_groups[0]["params"][::2]:
        del optimizer.state[parameter]


def begin_anew(optimizer):
    optimizer.state = type(torch.optim.SGD([torch.zeros(1)]).state)(dict)


def of_one_shape(optimizer):
    """Lists of parameters, each with the parameters whose state its own goes to."""
    by_shape = {}
    for parameter in optimizer.param_groups[0]["params"]:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    return [(found, found[1:] + found[:1]) for found in by_shape.values()]


def exchange(optimizer):
    for found, targets in of_one_shape(optimizer):
        for target, state in zip(targets, [optimizer.state[each] for each in found], strict=True):
            optimizer.state[target] = state


def exchange_tensors(optimizer):
    for found, targets in of_one_shape(optimizer):
        for target, value in zip(targets, [optimizer.state[each]["exp_avg"] for each in found], strict=True):
            optimizer.state[target]["exp_avg"] = value


def load_exchanged(optimizer):
    numbers = {parameter: number for number, parameter in enumerate(optimizer.param_groups[0]["params"])}
    found = optimizer.state_dict()
    exchanged = {
        numbers[target]: found["state"][numbers[each]]
        for parameters, targets in of_one_shape(optimizer)
        for each, target in zip(parameters, targets, strict=True)
    }
    optimizer.load_state_dict({**found, "state": dict(sorted(exchanged.items()))})


def replace_in_place(optimizer):
    for each in optimizer.state.values():
        each["exp_avg"].fill_(0.01)
        each["step"].fill_(1.0)


def clear_in_place(optimizer, stride=1):
    for parameter in optimizer.param_groups[0]["params"][::stride]:
        for value in optimizer.state[parameter].values():
            value.zero_()


def forget_some_in_place(optimizer):
    clear_in_place(optimizer, 2)


def exchange_in_place(optimizer, keys=("exp_avg", "exp_avg_sq", "step")):
    for found, targets in of_one_shape(optimizer):
        values = [{key: optimizer.state[each][key].clone() for key in keys} for each in found]
        for target, each in zip(targets, values, strict=True):
            for key in keys:
                optimizer.state[target][key].copy_(each[key])


def exchange_tensors_in_place(optimizer):
    exchange_in_place(optimizer, ("exp_avg",))


IN_PLACE = {
    replace: replace_in_place,
    exchange: exchange_in_place,
    exchange_tensors: exchange_tensors_in_place,
    load_exchanged: exchange_in_place,
    clear: clear_in_place,
    forget_some: forget_some_in_place,
    begin_anew: clear_in_place,
}


@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_state_of_the_users_own_without_a_storage_is_let_be(kernel):
    def journey(side):
        side.train(0, 2)
        for each in side.optimizer.state.values():
            each["mask"] = torch.eye(3, device="cpu").to_sparse()
        side.train(2, 4)
        assert all(each.pop("mask").is_sparse for each in side.optimizer.state.values())

    both(journey, kernel=kernel)


@pytest.mark.parametrize("kernel", ["torch", "fused"])
@pytest.mark.parametrize(
    "change", [edit, replace, clear, forget_some, begin_anew, exchange, exchange_tensors, load_exchanged]
)
def test_what_the_user_does_to_optimizer_state_counts(change, kernel):
    def journey(side):
        for number in range(5):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            if number in (1, 2):
                # The fused kernel has no plain twin; its quiet twin says the same thing in another way.
                quiet = kernel == "fused" and not side.is_wrapped
                (IN_PLACE.get(change, change) if quiet else change)(side.optimizer)
            side.optimizer.zero_grad()

    both(journey, kernel=kernel, hostility=LATE_UPDATES)


def test_a_wrapped_optimizer_has_the_name_of_a_plain_one():
    """Loggers call what they log after it."""
    side = wrapped()
    shown = repr(side.optimizer)
    assert type(side.optimizer).__name__ == "AdamW"
    noria.unwrap(side.model, side.optimizer)
    assert repr(side.optimizer) == shown


@pytest.mark.cpu_only("a copied optimizer has its state on the CPU, and its parameters where the model's are")
def test_a_wrapped_optimizer_is_pickled_as_a_plain_one():
    side = wrapped()
    side.train(0, 2)
    with noria.materialize(side.model, read_only=True):
        copied = pickle.loads(pickle.dumps(side.optimizer))
    assert_same_bits(state_tensors(copied), state_tensors(side.optimizer))
    assert isinstance(copied, torch.optim.AdamW)
    parameter = copied.param_groups[0]["params"][0]
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    copied.step()
    assert not torch.equal(parameter, before)
    side.train(2, 3)


# ---- materialize and unwrap --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32 torch", "fp32 fused"])
def test_edits_inside_materialize_are_kept(kind):
    def editing(side):
        return noria.materialize(side.model) if side.is_wrapped or KINDS[kind]["kernel"] == "fused" else torch.no_grad()

    def journey(side):
        average = None
        for step in range(3):
            side.train(10 * step, 10 * step + 2)
            with editing(side), torch.no_grad():
                values = [parameter.detach() for parameter in side.model.parameters()]
                average = [v.clone() for v in values] if average is None else average
                torch._foreach_lerp_(average, values, 0.5)
                if step == 1:
                    for parameter, mean in zip(side.model.parameters(), average, strict=True):
                        parameter.copy_(mean)
                nn.init.constant_(side.model.head.bias, float(step))
        for index, mean in enumerate(average):
            side.keep(f"average {index}", mean)

    both(journey, **KINDS[kind])


@pytest.mark.parametrize("kind", ["bf16 torch", "bf16 fused"])
def test_edits_of_bfloat16_weights_move_their_masters_and_no_others(kind):
    side, untouched = wrapped(**KINDS[kind]), wrapped(**KINDS[kind])
    side.train(0, 2)
    untouched.train(0, 2)
    before = both_states(side)
    with noria.materialize(side.model), torch.no_grad():
        side.model.head.weight[:3] = 0.75
    after = both_states(side)
    place = [name for name, _ in side.model.named_parameters()].index("head.weight")
    for number, state in after["optimizer"]["state"].items():
        low, old = state["low_bits"], before["optimizer"]["state"][number]["low_bits"]
        if number == place:
            assert not low[:3].any() and old[:3].any()
            assert torch.equal(low[3:], old[3:])
        else:
            assert torch.equal(low, old)
    side.train(2, 4)
    other = wrapped(seed=3, **KINDS[kind])
    load(other, after)
    other.train(2, 4)
    same(side, other)


def test_ema_models_that_torch_makes_of_a_materialized_model():
    def journey(side):
        side.train(0, 1)
        inside = noria.materialize(side.model, read_only=True) if side.is_wrapped else torch.no_grad()
        with inside:
            average = [p.detach().clone() for p in side.model.parameters()]
        side.train(1, 3)
        for mean, (_, value) in zip(average, side.model.state_dict().items(), strict=True):
            mean.lerp_(value.to(DEVICE), 0.1)
        for index, mean in enumerate(average):
            side.keep(f"average {index}", mean)

    both(journey)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save", "AveragedModel"])
def test_a_copy_made_inside_materialize_is_an_ordinary_model(how):
    def journey(side):
        side.train(0, 2)
        with noria.materialize(side.model, read_only=True) if side.is_wrapped else torch.no_grad():
            if how == "deepcopy":
                copied = copy.deepcopy(side.model)
            elif how == "AveragedModel":
                copied = torch.optim.swa_utils.AveragedModel(side.model).module
            else:
                file = io.BytesIO()
                torch.save(side.model, file)
                file.seek(0)
                copied = torch.load(file, weights_only=False)
        copied.to(DEVICE)  # deep copies are on the CPU
        other = Side(copied, adamw(copied.parameters()), False)
        other.train(5, 7)
        for name, value in copied.state_dict().items():
            side.keep(f"copy's {name}", value)
        copied.load_state_dict(side.model.state_dict())
        side.train(2, 4)
        with pytest.raises(noria.UsageError):
            noria.report(copied)

    both(journey)


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_unwrap_gives_plain_tensors_that_train_on(optimizer):
    def journey(side):
        side.train(0, 3)
        loss_of(side.model, 9).backward()
        if side.is_wrapped:
            assert_moved(side.model)
            assert noria.unwrap(side.model, side.optimizer) == (side.model, side.optimizer)
            go_on_here(side.model, side.optimizer)
        assert type(side.optimizer).__module__.startswith("torch.optim")
        side.keep_gradients("across unwrap")
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.train(3, 6)
        copy.deepcopy(side.model)
        pickle.loads(pickle.dumps(side.optimizer))

    both(journey, optimizer=optimizer, moved=False)


def test_a_model_may_be_wrapped_and_unwrapped_again_and_again():
    def journey(side):
        for turn in range(3):
            side.train(2 * turn, 2 * turn + 2)
            if side.is_wrapped:
                noria.unwrap(side.model, side.optimizer)
                with on_machine(hostility=HOSTILE):
                    noria.wrap(side.model, side.optimizer, device=DEVICE, window=2 + turn, kernel="torch")
        side.train(6, 8)

    both(journey, window=None)


def test_unwrap_after_a_failed_backward_and_with_updates_under_way():
    def journey(side):
        side.train(0, 2)
        handle = side.model.blocks[1].norm.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(side.model, 9).backward()
        handle.remove()
        side.optimizer.zero_grad()
        loss_of(side.model, 3).backward()
        side.optimizer.step()
        if side.is_wrapped:
            noria.unwrap(side.model, side.optimizer)
            go_on_here(side.model, side.optimizer)
        side.optimizer.zero_grad()
        side.train(4, 6)

    both(journey, moved=False)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("window", [2, None])
def test_what_is_written_through_a_state_dict_is_kept(window, dtype):
    """Loaders copy value by value into what `state_dict()` gives; copies on the device must not outlive it."""

    def journey(side):
        side.train(0, 2)
        for number in range(2):
            loss_of(side.model, 7)  # units lie on the device now
            values = side.model.state_dict()
            with torch.no_grad():
                values["blocks.1.expand.weight"].mul_(2.0)
                values["head.bias"].copy_(torch.full_like(values["head.bias"], 0.25))
            side.keep(f"after write {number}", loss_of(side.model, 8))
            side.train(10 + 3 * number, 12 + 3 * number)

    both(journey, window=window, dtype=dtype, kernel="torch", moved=window is not None)


def test_a_write_through_a_state_dict_under_a_bfloat16_policy_reaches_the_master():
    model = Net()
    optimizer = sgd(model.parameters(), lr=1e-6)
    noria.wrap(model, optimizer, device=DEVICE, window=2, dtype=torch.bfloat16, kernel="torch")
    with torch.no_grad():
        model.state_dict()["head.weight"].fill_(1.0)
    loss_of(model, 0).backward()
    optimizer.step()
    assert torch.equal(model.state_dict()["head.weight"], torch.ones_like(model.head.weight, device="cpu"))


def test_state_dict_gives_the_parameters_themselves_where_they_are_asked_for():
    model = Net()
    noria.wrap(model, adamw(model.parameters()), device=DEVICE, window=2)
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())
    model.head.bias = nn.Parameter(torch.ones_like(model.head.bias, device=DEVICE))
    assert torch.equal(model.state_dict()["head.bias"], torch.ones(VOCAB)), "the user's own parameter now"


@pytest.mark.parametrize("where", ["root", "block"])
def test_a_name_that_a_parameter_got_after_the_wrap_is_saved_and_loaded(where):
    def journey(side: Side) -> None:
        side.train(0, 2)
        module = side.model if where == "root" else side.model.blocks[3].norm
        module.alias = side.model.blocks[1].expand.weight
        saved = side.model.state_dict()
        for name in saved:
            if "alias" in name or name == "blocks.1.expand.weight":
                side.keep(f"saved {name}", saved[name])
        loaded = {name: value.clone() for name, value in saved.items()}
        for name in loaded:
            if "alias" in name or name == "blocks.1.expand.weight":
                loaded[name] += 1
        side.model.load_state_dict(loaded)
        del module.alias
        side.train(2, 5)

    both(journey)


def test_loaders_that_go_around_load_state_dict_leave_a_model_that_trains():
    def journey(side):
        side.train(0, 2)
        values = {name: value.clone() for name, value in side.model.state_dict().items()}
        values["blocks.2.norm.bias"] += 1

        def load(module, prefix=""):
            module._load_from_state_dict(values, prefix, {}, True, [], [], [])
            for name, child in module.named_children():
                load(child, f"{prefix}{name}.")

        load(side.model)
        side.train(2, 4)

    both(journey)


@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_a_load_inside_materialize_keeps_the_masters_exact(kernel):
    values = {name: torch.randn_like(value) for name, value in Net().state_dict().items()}

    def journey(side):
        side.train(0, 1)
        if side.is_wrapped:
            with noria.materialize(side.model):
                side.model.load_state_dict(values)
        else:
            side.model.load_state_dict(values)
        side.train(1, 3)

    both(journey, kernel=kernel, dtype=torch.bfloat16)


# ---- unwrapped, copied, and wrapped again ----


@pytest.mark.parametrize("fields", [{}, {"kernel": "torch"}, {"state_dtype": "8bit"}], ids=str)
def test_a_model_that_is_unwrapped_and_wrapped_again_keeps_its_masters(fields):
    """In 8 bits moments go through floats, which come back as the same codes."""
    sides = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = adamw(model.parameters())
        noria.wrap(model, optimizer, device=DEVICE, dtype=torch.bfloat16, **fields)
        for number in range(4):
            if again and number == 2:
                noria.unwrap(model, optimizer)
                assert any(values["low_bits"].any() for values in optimizer.state.values())
                noria.wrap(model, optimizer, device=DEVICE, dtype=torch.bfloat16, **fields)
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        sides.append({**model.state_dict(), **state_tensors(optimizer)})
    assert_same_bits(*sides)


def test_a_copy_of_a_wrapped_optimizer_has_its_masters_and_is_wrapped_as_what_it_was():
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, dtype=torch.bfloat16)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with noria.materialize(model):
        other, copied = copy.deepcopy((model, optimizer))
    assert all("low_bits" in values for values in copied.state_dict()["state"].values())
    noria.wrap(other, copied, device=DEVICE, dtype=torch.bfloat16)
    assert "fused" in noria.report(other).kernels[0]
    for each, its in ((model, optimizer), (other, copied)):
        loss_of(each, 1).backward()
        its.step()
        its.zero_grad()
    assert_same_bits(model.state_dict(), other.state_dict())
    assert_same_bits(state_tensors(optimizer), state_tensors(copied))


@pytest.mark.parametrize("copied", [None, "deepcopy", "pickle"])
@pytest.mark.parametrize("optimizer", [adamw, lion])
def test_an_optimizer_of_bfloat16_parameters_trains_on_in_plain_pytorch_once_torch_has_cast_its_moments(
    optimizer, copied
):
    side = wrapped(kernel="fused", dtype=torch.bfloat16, optimizer=optimizer)
    side.train(0, 3)
    if copied is None:
        noria.unwrap(side.model, side.optimizer)
        model, own = side.model, side.optimizer
    else:
        with noria.materialize(side.model, read_only=True):
            both = (side.model, side.optimizer)
            model, own = copy.deepcopy(both) if copied == "deepcopy" else pickle.loads(pickle.dumps(both))
    moments = [value for values in own.state.values() for key, value in values.items() if key.startswith("exp_avg")]
    assert {value.dtype for value in moments} == {torch.float32}, "a model may be wrapped again"
    plain = copy.deepcopy(model.to(DEVICE))
    twin = optimizer(plain.parameters())
    twin.load_state_dict(through_a_file(own.state_dict()))
    own.load_state_dict(own.state_dict())
    for each in (Side(model, own, False), Side(plain, twin, False)):
        each.train(3, 5)
    assert_same_bits(model.state_dict(), plain.state_dict())
    assert_same_bits(state_tensors(own), state_tensors(twin))
    wrap_side(Side(model, own, False), window=2, kernel="torch", dtype=torch.bfloat16)
    assert_same_bits(model.state_dict(), plain.state_dict())
    low_bits = [values["low_bits"] for values in own.state_dict()["state"].values()]
    assert not any(value.any() for value in low_bits), "the masters are what the plain steps left"
    loss_of(model, 5).backward()
    own.step()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    other = wrapped(seed=3, kernel="fused", dtype=torch.bfloat16, optimizer=optimizer)
    load(other, {"model": plain.state_dict(), "optimizer": twin.state_dict()})
    assert not any(values["low_bits"].any() for values in other.optimizer.state_dict()["state"].values())
    assert_same_bits(other.model.state_dict(), plain.state_dict())


# ---- state that was not planned for ----


def doubles(state, key):
    state[key] = state[key].double()


def larger(state, key):
    state[key] = state[key].new_full((400, 400), 7.0)


def smaller(state, key):
    state[key] = state[key][:1].clone()


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=1e-2)


@pytest.mark.parametrize("optimizer", [adagrad, sgd])
@pytest.mark.parametrize("of", ["one", "all"])
def test_state_of_another_dtype_stays_as_it_is_and_beside_it_nothing_changes(of, optimizer):
    key = "sum" if optimizer is adagrad else "momentum_buffer"

    def journey(side):
        side.train(0, 3)
        parameters = list(side.model.parameters())
        for parameter in parameters[3:4] if of == "one" else parameters:
            doubles(side.optimizer.state[parameter], key)
        side.train(3, 5)
        assert {each[key].dtype for each in side.optimizer.state.values()} >= {torch.float64}
        if side.is_wrapped:
            notes = noria.report(side.model).notes
            assert len(notes) == 1 and f"{key} of another shape or dtype than planned for" in notes[0]

    both(journey, optimizer=optimizer)


@pytest.mark.parametrize("change", [larger, smaller])
@pytest.mark.parametrize("by", ["load_state_dict", "assignment"])
def test_state_of_another_shape_is_refused_by_torchs_step_and_touches_no_other(by, change):
    def journey(side):
        side.train(0, 3)
        good = through_a_file(side.optimizer.state_dict())
        bad = copy.deepcopy(good)
        change(bad["state"][3], "exp_avg")
        if by == "load_state_dict":
            side.optimizer.load_state_dict(bad)
        else:
            change(side.optimizer.state[list(side.model.parameters())[3]], "exp_avg")
        for key, value in state_tensors(side.optimizer).items():
            assert_same_bits({key: value}, {key: state_tensors(Loaded(bad))[key]})
        loss_of(side.model, 3).backward()
        with pytest.raises(RuntimeError, match=r"size|shape"):
            side.optimizer.step()
            side.optimizer.state.values()
        side.optimizer.zero_grad()
        side.model.load_state_dict(Net().state_dict())
        side.optimizer.load_state_dict(good)
        side.kept.clear()
        side.train(4, 6)

    both(journey, update="blocking")


def test_the_optimizer_of_a_larger_model_is_taken_and_harms_nothing():
    larger = new_side(model=lambda: Net(width=128))
    larger.train(0, 1)

    def journey(side):
        side.train(0, 2)
        states = both_states(side)
        side.optimizer.load_state_dict(larger.optimizer.state_dict())
        assert_same_bits(state_tensors(side.optimizer), state_tensors(larger.optimizer))
        assert_same_bits(side.model.state_dict(), states["model"])
        side.optimizer.load_state_dict(states["optimizer"])
        side.train(2, 4)

    both(journey)


@pytest.mark.parametrize("optimizer", [adagrad, adamw])
def test_bfloat16_state_is_planned_for_as_the_fp32_that_it_becomes_beside_masters(optimizer):
    side = new_side(optimizer=optimizer, model=lambda: Net().bfloat16())
    side.train(0, 2)
    before = {key: value.float() for key, value in state_tensors(side.optimizer).items()}
    wrap_side(side, window=2, kernel="torch", dtype=torch.bfloat16)
    after = state_tensors(side.optimizer)
    assert_same_bits({key: after[key].clone() for key in before}, before)
    side.train(2, 4)
    assert not noria.report(side.model).notes


@pytest.mark.parametrize("change", ["double", "transposed", "expanded"])
def test_momentum_outside_of_the_home_may_be_replaced_by_any_of_its_shape(change):
    """The quiet twin gets the same values, as it would make the tensor itself."""

    def journey(side):
        side.train(0, 2)
        side.optimizer.param_groups[0]["momentum"] = 0.9
        side.train(2, 4)
        weight = side.model.blocks[2].expand.weight
        moment = side.optimizer.state[weight]["momentum_buffer"]
        value = {
            "double": moment.double(),
            "transposed": moment.t().contiguous().t(),
            "expanded": torch.full((1, 1), 0.01).expand(moment.shape),
        }[change]
        side.optimizer.state[weight]["momentum_buffer"] = value if side.is_wrapped else value.float().contiguous()
        side.train(4, 6)

    both(journey, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), kernel="fused")


def test_a_moment_that_is_replaced_by_another_view_of_itself_has_that_views_values():
    def journey(side):
        side.train(0, 2)
        weight = side.model.square.weight
        moment = side.optimizer.state[weight]["exp_avg"]
        side.optimizer.state[weight]["exp_avg"] = moment.t() if side.is_wrapped else moment.t().clone()
        side.train(2, 4)

    class Square(Net):
        def __init__(self):
            super().__init__()
            self.square = nn.Linear(16, 16)

        def forward(self, tokens):
            return super().forward(tokens) + self.square(self.embed(tokens)).mean()

    for kernel in ("torch", "fused"):
        both(journey, model=Square, kernel=kernel)


# ---- state that the fused kernels cannot read ----


def put(key, value):
    def change(state):
        state[key] = value

    return change


def without(key):
    def change(state):
        del state[key]

    return change


def of_another_optimizer(state):
    state["momentum_buffer"] = state.pop("exp_avg")
    del state["exp_avg_sq"], state["step"]


BROKEN = {
    "a row": (put("exp_avg", torch.arange(16.0)), ["exp_avg of", "(32, 16)", "found shape (16,)"]),
    "a number": (put("exp_avg_sq", torch.tensor(5.0)), ["exp_avg_sq of", "(32, 16)", "found shape ()"]),
    "no tensor": (put("exp_avg", 5.0), ["exp_avg of", "(32, 16)", "found 5.0"]),
    "larger": (put("exp_avg", torch.zeros(2, 32, 16)), ["exp_avg of", "(32, 16)", "found shape (2, 32, 16)"]),
    "no second moment": (without("exp_avg_sq"), ['without "exp_avg_sq"']),
    "no step": (without("step"), ['without "step"']),
    "another optimizer's": (of_another_optimizer, ['"momentum_buffer" without "step", "exp_avg", "exp_avg_sq"']),
}
broken = pytest.mark.parametrize("what", BROKEN)


def refused(what):
    words = ["blocks.0.expand.weight", "Remedy: ", *BROKEN[what][1]]
    return pytest.raises(noria.UsageError, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


@broken
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_checkpoint_with_broken_moments_is_refused_before_anything_is_changed(dtype, what):
    def journey(side):
        side.train(0, 3)
        if side.is_wrapped:
            before = both_states(side)
            bad = copy.deepcopy(before["optimizer"])
            bad["param_groups"][0]["lr"] = 7.0
            BROKEN[what][0](bad["state"][3])
            with refused(what):
                side.optimizer.load_state_dict(bad)
            assert side.optimizer.state_dict()["param_groups"] == before["optimizer"]["param_groups"]
            assert_same_bits(state_tensors(side.optimizer), state_tensors(Loaded(before["optimizer"])))
        side.train(3, 6)

    both(journey, kernel="fused", dtype=dtype)


@broken
@pytest.mark.parametrize(
    "policy",
    [{"draft_memory": 0}, {"draft_memory": "64MiB"}],
    ids=["", "drafts"],
)
def test_broken_moments_in_optimizer_state_are_refused_by_the_step_that_would_read_them(policy, what):
    """Nothing has been updated, and once they are mended the run goes on."""

    def journey(side):
        side.train(0, 3)
        if side.is_wrapped:
            state = side.optimizer.state[side.model.blocks[0].expand.weight]
            good = {key: value.clone() for key, value in state.items()}
            before = both_states(side)["model"]
            BROKEN[what][0](state)
            loss_of(side.model, 3).backward()
            with refused(what):
                side.optimizer.step()
            assert_same_bits(side.model.state_dict(), before)
            state.clear()
            state.update(good)
            side.optimizer.zero_grad()
        side.train(3, 6)

    both(journey, kernel="fused", **policy)


@broken
def test_broken_moments_are_refused_by_the_backward_that_would_update_them(what):
    side = wrapped(kernel="fused", update="backward")
    side.train(0, 3)
    before = both_states(side)
    BROKEN[what][0](side.optimizer.state[side.model.blocks[0].expand.weight])
    loss = loss_of(side.model, 3)
    with refused(what):
        loss.backward()
    assert_same_bits(side.model.state_dict(), before["model"])


@broken
def test_an_optimizer_with_broken_moments_is_not_wrapped(what):
    side, twin = new_side(), new_side()
    for each in (side, twin):
        each.train(0, 2)
    state = side.optimizer.state[side.model.blocks[0].expand.weight]
    good = dict(state)
    BROKEN[what][0](state)
    for call in (noria.plan, noria.wrap):
        with refused(what):
            call(side.model, side.optimizer, device=DEVICE, kernel="fused")
    state.clear()
    state.update(good)
    for each in (side, twin):
        each.train(2, 4)
    same(side, twin)


def test_a_state_dict_whose_entry_is_empty_begins_that_parameter_anew():
    def journey(side):
        side.train(0, 3)
        state = through_a_file(side.optimizer.state_dict())
        if side.is_wrapped:
            state["state"][3] = {}
        else:
            del state["state"][3]
        side.optimizer.load_state_dict(state)
        side.train(3, 5)

    both(journey, kernel="fused")


def test_low_bits_of_another_shape_are_refused_before_anything_is_changed():
    side = wrapped(kernel="fused", dtype=torch.bfloat16)
    side.train(0, 2)
    before = both_states(side)
    bad = copy.deepcopy(before["optimizer"])
    bad["state"][3]["low_bits"] = bad["state"][3]["low_bits"][:1]
    with pytest.raises(noria.UsageError, match=r"low_bits of \"blocks.0.expand.weight\".*found shape \(1, 16\)"):
        side.optimizer.load_state_dict(bad)
    assert_same_bits(side.model.state_dict(), before["model"])
    assert_same_bits(state_tensors(side.optimizer), state_tensors(Loaded(before["optimizer"])))


def test_a_save_without_its_path_first_is_told_how():
    model = nn.Linear(2, 2)
    with pytest.raises(noria.UsageError, match="put the path first"):
        noria.save(model, None, "x.pt")
