"""Trains a wrapped model and its plain twin in lockstep, and compares every bit that a user could see.

`run(case)` is one run of at least 20 steps. The twin is what DESIGN calls the other side of each claim: the same model
and optimizer in plain PyTorch; under `dtype="master"` a `noria.testing.MasterTwin`; under `kernel="fused"` the same
wrapped model with everything resident, updates inside `step()`, one update thread and a machine without delays.

Note [What must have moved]. Equal bits prove nothing if nothing was streamed. After each run: every steady pass
made exactly the fetches of its plan, more than none; no more units were leased than the window allows; memory taken
is memory planned; evicted memory really was poisoned; what an optimizer holds has changed, and nothing else has.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import noria
import torch
from noria.testing import MasterTwin, assert_same_bits, on_machine
from noria.wrapped import Wrapped, wrapped_by
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from tests.device import DEVICE, SHARES
from tests.journeys.models import ZOO, adapt, batch_for, build, freeze_half

AXES: dict[str, tuple[Any, ...]] = {
    "model": ("gpt", "gpt2", "llama", "qwen3", "bert", "t5", "moe"),
    "optimizer": ("adamw", "sgd", "adagrad"),
    "window": ("least", "two", "half", "all"),
    "kernel": ("torch", "fused"),
    "dtype": ("fp32", "bf16", "master"),
    "training": ("all", "frozen", "lora"),
    "update": ("auto", "blocking"),
    "scheduler": ("none", "before", "after"),
    "hostile": (True, False),
    "micro_batches": (1, 2),
    "clip": (True, False),
    "dropout": (0.0, 0.1),
    "interlude": (True, False),
    "clear": ("none", "zeros"),
    "resident": ("none", "part", "auto"),
}
"""By field of Case, all values. `run` understands every combination for which `is_possible` holds."""


@dataclasses.dataclass(frozen=True)
class Case:
    """`window`: "least", just the device memory that noria says is least; "two", a window of as few units as it allows;
    "half" of the model; "all". `dtype`: of the model, or "master" for Policy.dtype=bfloat16. `interlude`: eval passes
    and `generate` between steps. `clear`: what zero_grad leaves. `resident`: nothing stays, what takes half of the
    memory of all units stays, or what noria chooses. `seed`: of delays, where hostile; `held`: a verb that is held back
    there by `hold_us`, each time."""

    model: str = "gpt"
    optimizer: str = "adamw"
    window: str = "least"
    kernel: str = "torch"
    dtype: str = "fp32"
    training: str = "all"
    update: str = "auto"
    scheduler: str = "none"
    hostile: bool = True
    micro_batches: int = 1
    clip: bool = True
    dropout: float = 0.0
    interlude: bool = False
    clear: str = "none"
    resident: str = "none"
    seed: int = 0
    held: str = ""
    hold_us: int = 1000
    update_threads: int = 3
    steps: int = 20

    def __str__(self) -> str:
        words = [self.model, self.optimizer, self.window, self.kernel, self.dtype, self.training, self.update]
        flags = [f"sched_{self.scheduler}"] if self.scheduler != "none" else []
        flags += [f"{self.micro_batches}x"] if self.micro_batches > 1 else []
        flags += [name for name in ("hostile", "clip", "dropout", "interlude") if getattr(self, name)]
        flags += ["zeros"] if self.clear == "zeros" else []
        flags += [f"{self.resident}_stays"] if self.resident != "none" else []
        return "-".join(words + flags)


def is_possible(choice: Mapping[str, Any]) -> bool:
    """False for what means something else: fused kernels update some optimizers, on fp32; a MasterTwin clears by
    itself; a part stays if noria's kernels update it, and if the budget has room for it."""
    is_covered = choice.get("optimizer", "adamw") != "adagrad" and choice.get("dtype") != "bf16"
    clears_itself = choice.get("dtype") == "master"
    has_part = choice.get("resident") == "part"
    if has_part and (choice.get("kernel", "fused") != "fused" or choice.get("window", "two") not in ("two", "all")):
        return False
    is_fused = choice.get("kernel") == "fused" or has_part
    return (not is_fused or is_covered) and not (clears_itself and choice.get("clear") == "zeros")


# ---- covers -----------------------------------------------------------------------------------------------------


