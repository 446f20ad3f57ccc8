"""torch's own clip, norms and scaler on a wrapped model: the answers and the updates have torch's bits, though the
gradients stay where they are: norms are taken while gradients are in device memory, and the factor is left to the
update.
"""

from __future__ import annotations

import copy
import ctypes
import io
import itertools
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria.testing import on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.journeys.gradient_pairs import (  # noqa: F401 - a fixture
    DEVICES,
    GradientSide,
    deterministic,
    gradient_twins,
    skip_where_torch_cannot_unscale,
)
from tests.journeys.pairs import LATE_UPDATES, Net, adamw, sgd
from tests.pretend_gpu import vehicle

pytestmark = [
    pytest.mark.usefixtures("one_thread", "deterministic", "keeps_plan"),
    pytest.mark.sampled(7),
    pytest.mark.own_device,
]

STEPS = 4
BITES, BITES_SOMETIMES, NEVER = 0.05, 1.2, 1e6
POLICIES: dict[str, dict[str, Any]] = {
    "torch": {"kernel": "torch"},
    "fused": {"kernel": "fused"},
    "drafts": {"kernel": "fused", "draft_memory": "64MiB"},
    "torch, masters": {"kernel": "torch", "dtype": torch.bfloat16},
    "fused, masters": {"kernel": "fused", "dtype": torch.bfloat16},
}
over_policies = pytest.mark.parametrize("policy", POLICIES)
over_devices = pytest.mark.parametrize("device", DEVICES)


def twins(journey: Callable[[GradientSide], Any], device: str, policy: str, **more: Any) -> GradientSide:
    return gradient_twins(journey, device, **{**POLICIES[policy], **more})


def clip(side: GradientSide, max_norm: float = BITES, **how: Any) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(side.model.parameters(), max_norm, **how)


def loop(between: Callable[[GradientSide, int], Any], steps: int = STEPS) -> Callable[[GradientSide], None]:
    """`between` comes between backward() and step(); no other code looks at the gradients."""

    def journey(side: GradientSide) -> None:
        for number in range(steps):
            side.backward(number)
            between(side, number)
            side.end_step()

    return journey


# ---- a clip ---------------------------------------------------------------------------------------------------


@over_devices
@over_policies
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_clip_has_torchs_bits(foreach, norm_type, policy, device):
    def between(side: GradientSide, number: int) -> None:
        max_norm = [BITES, NEVER, BITES_SOMETIMES][number % 3]
        side.keep(f"norm {number}", clip(side, max_norm, norm_type=norm_type, foreach=foreach))

    twins(loop(between, steps=5), device, policy)


@over_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_clip_of_weights_in_16_bits_has_torchs_bits(foreach, dtype, device):
    def between(side: GradientSide, number: int) -> None:
        side.keep(f"norm {number}", clip(side, foreach=foreach))

    twins(loop(between), device, "torch", model=lambda: Net().to(dtype))


@over_devices
@over_policies
@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_total_norm_and_a_clip_by_it_have_torchs_bits(foreach, policy, device):
    def between(side: GradientSide, number: int) -> None:
        norm = nn.utils.get_total_norm(side.gradients(), foreach=foreach)
        side.keep(f"norm {number}", norm)
        nn.utils.clip_grads_with_norm_(side.model.parameters(), BITES, norm, foreach=foreach)

    twins(loop(between), device, policy)


@over_devices
def test_adamw_with_a_clip_has_torchs_bits(device):
    for policy in ("torch", "drafts"):
        twins(loop(lambda side, number: clip(side)), device, policy, make=adamw)


# ---- what may come after it -----------------------------------------------------------------------------------


def clips_twice(side: GradientSide, number: int) -> None:
    clip(side, 1.0)
    side.keep(f"second norm {number}", clip(side, BITES))


def clips_three_times(side: GradientSide, number: int) -> None:
    for max_norm in (1.0, 0.5, BITES):
        clip(side, max_norm)


def multiplies_often(side: GradientSide, number: int) -> None:
    for factor in (0.3, 7.1, 0.9, 1.7):
        torch._foreach_mul_(side.gradients(), factor)
    for gradient in side.gradients():
        gradient *= 0.123


def backs_off(side: GradientSide, number: int) -> None:
    clip(side)
    side.backward(100 + number)


