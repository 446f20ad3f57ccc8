"""Steps and moments of parameters that noria's kernels update, alone: what is counted, created and refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import noria
import pytest
import torch
from noria.model.moment_formats import PURPOSE_OF
from noria.model.update_rules import FusedRule, rule_of
from noria.step.state_view import OptimizerState
from noria.step.step_counts import StepCounts
from torch import nn

ADAMW = rule_of(torch.optim.AdamW, {})
SGD = rule_of(torch.optim.SGD, {"momentum": 0.0})
LION = rule_of(noria.optim.Lion, {})
MOMENTUM = rule_of(torch.optim.SGD, {"momentum": 0.9})
META = torch.zeros((), device="meta")


class State:
    """Is the home's state of one parameter of three elements. The home's bytes are 9 until they are written."""

    def __init__(self, dtype: str, is_planned: bool) -> None:
        self.dtype = dtype
        self.planned = is_planned
        self.shown = OptimizerState(lambda _: None, lambda _: None, dict, {})
        self.placed: dict[tuple[int, str], torch.Tensor] = {}
        self.home: dict[str, torch.Tensor] = {}
        self.heard: list[str] = []

    def is_planned(self, slot: object, key: str) -> bool:
        return self.planned

    def has_placed(self, slot: Any, keys: tuple[str, ...]) -> bool:
        state = self.shown.unsettled(slot.parameter)
        return all(state.get(key) is self.placed.get((slot.index, key)) for key in keys)

    def moment(self, slot: object, key: str) -> torch.Tensor | None:
        return self.home.setdefault(key, torch.full((3,), 9.0)) if self.planned else None

    def settle(self, parameter: object) -> None:
        self.heard.append("settle")

    def adopt(self, slot: Any) -> None:
        self.heard.append("adopt")
        state = self.shown.unsettled(slot.parameter)
        for key in state.keys() & PURPOSE_OF.keys():
            if (place := self.moment(slot, key)) is not None and place is not state[key]:
                state[key] = self.placed[(slot.index, key)] = place.copy_(state[key])


class Call:
    """Counts for one parameter of a wrap call."""

    def __init__(self, rule: FusedRule = ADAMW, dtype: str = "fp32", *, is_planned: bool = True) -> None:
        self.rule = rule
        self.notes: list[str] = []
        self.moved: list[object] = []
        self.state = State(dtype, is_planned)
        self.slot: Any = SimpleNamespace(index=4, unit=2, name="head.weight", parameter=nn.Parameter(torch.zeros(3)))
        self.masters = SimpleNamespace(loaded_low_bits=set())
        self.home = SimpleNamespace(working=lambda slot: torch.zeros(3, dtype=torch.bfloat16))
        context = SimpleNamespace(
            plan=SimpleNamespace(fused={2: (rule,)}),
            files=SimpleNamespace(is_blank=lambda unit: False, touch=lambda unit: None),
            home=self.home,
            units=[SimpleNamespace(parameters=parameters) for parameters in ([], [], [self.slot])],
            notes=self.notes,
        )
        members: Any = SimpleNamespace(context=context, cls=torch.optim.AdamW)
        weights: Any = SimpleNamespace(masters=self.masters)
        state: Any = self.state
        self.steps = StepCounts(members, state, weights)

    @property
    def shown(self) -> dict[str, Any]:
        """What `optimizer.state` has of the parameter."""
        return dict.get(self.state.shown, self.slot.parameter) or {}

    @property
    def is_shown(self) -> bool:
        """Has `optimizer.state` an entry, be it an empty one?"""
        return dict.__contains__(self.state.shown, self.slot.parameter)

    def count(self) -> int:
        number = self.steps.ready(self.slot, self.rule)
        self.steps.count(self.slot, self.rule)
        return number

    def ready(self) -> int:
        return self.steps.ready(self.slot, self.rule)

    def expect(self) -> int | None:
        return self.steps.expect(self.slot, self.rule)

    def prepare(self) -> int:
        return self.steps.prepare(self.slot, self.rule)


def test_the_first_step_makes_the_state_as_torch_does_with_moments_in_the_home():
    call = Call()
    assert call.ready() == 1 and not call.is_shown, "a look changes nothing"
    assert call.count() == 1
    assert list(call.shown) == ["step", "exp_avg", "exp_avg_sq"]
    assert torch.equal(call.shown["step"], torch.tensor(1.0)) and call.shown["step"].dtype is torch.float32
    for key in ADAMW.keys:
        assert call.shown[key] is call.state.home[key] is call.state.placed[(4, key)]
        assert torch.equal(call.shown[key], torch.zeros(3))


def test_each_step_is_counted_once_and_its_moments_are_kept():
    call = Call()
    call.count()
    call.state.home["exp_avg"].fill_(5.0)
    assert [call.ready(), call.ready(), call.count(), call.ready(), call.count()] == [2, 2, 2, 3, 3]
    assert torch.equal(call.shown["exp_avg"], torch.full((3,), 5.0))


def test_a_rule_without_state_counts_nothing():
    call = Call(SGD)
    assert [call.ready(), call.count(), call.count(), call.expect()] == [1, 1, 1, 1]
    assert not call.is_shown


def test_a_rule_that_counts_no_steps_tells_the_first_from_all_others():
    call = Call(MOMENTUM)
    assert [call.count(), call.count(), call.count()] == [1, 2, 2]
    assert list(call.shown) == ["momentum_buffer"]


def test_random_rounding_wants_a_count_that_the_rule_does_not_keep():
    call = Call(MOMENTUM, "bf16")
    assert [call.count(), call.count(), call.count()] == [1, 2, 3]
    assert call.shown["rounding_step"] == 3
    del call.shown["rounding_step"]  # as in a checkpoint of torch's own
    assert call.count() == 2


def test_codes_have_their_scales_beside_them():
    call = Call(dtype="8bit")
    call.count()
    assert call.shown.keys() == {"step", "exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales"}


def test_moments_that_were_not_planned_for_are_fp32_outside_of_the_home_and_noted_once():
    call = Call(MOMENTUM, "8bit", is_planned=False)
    call.count()
    assert call.shown.keys() == {"momentum_buffer", "rounding_step"}
    assert call.shown["momentum_buffer"].dtype is torch.float32
    call.shown.clear()
    call.count()
    assert call.notes == ["AdamW makes a momentum_buffer that was not planned for, outside of the home"]


@pytest.mark.parametrize("step", ["7", "nan", float("nan"), float("inf"), -1, 1 << 62, None, torch.zeros(2), META])
def test_a_number_of_steps_that_is_none_is_refused_and_not_drafted_with(step):
    call = Call()
    call.count()
    assert call.expect() == 2
    call.shown["step"] = step
    assert call.expect() is None
    for act in (call.ready, call.count, call.prepare):
        with pytest.raises(noria.UsageError, match=r'as "step" in optimizer\.state of "head\.weight"'):
            act()
    call.shown["step"] = torch.tensor(41.0)
    assert [call.expect(), call.ready(), call.prepare(), call.count()] == [42, 42, 42, 42]


def test_no_draft_is_made_before_the_state_is_there_nor_with_what_the_update_will_not_use():
    call = Call()
    assert call.expect() is None and not call.is_shown, "no state"
    call.state.shown.unsettled(call.slot.parameter)["step"] = torch.tensor(3.0)
    assert call.expect() is None, "no moments"
    call.count()
    assert call.expect() == 2
    del call.shown["step"]
    assert call.expect() is None, "no number of steps"
    call.shown["step"] = torch.tensor(1.0)
    assert call.expect() == 2
    call.masters.loaded_low_bits.add(4)
    assert call.expect() is None, "low bits were loaded"
    call.masters.loaded_low_bits.clear()
    assert call.steps.expect(call.slot, LION) is None, "the plan has another rule"
    home = call.shown["exp_avg"]
    call.shown["exp_avg"] = home.clone()
    assert call.expect() is None, "a moment was replaced"
    call.shown["exp_avg"] = home
    assert call.expect() == 2
    call.shown["exp_avg_sq"] = None
    assert call.expect() is None, "a moment was removed"


def test_a_moment_that_the_user_puts_there_moves_to_the_home_after_pending_updates():
    call = Call()
    call.count()
    home = call.shown["exp_avg"]
    assert call.ready() == 2 and not call.state.heard
    call.shown["exp_avg"] = torch.tensor([1.0, 2.0, 3.0])
    assert call.ready() == 2
    assert call.state.heard == ["settle", "adopt"]
    assert call.shown["exp_avg"] is home and torch.equal(home, torch.tensor([1.0, 2.0, 3.0]))
    assert call.ready() == 2 and call.expect() == 2 and len(call.state.heard) == 2


def test_scales_that_the_user_removed_come_back_from_the_home():
    call = Call(dtype="8bit")
    call.count()
    del call.shown["exp_avg_scales"]
    assert call.count() == 2
    assert call.shown["exp_avg_scales"] is call.state.home["exp_avg_scales"]


def test_moments_of_an_update_inside_backward_are_zeroed_once_and_shown_by_the_step():
    call = Call()
    assert call.prepare() == 1 and not call.is_shown
    assert all(torch.equal(call.state.home[key], torch.zeros(3)) for key in ADAMW.keys)
    call.state.home["exp_avg"].fill_(5.0)  # the update
    assert call.prepare() == 1
    assert call.count() == 1
    assert torch.equal(call.shown["exp_avg"], torch.full((3,), 5.0))


def test_a_load_forgets_moments_that_were_zeroed():
    call = Call()
    call.prepare()
    call.state.home["exp_avg"].fill_(5.0)
    call.steps.forget_prepared()
    call.count()
    assert torch.equal(call.shown["exp_avg"], torch.zeros(3))
