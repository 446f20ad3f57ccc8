"""Norms and clips of one optimizer, alone: in which order gradients are summed, and what they are multiplied by."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import noria
import pytest
import torch
from noria.step.grad_norm import GradNorm
from noria.step.param_groups import ParamGroups
from torch import nn

GRADIENTS = ([3.0, 4.0], [12.0], [84.0])  # norms 5, 13 and 85


class Call:
    """A wrap call of three parameters, in units 1, 0 and 1. It keeps what the engine and other ranks were told."""

    def __init__(
        self,
        *,
        fused: tuple[int, ...] = (0, 1),
        update: str = "auto",
        shared: bool = False,
        max_grad_norm: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.heard: list[object] = []
        self.told: list[tuple[dict[int, float], str]] = []
        self.foreign: set[int] = set()
        self.elsewhere = 0.0  # what another rank adds to the sum of squares of each gradient
        self.parameters = [nn.Parameter(torch.zeros(len(each), dtype=dtype)) for each in GRADIENTS]
        slots: Any = [
            SimpleNamespace(index=index, unit=unit, name=f"p{index}", trainable=True, parameter=parameter)
            for index, (unit, parameter) in enumerate(zip((1, 0, 1), self.parameters, strict=True))
        ]
        self.slots = slots
        for parameter, values in zip(self.parameters, GRADIENTS, strict=True):
            parameter.grad = torch.tensor(values, dtype=dtype)
        context: Any = SimpleNamespace(
            slot_of=dict(zip(self.parameters, slots, strict=True)),
            plan=SimpleNamespace(fused=dict.fromkeys(fused, ())),
            policy=SimpleNamespace(max_grad_norm=max_grad_norm),
            updates_in_backward=update == "backward",
            shows_gradients=not shared,
            ranks=object() if shared else None,
            device=torch.device("cpu"),
            engine=SimpleNamespace(gradients=self),
            home=SimpleNamespace(held=lambda slot: slot.parameter.grad),
        )
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        members = ParamGroups(context, self.optimizer, "fused", lambda: self.optimizer.param_groups)
        kernels: Any = SimpleNamespace(sum_job=lambda unit, slots: slots)
        run: Any = SimpleNamespace(recover=lambda: self.heard.append("recover"))
        sync: Any = SimpleNamespace(combine=self.combine)
        streams: Any = SimpleNamespace(rest=SimpleNamespace(has=lambda unit: False))
        self.norms = GradNorm(members, kernels, run, sync, streams)

    def combine(self, parts: dict[int, float], what: str) -> dict[int, float]:
        self.told.append((parts, what))
        return {index: part + self.elsewhere for index, part in parts.items()}

    def gradient_is(self, index: int) -> str:
        return "foreign" if index in self.foreign else "held"

    def take_foreign_gradient(self, index: int) -> None:
        self.heard.append(("foreign", index))

    def apply_scales(self, index: int) -> bool:
        self.heard.append(("scaled", index))
        return False

    def access_held(self, unit: int) -> None:
        self.heard.append(("access", unit))

    def sum_gradients(self, jobs: list[tuple[int, Any]]) -> list[list[float]]:
        self.heard += [("sum", unit, [slot.index for slot in slots]) for unit, slots in jobs]
        return [[float(slot.parameter.grad.double().square().sum()) for slot in slots] for _, slots in jobs]

    def unscale_used(self, indices: list[int], inverse: torch.Tensor) -> None:
        self.heard.append(("unscale", sorted(indices), float(inverse)))

    def gradients(self) -> list[list[float]]:
        return [parameter.grad.tolist() for parameter in self.parameters if parameter.grad is not None]

    def jobs(self, *indices: int) -> dict[int, Any]:
        """Gradients of these slots, as `step()` has taken them."""
        return {self.slots[index].unit: [({}, [self.slots[index]])] for index in indices}


NORM = math.sqrt(25.0 + 144.0 + 84.0**2)


def close(found: list[list[float]], factor: float) -> bool:
    pairs = zip(found, GRADIENTS, strict=True)
    return all(one == pytest.approx([value * factor for value in each]) for one, each in pairs)


# ---- norms ----


def test_units_are_summed_each_in_one_job_and_ranks_combine_in_the_order_of_the_optimizer():
    call = Call()
    norm = call.norms.clip_grad_norm_(1e9, 2.0, False)
    assert float(norm) == pytest.approx(NORM) and norm.dtype is torch.float32
    scaled = [("scaled", index) for index in range(3)]
    assert call.heard == ["recover", *scaled, ("sum", 1, [0, 2]), ("sum", 0, [1])]
    [(parts, what)] = call.told
    assert list(parts.items()) == [(0, 25.0), (1, 144.0), (2, 84.0**2)]
    assert what.format("all") == "clip all to a norm of 1000000000.0"
    assert close(call.gradients(), 1.0)


def test_what_no_kernel_sums_is_summed_from_the_home_once_it_may_be_read():
    call = Call(fused=(0,), shared=True)
    assert float(call.norms.clip_grad_norm_(1e9, 2.0, False)) == pytest.approx(NORM)
    assert call.heard[-2:] == [("sum", 0, [1]), ("access", 1)]


def test_the_norm_is_of_the_gradients_of_all_ranks():
    call = Call(shared=True)
    call.elsewhere = 100.0
    assert float(call.norms.clip_grad_norm_(1e9, 2.0, False)) == pytest.approx(math.sqrt(NORM**2 + 300.0))


def test_a_gradient_of_the_users_own_comes_home_before_it_is_summed():
    call = Call()
    call.foreign = {2}
    call.norms.clip_grad_norm_(1e9, 2.0, False)
    assert call.heard.index(("foreign", 2)) < call.heard.index(("sum", 1, [0, 2]))
    assert ("foreign", 0) not in call.heard


def test_parameters_without_a_gradient_count_nothing():
    call = Call()
    call.parameters[2].grad = None
    assert float(call.norms.clip_grad_norm_(1e9, 2.0, False)) == pytest.approx(13.0)
    for parameter in call.parameters:
        parameter.grad = None
    assert float(call.norms.clip_grad_norm_(1e9, 2.0, False)) == 0.0


# ---- clips ----


def test_a_clip_multiplies_what_is_shown_or_else_what_the_home_holds():
    for shared in (False, True):
        call = Call(shared=shared)
        norm = call.norms.clip_grad_norm_(NORM / 2, 2.0, False)
        assert float(norm) == pytest.approx(NORM), "the norm before the clip"
        assert close(call.gradients(), 0.5)
        accesses = [each for each in call.heard if each in (("access", 0), ("access", 1))]
        assert accesses == ([("access", 1), ("access", 0)] if shared else []), "once for each unit"


def test_other_norms_and_updates_without_a_factor_are_clipped_by_torch():
    for call, norm_type in ((Call(), 1.0), (Call(fused=(0,)), 2.0)):
        expected = 103.0 if norm_type == 1.0 else NORM
        assert float(call.norms.clip_grad_norm_(expected / 2, norm_type, False)) == pytest.approx(expected)
        assert close(call.gradients(), 0.5) and call.heard == ["recover"]
        assert not call.norms.wants_sums


def test_norms_of_16_bit_gradients_are_computed_in_fp32():
    call = Call(fused=(), dtype=torch.bfloat16)
    norm = call.norms.clip_grad_norm_(NORM / 2, 2.0, False)
    assert norm.dtype is torch.float32 and float(norm) == pytest.approx(NORM, rel=1e-6)
    assert close(call.gradients(), 0.5)  # exact in bf16


def test_a_norm_that_is_not_finite_raises_before_anything_is_scaled_if_that_is_asked():
    for fused in ((0, 1), ()):
        for dtype in (torch.float32, torch.bfloat16):
            call = Call(fused=fused, dtype=dtype)
            call.parameters[1].grad.fill_(math.inf)
            with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0 for gradients"):
                call.norms.clip_grad_norm_(1.0, 2.0, True)
            assert call.gradients() == [[3.0, 4.0], [math.inf], [84.0]]
            assert not torch.isfinite(call.norms.clip_grad_norm_(1.0, 2.0, False))
            assert call.gradients()[2] == [0.0]


def test_a_clip_that_cannot_be_is_refused():
    for call, norm_type, found in (
        (Call(update="backward"), 2.0, 'update="backward", which has updated before the norm is known'),
        (Call(shared=True), 1.0, r"norm_type=1\.0"),
    ):
        with pytest.raises(noria.UsageError, match=found):
            call.norms.clip_grad_norm_(1.0, norm_type, False)
        assert close(call.gradients(), 1.0)


def test_a_clip_inside_a_backward_is_refused_before_anything_is_done():
    call = Call()

    def clip(_: torch.Tensor) -> None:
        with pytest.raises(noria.UsageError, match=r"optimizer\.clip_grad_norm_\(\) after backward\(\)"):
            call.norms.clip_grad_norm_(1.0, 2.0, False)

    value = torch.ones((), requires_grad=True)
    value.register_hook(clip)
    value.backward()
    assert not call.heard and value.grad is not None


def test_after_a_first_clip_gradients_are_summed_as_they_land():
    call = Call()
    assert not call.norms.wants_sums and Call(max_grad_norm=1.0).norms.wants_sums
    call.norms.clip_grad_norm_(1.0, 2.0, False)
    assert call.norms.wants_sums


def test_a_clip_at_the_step_changes_the_gradients_with_and_without_ranks():
    for shared in (False, True):
        call = Call(shared=shared)
        assert float(call.norms.clip_at_step(NORM / 2)) == pytest.approx(NORM)
        assert close(call.gradients(), 0.5) and bool(call.told) == shared


# ---- factors of a step ----


def test_a_step_without_scaler_and_limit_takes_no_factor_and_measures_nothing():
    call = Call()
    assert call.norms.factor(call.jobs(0, 1, 2)) == 1.0
    assert call.norms.grad_norm is None and not call.heard


def test_a_step_unscales_then_clips_while_drafts_assume_no_clip():
    call = Call(max_grad_norm=13.0 / 4)
    call.optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    factor = call.norms.factor(call.jobs(0, 1))  # slot 2 has no gradient in this step
    assert float(call.norms.grad_norm) == pytest.approx(6.5)
    assert factor == pytest.approx(0.25) and call.norms.expected_factor == 0.5
    assert close(call.gradients(), 1.0), "the update applies it"


def test_an_update_that_takes_no_factor_is_not_clipped_by_one():
    call = Call(fused=(0,), max_grad_norm=1.0)
    assert call.norms.factor(call.jobs(0, 1, 2)) == 1.0 and call.norms.grad_norm is None


def test_gradients_that_a_step_has_used_are_unscaled_by_the_engine_or_here():
    call = Call()
    call.norms.unscale(call.slots)
    assert not call.heard, "no scaler"
    call.optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    call.foreign = {1}
    call.norms.unscale(call.slots)
    assert call.heard == [("unscale", [0, 2], 0.25)]
    assert call.gradients() == [[3.0, 4.0], [3.0], [84.0]]