def clips_each_backward(side: GradientSide, number: int) -> None:
    for micro in range(3):
        side.keep(f"norm {number}.{micro}", clip(side))
        side.backward(100 * micro + number)
    clip(side)


def edits(side: GradientSide, number: int) -> None:
    clip(side)
    for gradient in side.gradients():
        gradient.add_(1e-3)


def edits_a_view(side: GradientSide, number: int) -> None:
    clip(side)
    for gradient in side.gradients():
        gradient.view(-1)[::2] *= 3


def edits_first(side: GradientSide, number: int) -> None:
    side.gradients()[number].mul_(5).add_(1e-2)
    side.keep(f"norm {number}", clip(side))


def edits_data_first(side: GradientSide, number: int) -> None:
    side.gradients()[number].data.add_(1e-2)
    side.keep(f"norm {number}", clip(side))


def replaces_one(side: GradientSide, number: int) -> None:
    clip(side)
    parameter = side.model.blocks[number % 5].expand.weight
    parameter.grad = torch.full_like(parameter.grad, 1e-2)


def multiplies_what_it_replaces(side: GradientSide, number: int) -> None:
    clip(side)
    parameter = side.model.blocks[number % 5].expand.weight
    parameter.grad = parameter.grad * 2
    side.keep(f"norm {number}", clip(side, BITES / 2))


def clears_one(side: GradientSide, number: int) -> None:
    clip(side)
    side.model.blocks[number % 5].expand.weight.grad = None
    side.keep(f"norm {number}", clip(side, BITES / 2))


def clears_all(side: GradientSide, number: int) -> None:
    clip(side)
    side.optimizer.zero_grad()
    side.backward(200 + number)


def zeroes_all(side: GradientSide, number: int) -> None:
    clip(side)
    side.optimizer.zero_grad(set_to_none=False)
    side.backward(200 + number)


def clips_a_few(side: GradientSide, number: int) -> None:
    side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.blocks[number % 5].parameters(), 1e-3))
    side.keep(f"norm of all {number}", clip(side))


def clips_by_value(side: GradientSide, number: int) -> None:
    clip(side)
    nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)


def multiplies_by_a_tensor_that_changes(side: GradientSide, number: int) -> None:
    factor = torch.tensor(0.25, device=side.device)
    torch._foreach_mul_(side.gradients(), factor)
    factor.fill_(3.0)
    side.gradients()[0].mul_(factor)
    factor.zero_()


def multiplies_by_what_changes_unheard(side: GradientSide, number: int) -> None:
    factor = torch.ones((), device=side.device)
    for index, gradient in enumerate(side.gradients()):
        factor.data.fill_(1 + index)  # no version counter sees it
        gradient.mul_(factor)


def edits_the_norms_that_it_was_given(side: GradientSide, number: int) -> None:
    for norm in torch._foreach_norm(side.gradients()):
        norm.mul_(7)
    side.keep(f"norm {number}", clip(side))


def edits_the_memory_of_norms_that_it_was_given(side: GradientSide, number: int) -> None:
    """No counter says so."""
    for norm in torch._foreach_norm(side.gradients()):
        norm.data.mul_(7)
    side.keep(f"norm {number}", nn.utils.get_total_norm(side.gradients()))
    for norm in (torch.linalg.vector_norm(each) for each in side.gradients()):
        norm.data.mul_(7)
    side.keep(f"norm one by one {number}", nn.utils.get_total_norm(side.gradients(), foreach=False))
    clip(side)


def edits_the_total_norm(side: GradientSide, number: int) -> None:
    clip(side).mul_(100)
    side.keep(f"norm {number}", clip(side, BITES / 2))


def steps_twice(side: GradientSide, number: int) -> None:
    clip(side)
    side.optimizer.step()
    if number % 2:
        side.keep(f"norm {number}", clip(side, BITES / 2))


def loads(side: GradientSide, number: int) -> None:
    clip(side)
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    side.model.load_state_dict({name: value.clone() for name, value in side.model.state_dict().items()})


def reads_weights(side: GradientSide, number: int) -> None:
    clip(side)
    side.keep(f"head {number}", side.model.state_dict()["head.weight"])


