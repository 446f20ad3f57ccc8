"""An optimizer's groups, alone: which parameters it may hold, and which kernel updates them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import noria
import pytest
import torch
from noria.step.param_groups import ParamGroups
from torch import nn
from torch.optim import Optimizer


class Call:
    """A wrap call of four parameters, in units 0, 0, 1 and 2. Noria's kernels update units 0 and 1."""

    def __init__(self, *, update: str = "auto", shared: bool = False) -> None:
        self.parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
        self.optimizers: list[Optimizer] = []
        self.noted: list[tuple[list[int], int]] = []
        units = (0, 0, 1, 2)
        slots = [SimpleNamespace(index=index, unit=unit) for index, unit in enumerate(units)]
        self.context: Any = SimpleNamespace(
            slot_of=dict(zip(self.parameters, slots, strict=True)),
            plan=SimpleNamespace(fused={0: (), 1: ()}),
            updates_in_backward=update == "backward",
            ranks=object() if shared else None,
            engine=SimpleNamespace(ranks=SimpleNamespace(note_step=lambda *told: self.noted.append(told))),
        )

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def members(
        self, *indices: int, kernel: str = "fused", made: Callable[..., Optimizer] = torch.optim.AdamW
    ) -> ParamGroups:
        """Takes one more optimizer, with a group for each of these parameters."""
        optimizer = made([{"params": [self.parameters[index]]} for index in indices])
        self.optimizers.append(optimizer)
        return ParamGroups(self.context, optimizer, kernel, self.groups)


def test_slots_follow_the_groups_as_they_are_now():
    call = Call()
    members = call.members(2, 0)
    assert [slot.index for slot in members.slots()] == [2, 0]
    members.optimizer.add_param_group({"params": [call.parameters[3]]})
    assert [slot.index for slot in members.slots()] == [2, 0, 3]


def test_a_parameter_of_no_wrapped_model_is_refused_by_its_group():
    call = Call()
    members = call.members(0, 1)
    members.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 5))]})
    with pytest.raises(noria.UsageError, match=r"one of shape \(3, 5\) in group 2 that no wrapped model has"):
        members.check_options()
    with pytest.raises(noria.UsageError, match="in group 2"):
        ParamGroups(call.context, members.optimizer, "fused", call.groups)


def test_a_unit_is_fused_if_the_plan_and_the_kernel_say_so():
    call = Call()
    assert [call.members(0).fuses(unit) for unit in range(3)] == [True, True, False]
    assert not any(call.members(0, kernel=kernel).fuses(0) for kernel in ("torch", "whole"))


def test_an_update_takes_a_factor_if_all_of_it_is_fused_and_made_at_the_step():
    call = Call()
    assert call.members(0, 1, 2).takes_factor()
    assert not call.members(0, 3).takes_factor()
    assert not call.members(0, kernel="torch").takes_factor()
    assert not Call(update="backward").members(0).takes_factor()


def test_ranks_compare_the_hyperparameters_of_all_groups_and_nothing_else():
    call = Call(shared=True)
    members = call.members(0, 2)

    def checksum() -> int:
        members.note_step([0, 2])
        updated, number = call.noted[-1]
        assert updated == [0, 2]
        return number

    first = checksum()
    members.optimizer.param_groups[0]["name of mine"] = object()
    assert checksum() == first
    members.optimizer.param_groups[1]["lr"] *= 2
    assert checksum() != first


def test_a_step_that_updates_nothing_or_has_no_ranks_is_not_compared():
    for call, updated in ((Call(shared=True), []), (Call(), [0])):
        call.members(0).note_step(updated)
        assert not call.noted


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        ("amsgrad", True, "group 1 with amsgrad"),
        ("lr", "0.1", "'0.1' in group 1"),
        ("betas", (0.9,), "two numbers"),
        ("eps", None, "None in group 1"),
    ],
)
def test_options_that_no_kernel_takes_are_refused_unless_torch_updates(option, value, found):
    call = Call()
    for kernel in ("fused", "torch"):
        members = call.members(0, 1, kernel=kernel)
        call.optimizers = [members.optimizer]
        members.check_options()
        members.optimizer.param_groups[1][option] = value
        if kernel == "fused":
            with pytest.raises(noria.UsageError, match=found):
                members.check_options()
        else:
            members.check_options()


def test_an_option_that_is_gone_is_refused_where_it_updates_something():
    call = Call()
    members = call.members(0)
    del members.optimizer.param_groups[0]["lr"]
    with pytest.raises(noria.UsageError, match="none in group 0"):
        members.check_options()
    members.optimizer.param_groups[0]["params"] = []
    members.check_options()


def test_a_fused_parameter_has_one_place_in_all_optimizers_of_the_call():
    call = Call()
    members, other = call.members(0, 3), call.members(1, 3)
    members.check_options()  # the third unit is not fused
    other.optimizer.add_param_group({"params": [call.parameters[0]]})
    for each in (members, other):
        with pytest.raises(noria.UsageError, match="each parameter in one place of one optimizer"):
            each.check_options()


def test_a_group_that_is_about_to_be_added_counts_too():
    call = Call()
    members = call.members(0, 1)
    members.check_held_once([call.parameters[2]])
    with pytest.raises(noria.UsageError, match="one that is in two"):
        members.check_held_once([call.parameters[1]])
    call.members(0, kernel="torch").check_held_once([call.parameters[1]])