def pairwise(
    axes: Mapping[str, Sequence[Any]], possible: Callable[[Mapping[str, Any]], bool], seed: int = 0
) -> list[dict[str, Any]]:
    """Rows that hold every possible pair of values of every two axes, few but not fewest; the same for the same seed.

    Greedy: a row starts with a pair not seen yet, then each axis takes the value that adds most new pairs.
    """
    order = random.Random(seed)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(axes, 2)
        for x in axes[a]
        for y in axes[b]
        if possible({a: x, b: y})
    }
    place = {name: number for number, name in enumerate(axes)}

    def pair(a: str, x: Any, b: str, y: Any) -> tuple[str, Any, str, Any]:
        return (a, x, b, y) if place[a] < place[b] else (b, y, a, x)

    rows: list[dict[str, Any]] = []
    while missing:
        best: dict[str, Any] = {}
        best_gain = -1
        for _ in range(12):
            a, x, b, y = order.choice(sorted(missing, key=repr))
            row = {a: x, b: y}
            rest = [name for name in axes if name not in row]
            order.shuffle(rest)
            for name in rest:
                gains = {
                    value: sum(pair(name, value, other, row[other]) in missing for other in row)
                    for value in axes[name]
                    if possible(row | {name: value})
                }
                most = max(gains.values())
                row[name] = order.choice([value for value, gain in gains.items() if gain == most])
            gain = sum(pair(a, row[a], b, row[b]) in missing for a, b in itertools.combinations(row, 2))
            if gain > best_gain:
                best, best_gain = row, gain
        rows.append({name: best[name] for name in axes})
        missing -= {pair(a, best[a], b, best[b]) for a, b in itertools.combinations(best, 2)}
    return rows


# ---- the two sides ----------------------------------------------------------------------------------------------

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Moments = Iterator[tuple[str, dict[str, torch.Tensor]]]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.02, lr_decay=0.01, weight_decay=0.01),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    # Schedules that differ at every step; the second also moves momentum or betas where there are any.
    "before": lambda optimizer: CosineAnnealingLR(optimizer, T_max=13),
    "after": lambda optimizer: OneCycleLR(
        optimizer, max_lr=0.02, total_steps=64, cycle_momentum=not isinstance(optimizer, torch.optim.Adagrad)
    ),
}
CLIP = {"all": 0.2, "frozen": 0.03, "lora": 0.0005}
"""By Case.training: below every gradient norm of these models, so that clipping always scales."""