def multiplies_beyond_fp32(side: GradientSide, number: int) -> None:
    torch._foreach_mul_(side.gradients(), 1.5)
    if side.device == "cuda" and not vehicle.is_installed():
        with pytest.raises(RuntimeError, match="without overflow"):
            torch._foreach_mul_(side.gradients(), 1e39)
    elif number == 2:
        torch._foreach_mul_(side.gradients(), 1e39)


def unscales_by_one_element(side: GradientSide, number: int) -> None:
    """Where a scaler has a scalar."""
    found, inverse = (torch.full((1,), value, device=side.device) for value in (0.0, 0.3))
    torch._amp_foreach_non_finite_check_and_unscale_(side.gradients(), found, inverse)
    clip(side)


AFTERS = [
    clips_twice,
    clips_three_times,
    multiplies_often,
    backs_off,
    clips_each_backward,
    edits,
    edits_a_view,
    edits_first,
    edits_data_first,
    replaces_one,
    multiplies_what_it_replaces,
    clears_one,
    clears_all,
    zeroes_all,
    clips_a_few,
    clips_by_value,
    multiplies_by_a_tensor_that_changes,
    multiplies_by_what_changes_unheard,
    edits_the_norms_that_it_was_given,
    edits_the_memory_of_norms_that_it_was_given,
    edits_the_total_norm,
    steps_twice,
    loads,
    reads_weights,
    multiplies_beyond_fp32,
    unscales_by_one_element,
]


@over_devices
@pytest.mark.parametrize("policy", ["torch", "drafts", "fused, masters"])
@pytest.mark.parametrize("act", AFTERS, ids=lambda act: act.__name__)
def test_what_comes_before_and_after_a_clip_has_torchs_bits(act, policy, device):
    if act is unscales_by_one_element:
        skip_where_torch_cannot_unscale(device, POLICIES[policy])
    twins(loop(act), device, policy)


@over_devices
@pytest.mark.parametrize("policy", ["torch", "fused", "drafts"])
def test_gradients_that_are_never_cleared_are_clipped_again_and_again(policy, device):
    def journey(side: GradientSide) -> None:
        for number in range(6):
            side.backward(number)
            side.keep(f"norm {number}", clip(side, BITES_SOMETIMES))
            side.optimizer.step()
            if number % 3 == 2:
                side.keep_gradients(f"step {number}")
                side.optimizer.zero_grad(set_to_none=number == 2)

    twins(journey, device, policy, hostility=LATE_UPDATES if device == "cpu" else None)


@over_devices
@pytest.mark.parametrize("policy", ["torch", "drafts"])
def test_a_backward_that_fails_leaves_what_was_clipped_to_be_cleared(policy, device):
    def journey(side: GradientSide) -> None:
        for number in range(STEPS):
            side.backward(number)
            clip(side)
            handle = side.model.blocks[2].expand.weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                side.backward(50 + number)
            handle.remove()
            side.optimizer.zero_grad()
            side.backward(number)
            side.keep(f"norm {number}", clip(side))
            side.end_step()

    twins(journey, device, policy)


# ---- other ways to the bytes ----------------------------------------------------------------------------------


def saved(gradient: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file)


def in_numpy(gradient: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gradient.numpy().copy())


def by_address(gradient: torch.Tensor) -> torch.Tensor:
    pointer = ctypes.cast(gradient.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return torch.tensor([pointer[i] for i in range(gradient.numel())]).view_as(gradient)


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.save": saved,
    "numpy": in_numpy,
    "deepcopy": copy.deepcopy,
    "dlpack": lambda gradient: torch.from_dlpack(gradient).clone(),
    "address": by_address,
    "storage": lambda gradient: torch.empty(0).set_(gradient.untyped_storage()).clone(),
    "bytes": lambda gradient: torch.tensor(list(gradient.untyped_storage())),
    "tolist": lambda gradient: torch.tensor(gradient.tolist()),
    "print": lambda gradient: torch.tensor([ord(letter) for letter in str(gradient)]),
    "cpu": lambda gradient: gradient.cpu(),
    "data": lambda gradient: gradient.data.clone(),
    "detach": lambda gradient: gradient.detach().clone(),
    "sum": lambda gradient: gradient.sum(),
    "item": lambda gradient: torch.tensor(gradient.view(-1)[0].item()),
    "view as integers": lambda gradient: gradient.view(torch.int32).clone(),
}
OF_THE_HOST = ("numpy", "address", "storage", "dlpack", "print", "bytes")


