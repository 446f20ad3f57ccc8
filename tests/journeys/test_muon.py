"""torch's Muon by noria's kernel, with AdamW for what is no matrix: on the host alone, whole matrices at a time. Its
momentum lies in the home."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    LATE_UPDATES,
    VOCAB,
    WIDTH,
    Net,
    go_on_here,
    hand_over,
    loss_of,
    state_tensors,
)
from tests.journeys.test_files import moved

pytestmark = pytest.mark.usefixtures("one_thread")

formats = pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(None, "fp32"), (None, "8bit"), (torch.bfloat16, "fp32"), (torch.bfloat16, "bf16"), (torch.bfloat16, "8bit")],
    ids=str,
)


class Matrices(nn.Module):
    """Nothing but matrices: update="backward" wants units that one optimizer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Run:
    """A model whose matrices Muon holds, and AdamW the rest."""

    def __init__(self, model: Callable[[], nn.Module] = Net, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = model()
        flat = [each for each in self.model.parameters() if each.dim() == 2]
        rest = [each for each in self.model.parameters() if each.dim() != 2]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(flat, lr=0.02)]
        if rest:
            self.optimizers.append(torch.optim.AdamW(rest, lr=1e-2))

    def wrap(self, hostility: dict[str, Any] | None = None, **policy: Any) -> Run:
        with on_machine(hostility=hostility or {}):
            noria.wrap(self.model, self.optimizers, device=DEVICE, **policy)
        return self

    def train(self, first: int, last: int, parts: int = 1, norm: float | None = None) -> Run:
        for number in range(first, last):
            for part in range(parts):
                (loss_of(self.model, number * parts + part) / parts).backward()
            if norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), norm)
            self.step()
        return self

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        found = {key: value.clone() for key, value in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            found |= {f"{number}: {key}": value.clone() for key, value in state_tensors(optimizer).items()}
        return found

    def kernels(self) -> Iterator[str]:
        yield from noria.report(self.model).kernels


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(value, other[key]) for key, value in one.items())


@formats
@pytest.mark.parametrize(
    ("update", "model"), [("auto", Net), ("blocking", Net), ("auto", Matrices), ("backward", Matrices)]
)
def test_every_update_mode_has_the_same_bits(update, model, dtype, state_dtype):
    policy = {"dtype": dtype, "state_dtype": state_dtype}
    quiet = Run(model).wrap(update="blocking", **policy).train(0, 4)
    hostile = Run(model).wrap(LATE_UPDATES, update=update, window=2, **policy).train(0, 4)
    assert all("fused kernel" in text for text in hostile.kernels())
    assert_same_bits(hostile.values(), quiet.values())
    assert noria.report(hostile.model).ledger_agrees
    shorter = Run(model).wrap(update="blocking", **policy).train(0, 3)
    assert differ(shorter.values(), quiet.values())


@formats
def test_accumulated_and_clipped_gradients_have_the_bits_of_updates_inside_step(dtype, state_dtype):
    policy = {"dtype": dtype, "state_dtype": state_dtype}
    quiet, hostile = Run().wrap(update="blocking", **policy), Run().wrap(LATE_UPDATES, window=2, **policy)
    for run in (quiet, hostile):
        run.train(0, 3, parts=2, norm=0.05)
    assert_same_bits(hostile.values(), quiet.values())
    assert differ(Run().wrap(update="blocking", **policy).train(0, 3, parts=2).values(), quiet.values())


def test_it_trains_as_torchs_does():
    """A momentum may round to bf16 the other way than torch's. That changes less than gradients in bf16 would."""
    ours, theirs, rounded = Run().wrap(window=2), Run().wrap(window=2, kernel="torch"), Run()
    for parameter in rounded.model.parameters():
        parameter.register_hook(lambda gradient: gradient.bfloat16().float())
    rounded.wrap(window=2, kernel="torch")
    for run in (ours, theirs, rounded):
        run.train(0, 3)
    assert all("fused kernel" in text for text in ours.kernels())
    assert all("torch, unit by unit" in text for text in theirs.kernels())

    def distance(run: Run) -> float:
        ways = [value - run.model.state_dict()[key] for key, value in theirs.model.state_dict().items()]
        return float(torch.cat([way.flatten() for way in ways]).norm())

    assert distance(ours) < distance(rounded) / 2