class Side:
    """One of the two runs: a model, what updates it, and the user's own loop."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case = case
        self.model = model
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.step: Callable[[], Any] = lambda: None
        self.passes: list[tuple[int, int, noria.PassReport]] = []
        """Of a wrapped side: (step, number of the pass in it, what it did)."""
        self._times: dict[int, int] = {}

    def journey(self) -> Moments:
        """The whole run; yields what a user sees at each moment, under names. Nothing drawn at random crosses a yield,
        so two journeys may take turns."""
        for step in range(self.case.steps):
            yield f"step {step}, backward", self._backward(step)
            yield f"step {step}, gradients", self.gradients()
            yield f"step {step}, update", self._update()
            if self.case.interlude and step % 6 == 4:
                yield f"eval after step {step}", self._interlude(step)
        yield "weights at the end", dict(self.model.state_dict())

    def _backward(self, step: int) -> dict[str, torch.Tensor]:
        """Forward and backward of all micro-batches."""
        torch.manual_seed(7000 + step)  # dropout draws the same on both sides
        seen = {}
        for micro in range(self.case.micro_batches):
            batch = batch_for(self.case.model, step * self.case.micro_batches + micro)
            loss = ZOO[self.case.model].loss(self.model, batch)
            self._note_passes(step, 2 * micro)
            (loss / self.case.micro_batches).backward()
            self._note_passes(step, 2 * micro + 1)
            seen[f"loss {micro}"] = loss.detach()
        return seen | {"state of the random numbers": torch.get_rng_state()}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def _update(self) -> dict[str, torch.Tensor]:
        seen = {}
        if self.case.clip:
            most = CLIP[self.case.training]
            seen["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most).detach()
            assert seen["norm"] > most, "nothing was clipped"
        before = torch.get_rng_state()
        self.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=self.case.clear == "none")
        return seen | {"random numbers drawn": torch.get_rng_state() != before}

    @torch.no_grad()
    def _interlude(self, number: int) -> dict[str, torch.Tensor]:
        """What a user does between steps: a validation loss, then some text."""
        species, batch = ZOO[self.case.model], batch_for(self.case.model, 900 + number)
        self.model.eval()
        seen = {"loss": species.loss(self.model, batch), "made": species.generate(self.model, batch)}
        self.model.train()
        self._note_passes(number, -1)
        return seen

    def _note_passes(self, step: int, number: int) -> None:
        if wrapped_by(self.model) is None:
            return
        for index, each in enumerate(noria.report(self.model).passes):
            if each.times != self._times.get(index, 0):
                self._times[index] = each.times
                self.passes.append((step, number, each))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def make_model(case: Case) -> nn.Module:
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    model = build(case.model, dropout=case.dropout, dtype=dtype)
    if case.training == "frozen":
        freeze_half(model)
    return adapt(model, case.model) if case.training == "lora" else model


def policy_of(case: Case, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"device": DEVICE, "kernel": case.kernel, "update": case.update, "resident": "none"}
    if case.dtype == "master":
        fields["dtype"] = torch.bfloat16
    fields |= window_of(case.window, model, optimizer, fields)
    if case.resident == "part":
        all_stay = {"resident": "all", "device_memory": "1TiB"}
        fields["resident"] = noria.plan(model, optimizer, **fields | all_stay).resident_bytes // 2
    return fields | ({"resident": "auto"} if case.resident == "auto" else {})


def window_of(window: str, model: nn.Module, optimizer: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that make the window. What is least, noria's own refusal says."""
    if window == "all":
        return {}
    if window == "two":
        wanted = _refusal(r"a window of at least (\d+) units", model, optimizer, fields | {"window": 2})
        return {"window": wanted or 2}
    least = _refusal(r"\((\d+) bytes\)", model, optimizer, fields | {"device_memory": 1})
    assert least is not None, "one byte of device memory must be refused"
    if window == "least":
        return {"device_memory": least}
    whole = noria.plan(model, optimizer, **fields).arena_bytes
    return {"device_memory": max(least, SHARES * whole // 2)}


def _refusal(pattern: str, model: nn.Module, optimizer: Any, fields: Mapping[str, Any]) -> int | None:
    try:
        noria.plan(model, optimizer, **fields)
    except noria.UsageError as error:
        found = re.search(pattern, str(error))
        assert found is not None, error
        return int(found[1])
    return None


def wrapped_side(case: Case, make_optimizer: MakeOptimizer | None = None) -> Side:
    """The scheduler is built before the wrap call, or after it, as the case says."""
    model = make_model(case)
    side = Side(case, model)
    side.optimizer = (make_optimizer or OPTIMIZERS[case.optimizer])(trainable(model))
    fields = policy_of(case, model, side.optimizer)
    if case.scheduler == "before":
        side.scheduler = SCHEDULERS["before"](side.optimizer)
    hostility: dict[str, Any] = {}
    if case.hostile:
        hostility = {"seed": case.seed, "max_delay_us": 300, "poison": True}
        hostility |= {"hold_us": {case.held: case.hold_us}} if case.held else {}
    random_state = torch.get_rng_state()
    with on_machine(hostility=hostility, update_threads=case.update_threads):
        noria.wrap(model, side.optimizer, **fields)
    assert torch.equal(random_state, torch.get_rng_state()), "wrap drew random numbers"
    if case.scheduler == "after":
        side.scheduler = SCHEDULERS["after"](side.optimizer)
    side.step = lambda: side.optimizer.step()  # looked up each time: a scheduler patches it
    return side


def twin_side(case: Case, make_optimizer: MakeOptimizer | None = None) -> Side:
    """See this file's first lines."""
    make_optimizer = make_optimizer or OPTIMIZERS[case.optimizer]
    if case.kernel == "fused":
        calm = {"window": "all", "resident": "none", "update": "blocking", "update_threads": 1, "hostile": False}
        return wrapped_side(dataclasses.replace(case, **calm), make_optimizer)
    model = make_model(case)
    side = Side(case, model)
    if case.dtype == "master":
        twin = MasterTwin(model, lambda ps: make_optimizer([p for p in ps if p.requires_grad]))
        side.optimizer, side.step = twin.optimizer, twin.step
    else:
        side.optimizer = make_optimizer(trainable(model))
        side.step = lambda: side.optimizer.step()  # looked up each time: a scheduler patches it
    side.scheduler = SCHEDULERS[case.scheduler](side.optimizer)
    return side


# ---- the run ----------------------------------------------------------------------------------------------------


def run(case: Case, make_optimizer: MakeOptimizer | None = None) -> noria.Report:
    """Trains both sides in lockstep; every loss, gradient, norm and eval output of every step, and the weights and
    optimizer states at the end, must have the same bits; then see Note [What must have moved]."""
    ours, twin = wrapped_side(case, make_optimizer), twin_side(case, make_optimizer)
    first = values_of(ours.model)
    compare(ours.journey(), twin.journey())
    assert_same_state(ours.optimizer, twin.optimizer)
    report = noria.report(ours.model)
    check_moved(case, ours, report, first)
    end(ours, twin)
    return report


def compare(ours: Moments, twin: Moments) -> None:
    """A difference names the moment it was seen at."""
    for (moment, seen), (same_moment, wanted) in zip(ours, twin, strict=True):
        assert moment == same_moment
        try:
            assert_same_bits(seen, wanted)
        except AssertionError as error:
            raise AssertionError(f"{moment}: {error}") from None


def record(side: Side) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """A whole journey, to compare many others with."""
    return [(moment, {name: value.clone() for name, value in seen.items()}) for moment, seen in side.journey()]


def end(*sides: Side) -> None:
    """Threads of this run must not slow down the next."""
    for side in sides:
        if (wrapped := wrapped_by(side.model)) is not None:
            wrapped.run.shutdown()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(ours: Any, twin: Any) -> None:
    """Every tensor and number that the optimizers keep, hyperparameters too. `low_bits` is noria's own key."""
    a, b = ours.state_dict(), twin.state_dict()
    for left, right in zip(a["param_groups"], b["param_groups"], strict=True):
        assert left == right
    mine, theirs = _flat(a["state"]), _flat(b["state"])
    assert mine.keys() == theirs.keys()
    tensors = {key: value for key, value in theirs.items() if isinstance(value, torch.Tensor)}
    assert all(mine[key] == theirs[key] for key in theirs.keys() - tensors.keys())
    if tensors:
        assert_same_bits({key: mine[key] for key in tensors}, tensors)


def _flat(state: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{n}.{key}": v for n, values in state.items() for key, v in values.items() if key != "low_bits"}


def check_moved(case: Case, ours: Side, report: noria.Report, first: Mapping[str, torch.Tensor]) -> None:
    """See Note [What must have moved]."""
    wrapped = wrapped_by(ours.model)
    assert wrapped is not None
    check_memory(wrapped, report)
    assert report.num_steps == case.steps
    assert wrapped.context.backend.poisons == case.hostile
    assert all(("fused" in kernel) == (case.kernel == "fused") for kernel in report.kernels)
    check_values_moved(ours, first)
    if case.resident == "none":
        check_passes(case, ours, wrapped)
    if case.resident == "part":
        assert report.at_rest and len(report.at_rest) < report.num_units and report.num_fetches > 0
    window = wrapped.context.policy.window
    if case.window == "two":
        assert isinstance(window, int)
        assert report.peak_units <= window < report.num_units
    if case.window in ("least", "half"):
        budget = wrapped.context.policy.device_memory
        assert isinstance(budget, int) and wrapped.context.backend.allocated <= budget // SHARES, case.resident
        assert budget // SHARES < sum(unit.weights for unit in wrapped.context.units)


def check_values_moved(ours: Side, first: Mapping[str, torch.Tensor]) -> None:
    """Matrices that an optimizer holds have changed, and nothing that none holds. (All of them would be too much: in
    bfloat16 a step may be too small for its value, in torch as well.)"""
    held = {p for group in ours.optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in ours.model.named_parameters(remove_duplicate=False) if p in held]
    last = ours.model.state_dict()
    changed = {name for name, value in first.items() if not torch.equal(value, last[name])}
    assert changed <= {name for name, p in named}, "what no optimizer holds has changed"
    matrices = {name for name, p in named if p.dim() > 1}
    least = 1 if ours.case.dtype == "bf16" else len(matrices) / 2
    assert len(matrices & changed) >= least, f"not changed: {matrices - changed}"


def check_passes(case: Case, ours: Side, wrapped: Wrapped) -> None:
    """From the fourth step on: fetches as planned in every pass of training, and no pass is learnt twice. After an
    update something must be fetched in the first forward; where less fits than a pass visits, in every pass."""
    fits = wrapped.context.plan.arena_bytes >= sum(unit.weights for unit in wrapped.context.units)
    last_interlude = -case.steps
    num_checked = 0
    for step, number, each in ours.passes:
        assert each.unplanned_visits <= each.num_visits, each
        if number < 0:
            last_interlude = step
            assert each.planned_fetches in (None, each.fetches), each  # None: not the branch that was predicted
            continue
        if step < 3 or step == last_interlude + 1:
            continue
        num_checked += 1
        assert each.planned_fetches == each.fetches, (step, number, each)
        # In the second step after an interlude another is predicted, and what it needs is there before the forward.
        if number == 0 and step > last_interlude + 2:
            assert each.phase == "forward" and each.fetches > 0, (step, each)
        if not fits and case.training == "all":
            assert each.fetches > 0, (step, number, each)
    assert num_checked > 2 * case.micro_batches * (case.steps - 8)
    held = {p for group in ours.optimizer.param_groups for p in group["params"]}
    num_updated = sum(any(slot.parameter in held for slot in unit.parameters) for unit in wrapped.context.units)
    assert noria.report(ours.model).num_fetches >= num_updated * case.steps


def check_memory(wrapped: Wrapped, report: noria.Report) -> None:
    """Device memory taken is device memory planned, and leases stay inside of it."""
    assert report.ledger_agrees, str(report)
    planned = sum(row.planned for row in report.ledger if row.place == report.device)
    backend, plan = wrapped.context.backend, wrapped.context.plan
    assert backend.allocated == planned <= backend.capacity
    assert backend.capacity == planned or plan.stays or (plan.policy.resident == "auto" and plan.may_stay)
    assert report.peak_lease_bytes > 0 and (wrapped.rest.is_on or report.peak_lease_bytes <= plan.arena_bytes)