@over_devices
@pytest.mark.parametrize("policy", ["torch", "drafts"])
@pytest.mark.parametrize("reader", READERS)
def test_each_reader_of_a_clipped_gradient_finds_its_bytes(reader, policy, device):
    if device != "cpu" and reader in OF_THE_HOST:
        pytest.skip("reads the host's memory")

    def between(side: GradientSide, number: int) -> None:
        clip(side)
        for index, gradient in enumerate(side.gradients()):
            side.keep(f"step {number}, {index}", READERS[reader](gradient))
        side.keep(f"norm {number}", clip(side, BITES / 2))

    twins(loop(between), device, policy)


@over_devices
@pytest.mark.parametrize("policy", ["torch", "drafts"])
@pytest.mark.parametrize("way", ["numpy", "storage", "dlpack", "alias", "view", "detach", "data"])
def test_a_view_of_a_gradient_from_before_the_clip_shows_it_clipped_and_may_be_written(way, policy, device):
    if device != "cpu" and way in ("numpy", "dlpack"):
        pytest.skip("a way to the host's memory")

    def taken(gradient: torch.Tensor) -> Any:
        return {
            "numpy": lambda: torch.from_numpy(gradient.numpy()),
            "storage": lambda: torch.empty(0, device=device).set_(gradient.untyped_storage()),
            "dlpack": lambda: torch.from_dlpack(gradient),
            "alias": lambda: gradient,
            "view": lambda: gradient.view(-1),
            "detach": gradient.detach,
            "data": lambda: gradient.data,
        }[way]()

    def journey(side: GradientSide) -> None:
        for number in range(STEPS):
            side.backward(number)
            ways = [taken(gradient) for gradient in side.gradients()]
            clip(side)
            for index, each in enumerate(ways):
                side.keep(f"step {number}, {index}", each)
            ways[number].view(-1)[0] = 0.5
            side.keep(f"norm {number}", clip(side, BITES / 2))
            ways[number + 1].view(-1)[0] = 0.25
            side.end_step()

    twins(journey, device, policy)


# ---- what is not finite, and scalers --------------------------------------------------------------------------