@formats
def test_home_has_its_momentum_and_no_masters(dtype, state_dtype):
    run = Run(Matrices).wrap(window=2, dtype=dtype, state_dtype=state_dtype, update="backward").train(0, 2)
    report = noria.report(run.model)
    assert report.ledger_agrees
    rows = {row.purpose: row.planned for row in report.ledger}
    others = {"second moments", "masters", "optimizer state", "undo logs", "factored moments"}
    assert rows.keys().isdisjoint(others)
    home = wrapped_by(run.model).context.home
    for parameter, values in run.optimizers[0].state.items():
        assert values["momentum_buffer"].numel() == parameter.numel()
        arena = home.arenas["first moments"]
        assert arena.data <= values["momentum_buffer"].data_ptr() < arena.data + arena.bytes


@formats
def test_beside_adamw_the_home_has_second_moments_of_vectors_alone(dtype, state_dtype):
    run = Run().wrap(window=2, dtype=dtype, state_dtype=state_dtype).train(0, 2)
    report = noria.report(run.model)
    assert report.ledger_agrees
    rows = {row.purpose: row.planned for row in report.ledger}
    assert rows.keys().isdisjoint({"masters", "optimizer state", "undo logs"})
    weights = sum(each.numel() for each in run.model.parameters())
    bytes_each = {"fp32": 4, "bf16": 2, "8bit": 1}[state_dtype]
    assert rows["first moments"] >= bytes_each * weights
    assert 0 < rows["second moments"] < rows["first moments"] / 2
    home = wrapped_by(run.model).context.home
    for values in run.optimizers[1].state.values():
        arena, value = home.arenas["second moments"], values["exp_avg_sq"]
        assert arena.data <= value.data_ptr()
        assert value.data_ptr() + value.numel() * value.element_size() <= arena.data + arena.bytes


def test_vectors_that_none_holds_leave_the_kernel():
    run = Run()
    flat = [each for each in run.model.parameters() if each.dim() == 2]
    run.optimizers = [torch.optim.Muon(flat, lr=0.02)]
    run.wrap(window=2)
    for number in range(2):
        loss_of(run.model, number).backward()
        run.optimizers[0].step()
        run.model.zero_grad()
    assert list(run.kernels()) == ["Muon by noria's fused kernel, on the host pool"]