def spoiled(side: GradientSide, value: float) -> Any:
    """The next gradient of a block has it."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = value
        return gradient

    return side.model.blocks[2].expand.weight.register_hook(spoil)


@over_devices
@pytest.mark.parametrize("policy", ["torch", "drafts"])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_told(value, foreach, policy, device):
    def journey(side: GradientSide) -> None:
        for number in range(STEPS):
            handle = spoiled(side, value) if number == 2 else None
            side.backward(number)
            if handle is not None:
                handle.remove()
                with pytest.raises(RuntimeError, match="non-finite"):
                    clip(side, foreach=foreach, error_if_nonfinite=True)
                side.keep_gradients(f"step {number}")
                side.keep(f"norm {number}", clip(side, foreach=foreach))
                side.keep_gradients(f"clipped, step {number}")
                side.optimizer.zero_grad()
                continue
            clip(side, foreach=foreach, error_if_nonfinite=True)
            side.end_step()

    twins(journey, device, policy)


SCALER_STEPS = 7


@over_devices
@over_policies
@pytest.mark.parametrize("way", ["unscales", "unscales and clips", "clips scaled", "leaves it to step"])
def test_a_scaler_has_torchs_bits_and_skips_the_step_of_an_infinity(way, policy, device):
    skip_where_torch_cannot_unscale(device, POLICIES[policy])

    def journey(side: GradientSide) -> None:
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10 * 1.1, growth_interval=2, growth_factor=1.7)
        if way == "leaves it to step":
            side.optimizer._step_supports_amp_scaling = False
        for number in range(SCALER_STEPS):
            handle = spoiled(side, float("inf")) if number == 3 else None
            scaler.scale(side.loss(number)).backward()
            side.own_gradients()
            if handle is not None:
                handle.remove()
            if way == "clips scaled":
                side.keep(f"norm {number}", clip(side))
            if way.startswith("unscales") or side.is_plain:
                scaler.unscale_(side.optimizer)
            if way == "unscales and clips":
                side.keep(f"norm {number}", clip(side))
            scaler.step(side.optimizer)
            scaler.update()
            side.keep(f"scale {number}", scaler.get_scale())
            side.optimizer.zero_grad(set_to_none=number % 2 == 0)

    twins(journey, device, policy)


@over_devices
@pytest.mark.parametrize("policy", ["torch", "fused"])
def test_gradients_of_a_step_that_a_scaler_skipped_stay_unscaled(policy, device):
    """They are not cleared: the next backward adds to what was unscaled."""

    def journey(side: GradientSide) -> None:
        scaler = torch.amp.GradScaler(device, init_scale=64.0)
        for number in range(SCALER_STEPS):
            handle = spoiled(side, float("inf")) if number == 3 else None
            scaler.scale(side.loss(number)).backward()
            side.own_gradients()
            if handle is not None:
                handle.remove()
            scaler.unscale_(side.optimizer)
            scaler.step(side.optimizer)
            scaler.update()
            if number in (1, 4):
                side.keep_gradients(f"step {number}")
                side.optimizer.zero_grad()

    twins(journey, device, policy)


# ---- any order ------------------------------------------------------------------------------------------------


def random_journey(seed: int) -> Callable[[GradientSide], None]:
    """Acts of a loop in an order of chance; all that is read is compared."""

    def journey(side: GradientSide) -> None:
        chance = torch.Generator().manual_seed(seed)
        counter = itertools.count()
        aliases: list[torch.Tensor] = []

        def draw(end: int) -> int:
            return int(torch.randint(end, (), generator=chance))

        def some() -> list[torch.Tensor]:
            found = side.gradients()
            return [each for each in found if draw(2)]

        def one() -> list[torch.Tensor]:
            found = side.gradients()
            return [found[draw(len(found))]] if found else []

        def unscale() -> None:
            chosen = side.gradients() if draw(2) else some()
            if not chosen:
                return
            found = torch.zeros((), device=side.device)
            inverse = torch.tensor([1 / 3.0, 0.5][draw(2)], device=side.device)
            torch._amp_foreach_non_finite_check_and_unscale_(chosen, found, inverse)
            side.keep(f"{next(counter)}: infinities", found)

        def norms(name: str, found: list[torch.Tensor]) -> None:
            for each in found:
                side.keep(f"{next(counter)}: {name}", each)
                if draw(3) == 0:
                    each.data.mul_(3)

        def fill_parameter() -> None:
            parameter = list(side.model.parameters())[draw(20)]
            if parameter.grad is not None:
                parameter.grad = [None, torch.ones_like(parameter.grad) * 1e-2, parameter.grad * 0.5][draw(3)]

        def keep_alias() -> None:
            for each in one():
                aliases.append([each, each.view(-1), each.detach(), each.data][draw(4)])

        def write_alias() -> None:
            if aliases:
                aliases[draw(len(aliases))].mul_(0.7).add_(1e-3)

        def read_aliases() -> None:
            for each in aliases:
                side.keep(f"{next(counter)}: alias", each)

        def multiply() -> None:
            if found := some():
                factor = [0.37, torch.tensor(0.37, device=side.device)][draw(2)]
                torch._foreach_mul_(found, factor)
            for each in one():
                each.mul_([0.9, torch.tensor(1.3, device=side.device)][draw(2)])

        acts: list[Callable[[], Any]] = [
            lambda: side.backward(draw(50)),
            lambda: side.backward(draw(50)),
            lambda: side.keep(f"{next(counter)}: norm", clip(side, [BITES, NEVER][draw(2)], foreach=bool(draw(2)))),
            lambda: side.keep(
                f"{next(counter)}: norm", clip(side, [BITES, NEVER][draw(2)], norm_type=[1.0, 2.0][draw(2)])
            ),
            lambda: norms("norms", list(torch._foreach_norm(side.gradients() or [torch.ones(1)], [1, 2][draw(2)]))),
            lambda: norms("norm of one", [torch.linalg.vector_norm(each) for each in one()]),
            unscale,
            multiply,
            fill_parameter,
            keep_alias,
            write_alias,
            read_aliases,
            lambda: [each.add_(1e-3) for each in one()],
            lambda: side.keep_gradients(f"{next(counter)}") if draw(3) == 0 else None,
            side.optimizer.step,
            side.optimizer.step,
            lambda: side.end_step(set_to_none=bool(draw(3))),
            lambda: side.optimizer.zero_grad(set_to_none=bool(draw(2))),
            lambda: side.keep(f"{next(counter)}: head", side.model.state_dict()["head.weight"]),
        ]
        side.backward(0)
        side.end_step()
        for _ in range(40):
            acts[draw(len(acts))]()
        side.keep_gradients("last")

    return journey


@over_devices
@pytest.mark.parametrize("policy", ["torch", "fused", "drafts", "fused, masters"])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_acts_has_torchs_bits(seed, policy, device):
    skip_where_torch_cannot_unscale(device, POLICIES[policy])
    twins(random_journey(seed), device, policy)


# ---- what is shown by changing it -----------------------------------------------------------------------------


class DoublesNorms(TorchDispatchMode):
    """Of all lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._foreach_norm.Scalar:
            self.num_norms += 1
            return [each * 2 for each in found]
        return found


@pytest.mark.parametrize("policy", POLICIES)
def test_the_clip_uses_norms_that_were_taken_inside_of_the_backward(policy):
    """Norms that are wrong there, and only there, change the training: a plain twin has none to change."""

    def trained(is_wrapped: bool, doubles: bool) -> tuple[list[float], torch.Tensor, int]:
        torch.manual_seed(0)
        model = Net()
        side = GradientSide(model, sgd(model.parameters()), "cpu", not is_wrapped)
        if is_wrapped:
            noria.wrap(model, side.optimizer, device="cpu", window=2, **POLICIES[policy])
        norms, count = [], 0
        for number in range(STEPS):
            loss = side.loss(number)
            if doubles:
                with DoublesNorms() as mode:
                    loss.backward()
                count += mode.num_norms
            else:
                loss.backward()
            norms.append(clip(side).item())
            side.end_step()
        return norms, model.state_dict()["head.weight"].clone(), count

    norms, weight, _ = trained(True, False)
    wrong_norms, wrong_weight, count = trained(True, True)
    assert count > 0
    assert norms[0] == wrong_norms[0]  # nothing was asked ahead of the first
    assert wrong_norms[1] == 2 * norms[1] and not torch.equal(weight, wrong_weight)
    plain = trained(False, False)
    assert plain[0] == trained(False, True)[0]


@over_devices
@pytest.mark.parametrize("policy", ["torch", "fused"])
def test_a_factor_that_is_left_to_the_update_is_what_the_update_uses(policy, device):
    """A wrong one in its place changes the weights; and the gradient's bytes have not been touched by the clip."""

    def trained(poke: bool) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        model = Net()
        side = GradientSide(model, sgd(model.parameters()), device, False)
        hold = {"hold_us": {"update": 50_000}} if device == "cpu" else {}
        with on_machine(hostility=hold):
            noria.wrap(model, side.optimizer, device=device, window=2, draft_memory=0, **POLICIES[policy])
        side.backward(0)
        clip(side)
        wrapped = wrapped_by(model)
        slot = wrapped.context.slot_of[model.head.weight]
        held = wrapped.context.home.held(slot)
        if device != "cpu":
            torch.cuda.synchronize()
        before = held.clone()
        assert wrapped.context.engine.gradients.scale_values(slot.index)
        if poke:
            own = wrapped.context.engine.updates.begin_step

            def begin_step() -> None:
                own()
                if device != "cpu":
                    torch.cuda.synchronize()
                address, count = wrapped.context.engine.gradients.late_scales(slot.index)
                assert count == 1
                ctypes.c_float.from_address(address).value *= 2

            engine = wrapped.context.engine
            forwarding = Forwarding(engine, updates=Forwarding(engine.updates, begin_step=begin_step))
            object.__setattr__(wrapped.context, "engine", forwarding)
        side.optimizer.step()
        weight = model.state_dict()["head.weight"].clone()
        return weight, int(torch.equal(before, held))

    right, wrong = trained(False), trained(True)
    assert not torch.equal(right[0], wrong[0])
    start = (torch.manual_seed(0), Net())[1].head.weight.detach()
    torch.testing.assert_close(wrong[0] - start, 2 * (right[0] - start), rtol=1e-3, atol=1e-7)
    if policy == "fused":
        assert right[1] and wrong[1]