@pytest.mark.parametrize("resident", ["none", "1GiB"])
def test_a_matrix_that_joins_from_a_unit_that_stays_ends_that(resident):

    def trained(**policy: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Net()
        first = [model.blocks[0].expand.weight]
        rest = [each for each in model.parameters() if all(each is not other for other in first)]
        optimizers = [torch.optim.AdamW(rest, lr=1e-2), torch.optim.Muon(first, lr=0.02)]
        noria.wrap(model, optimizers, device=DEVICE, kernel="fused", **policy)
        if "window" not in policy:
            assert bool(wrapped_by(model).context.plan.stays) == (policy["resident"] != "none")
        for number in range(5):
            if number == 2:
                hand_over(model.blocks[2].expand.weight, *optimizers)
            loss_of(model, number).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return {key: value.clone() for key, value in model.state_dict().items()}

    there = trained(device_memory="1GiB", resident=resident)
    assert_same_bits(there, trained(window=2, update="blocking"))


@pytest.mark.parametrize("beside", ["Muon", "Lion"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
def test_a_unit_that_two_optimizers_take_up_later_has_the_moments_of_both(state_dtype, beside):
    """Whichever comes first: the other one may keep more moments, or fewer. If all is unfrozen before, the first one
    plans the unit. What AdamW keeps more has no place then, so all of its moments lie outside, in fp32."""

    def trained(comes_first: int, unfrozen_before: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        late = [model[2].weight, model[2].bias]
        for parameter in late:
            parameter.requires_grad_(False)
        weights, biases = ([getattr(model[number], name) for number in (0, 1, 3)] for name in ("weight", "bias"))
        other = noria.optim.Lion(weights, lr=1e-4) if beside == "Lion" else torch.optim.Muon(weights, lr=1e-3)
        optimizers = [other, torch.optim.AdamW(biases, lr=1e-3)]
        noria.wrap(model, optimizers, device=DEVICE, window=2, state_dtype=state_dtype, kernel="fused")
        for number in range(5):
            if number == 2:
                for parameter in late if unfrozen_before else ():
                    parameter.requires_grad_(True)
                for each in (comes_first, 1 - comes_first):
                    late[each].requires_grad_(True)
                    optimizers[each].add_param_group({"params": [late[each]]})
            batch = torch.randn(4, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(number))
            model(batch).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = optimizers[1].state[late[1]]
        formats = {"fp32": {torch.float32}, "bf16": {torch.bfloat16}, "8bit": {torch.int8, torch.uint8}}[state_dtype]
        lies_outside = unfrozen_before and comes_first == 0
        found = {state[key].dtype for key in ("exp_avg", "exp_avg_sq")}
        assert found == ({torch.float32} if lies_outside else formats)
        assert not lies_outside or 0 < float(state["exp_avg"].abs().max()) < 1
        return {key: value.clone() for key, value in model.state_dict().items()}

    one, *others = (trained(first, unfrozen) for first, unfrozen in ((0, False), (1, False), (1, True)))
    for other in others:
        assert_same_bits(one, other)
    outside = trained(0, True)
    assert all(value.isfinite().all() for value in outside.values())
    if state_dtype == "fp32":
        assert_same_bits(one, outside)


@pytest.mark.parametrize("draft_memory", ["auto", "64MiB"])
def test_its_units_are_not_drafted_and_do_not_stay(draft_memory):
    run = Run().wrap(HOSTILE, device_memory="1GiB", draft_memory=draft_memory).train(0, 3)
    plan = wrapped_by(run.model).context.plan
    assert not plan.stays & {unit for unit, rules in plan.fused.items() if any(rule.name == "muon" for rule in rules)}
    assert not plan.streamed and all("muon" not in str(plan.fused[unit]) for unit in plan.undo_logs)
    with pytest.raises(noria.UsageError, match="which only the host updates"):
        Run().wrap(device_memory="1GiB", resident="all")


@formats
def test_stopped_and_resumed_training_has_the_bits_of_never_stopped(dtype, state_dtype, tmp_path):
    policy = {"dtype": dtype, "state_dtype": state_dtype, "window": 2}
    went_on = Run().wrap(HOSTILE, **policy).train(0, 5)
    stopped = Run().wrap(HOSTILE, **policy).train(0, 3)
    noria.save(tmp_path / "run.pt", stopped.model, stopped.optimizers)
    resumed = Run(seed=1).wrap(HOSTILE, **policy)
    noria.load(tmp_path / "run.pt", resumed.model, resumed.optimizers)
    resumed.train(3, 5)
    assert_same_bits(resumed.values(), went_on.values())
    assert differ(stopped.values(), went_on.values())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a real file system, for this user alone."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as found:
        yield Path(found)


@formats
def test_momentum_may_lie_in_files(dtype, state_dtype, folder):
    policy = {"dtype": dtype, "state_dtype": state_dtype, "window": 2}
    with pytest.raises(noria.UsageError, match="host_memory of at least") as refusal:
        Run().wrap(files=folder, host_memory=1, **policy)
    found = re.search(r"\((\d+) bytes\)", str(refusal.value))
    assert found is not None
    here = Run().wrap(HOSTILE, files=folder, host_memory=int(found[1]), **policy).train(0, 4)
    there = Run().wrap(**policy).train(0, 4)
    assert moved(here.model)["write"] > 0
    assert_same_bits(here.values(), there.values())


def test_unwrapped_optimizers_go_on_as_plain_torch():
    run = Run().wrap(window=2).train(0, 3)
    noria.unwrap(run.model, run.optimizers)
    assert type(run.optimizers[0]) is torch.optim.Muon
    plain = Run()
    plain.model.load_state_dict(run.model.state_dict())
    for ours, theirs in zip(run.optimizers, plain.optimizers, strict=True):
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for each in (run, plain):
        for optimizer in each.optimizers:
            go_on_here(each.model, optimizer)
        each.train(3, 4)
    assert_same_bits(run.values(), plain.values())


def test_a_checkpoint_of_torchs_code_goes_on_by_the_kernel():
    theirs = Run().wrap(window=2, kernel="torch").train(0, 2)
    ours, seen = Run(seed=1).wrap(window=2), Run().wrap(window=2).train(0, 2)
    ours.model.load_state_dict(theirs.model.state_dict())
    for to, of in zip(ours.optimizers, theirs.optimizers, strict=True):
        to.load_state_dict(of.state_dict())
    assert_same_bits(ours.values(), theirs.values())
    ours.train(2, 3)
    seen.train(2, 3)
    for key, value in seen.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[key], value, rtol=2.0**-7, atol=1e-3)


class Transposed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.turned.sum().sigmoid()


def test_matrices_that_are_not_contiguous_are_left_to_torch():
    run = Run(Transposed).wrap(window=2).train(0, 2)
    assert any("units by torch, for another optimizer, their dtype or layout" in text for text in run.kernels())


def test_a_vector_that_joins_is_refused_and_nothing_changes():
    run = Run().wrap(window=2).train(0, 1)
    hand_over(run.optimizers[1].param_groups[0]["params"][-1], run.optimizers[1], run.optimizers[0])
    before = run.values()
    loss_of(run.model, 1).backward()
    with pytest.raises(noria.UsageError, match="contiguous matrices under Muon"):
        run.optimizers[0].step()
    assert_same_bits(run.values(), before)


@pytest.mark.parametrize(
    ("key", "wrong", "text"),
    [
        ("ns_steps", 100, "ns_steps from 0 to 99"),
        ("ns_steps", "5", "ns_steps from 0 to 99"),
        ("adjust_lr_fn", "none", "adjust_lr_fn that is None"),
        ("ns_coefficients", (1.0, 2.0), 'three numbers under "ns_coefficients"'),
        ("momentum", None, 'a number under "momentum"'),
    ],
)
@pytest.mark.parametrize(("update", "model"), [("auto", Net), ("backward", Matrices)])
def test_wrong_options_are_refused_and_change_nothing(update, model, key, wrong, text):
    run = Run(model).wrap(window=2, update=update).train(0, 1)
    before = run.values()
    (group,) = run.optimizers[0].param_groups
    right, group[key] = group[key], wrong
    with pytest.raises(noria.UsageError, match=text):
        loss_of(run.model, 1).backward()
        run.optimizers[0].step()
    assert_same_bits(run.values(), before)
    group[key] = right
    run.model.zero_grad()
    run.train(2, 3)
    assert differ(run.values(), before)


def test_on_the_device_torch_updates():
    run = Run().wrap(window=2, optimizer_device="device").train(0, 3)
    (text,) = [text for text in run.kernels() if "Muon" in text]
    assert "torch, unit by unit, on the device" in text
    assert "Muon has none for the device" in text


def test_an_option_that_a_group_changes_counts():
    results = []
    for name in (None, "original", "match_rms_adamw"):
        run = Run().wrap(window=2)
        run.optimizers[0].param_groups[0]["adjust_lr_fn"] = name
        results.append(run.train(0, 2).values())
    assert_same_bits(results[0], results[1])
    assert differ(results[0], results[2])