class Forwarding:
    """An object with some of its methods replaced."""

    def __init__(self, own: Any, **replaced: Any) -> None:
        self.__dict__.update(own=own, **replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


# ---- what crosses the link ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not vehicle.asked_for(), reason="only the pretend GPU counts what kernels do to the host's memory")
@pytest.mark.parametrize("policy", ["torch", "fused", "drafts", "fused, masters"])
@pytest.mark.parametrize(
    "way", ["clip", "clip one by one", "total norm", "scaler", "scaler and clip", "accumulates", "reads"]
)
def test_a_plain_loop_moves_each_gradient_up_the_link_and_down_again_only_to_add_to_it(way, policy):
    from tests.pretend_gpu import machine

    torch.manual_seed(0)
    model = Net()
    side = GradientSide(model, sgd(model.parameters()), "cuda", False)
    noria.wrap(model, side.optimizer, device="cuda", window=2, **POLICIES[policy])
    side.optimizer._step_supports_amp_scaling = False
    wrapped = wrapped_by(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    total = sum(p.numel() * p.element_size() for p in model.parameters())

    def step(number: int) -> None:
        if way.startswith("scaler"):
            scaler.scale(side.loss(number)).backward()
            if way == "scaler and clip":
                scaler.unscale_(side.optimizer)
                clip(side)
            scaler.step(side.optimizer)
            scaler.update()
            side.optimizer.zero_grad()
            return
        side.backward(number)
        if way == "clip":
            assert clip(side) > BITES
        elif way == "clip one by one":
            clip(side, foreach=False)
        elif way == "accumulates":
            side.backward(number + 10)
        elif way == "total norm":
            nn.utils.clip_grads_with_norm_(model.parameters(), BITES, nn.utils.get_total_norm(side.gradients()))
        else:
            sum(each.sum() for each in side.gradients())
        side.end_step()

    def copied() -> tuple[int, int]:
        """Bytes of gradients that the copy lanes have carried, down and up."""
        wrapped.context.engine.idle()
        torch.cuda.synchronize()
        times = wrapped.context.engine.copies.times_fetched()
        weights = sum(number * unit.weights for number, unit in zip(times, wrapped.context.units, strict=True))
        fetched, drained = (wrapped.context.backend.stats(lane)["bytes"] for lane in ("fetch", "drain"))
        return fetched - weights, drained

    for number in range(3):  # the first asks for norms that noria does not expect
        step(number)
    before = copied()
    machine.reset_counters()
    for number in range(3, 6):
        step(number)
    down, up = (after - begun for after, begun in zip(copied(), before, strict=True))
    counted = machine.counters()
    by_kernels = counted["link_bytes_read"] + counted["link_bytes_written"]
    accumulates = way == "accumulates"
    assert (down, up) == (3 * total * accumulates, 3 * total * (1 + accumulates))
    if way == "reads":
        assert by_kernels >= 3 * total
    elif accumulates:
        assert by_kernels == 0
    else:  # two factors of each gradient at most
        assert by_kernels <= 3 * 2 * 4 * len(list(model.parameters())), (by_kernels, total)


# ---- updates inside of backward -------------------------------------------------------------------------------


def wrapped_in_backward(device: str) -> GradientSide:
    torch.manual_seed(0)
    model = Net()
    side = GradientSide(model, sgd(model.parameters()), device, False)
    noria.wrap(model, side.optimizer, device=device, window=2, kernel="fused", update="backward")
    return side


@over_devices
@pytest.mark.parametrize("factor", [0.5, 1.0 + 2**-23, 2.0])
@pytest.mark.parametrize("kind", ["number", "tensor", "list"])
def test_any_factor_but_1_is_refused_where_updates_are_made_inside_of_backward(kind, factor, device):
    side = wrapped_in_backward(device)

    def multiply(factor: float) -> None:
        by = torch.tensor(factor, device=device) if kind == "tensor" else factor
        if kind == "list":
            torch._foreach_mul_(side.gradients(), by)
        else:
            side.model.blocks[1].expand.weight.grad.mul_(by)

    for number in range(2):
        side.backward(number)
        multiply(1.0)
        multiply(1.0)
        side.end_step()
    side.backward(2)
    multiply(factor)
    with pytest.raises(noria.UsageError, match=r'clip that does not bite.*Remedy: .*update="auto"'):
        side.optimizer.step()
    side.optimizer.zero_grad()
    side.backward(3)
    side.end_step()
