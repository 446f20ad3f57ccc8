"""torch's own clip if ranks share the model: each has a part of every gradient, and norms are the whole model's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import noria
import pytest
import torch
import torch.distributed as dist
from noria.step.sharded_norms import ShardedNorms
from noria.testing import assert_same_bits, on_machine
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, Net, loss_of
from tests.journeys.test_shared import choosing, sgd, share_gradients, uneven
from tests.ranks import asked_for, assert_fine, in_turn_on_ranks

STEPS, BITES, NEVER = 3, 0.05, 1e6
clip = nn.utils.clip_grad_norm_


class Pair:
    """A plain model whose gradients are shared by hand, and a wrapped one."""

    def __init__(self, rank: int, size: int, make: Callable[[], nn.Module] = uneven, **policy: Any) -> None:
        self.rank, self.size = rank, size
        torch.manual_seed(0)
        self.plain, self.model = make(), make()
        self.model.load_state_dict(self.plain.state_dict())
        self.theirs, self.ours = sgd(self.plain.parameters()), sgd(self.model.parameters())
        with on_machine(hostility=HOSTILE):
            noria.wrap(self.model, self.ours, device=DEVICE, window=2, **policy)

    def backward(self, number: int, scaled: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None) -> None:
        """What is there already is kept out of the sum over the ranks."""
        held = [p.grad for p in self.plain.parameters()]
        self.plain.zero_grad()
        for each in (self.plain, self.model):
            loss = loss_of(each, 100 * self.rank + number)
            (loss if scaled is None else scaled(each, loss)).backward()
        share_gradients(self.plain.parameters(), self.size, in_fp32=False)
        for p, before in zip(self.plain.parameters(), held, strict=True):
            if before is not None:
                p.grad = before.add_(p.grad)

    def both(self, act: Callable[[nn.Module], torch.Tensor]) -> None:
        """The same answer, to the bit."""
        wanted, found = act(self.plain), act(self.model)
        assert_same_bits({"answer": found}, {"answer": wanted})

    def step(self) -> None:
        for updater in (self.theirs, self.ours):
            updater.step()
            updater.zero_grad()
        assert_same_bits(self.model.state_dict(), self.plain.state_dict())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def clips(rank: int, size: int, **how: Any) -> None:
    # torch knows no largest element of a gradient without elements.
    pair = Pair(rank, size, Net if how["norm_type"] == float("inf") else uneven, kernel="torch")
    for number in range(STEPS):
        pair.backward(number)
        max_norm = [BITES, NEVER][number % 2]
        pair.both(lambda model, max_norm=max_norm: clip(model.parameters(), max_norm, **how))
        pair.step()


def clips_by_a_total_norm(rank: int, size: int, foreach: bool) -> None:
    pair = Pair(rank, size, kernel="torch")
    for number in range(STEPS):
        pair.backward(number)

        def act(model: nn.Module) -> torch.Tensor:
            norm = nn.utils.get_total_norm(gradients(model), foreach=foreach)
            nn.utils.clip_grads_with_norm_(model.parameters(), BITES, norm, foreach=foreach)
            return norm

        pair.both(act)
        pair.step()


def accumulates_after_a_clip(rank: int, size: int) -> None:
    pair = Pair(rank, size, kernel="torch")
    for number in range(STEPS):
        for micro in range(3):
            pair.backward(10 * number + micro)
            pair.both(lambda model: clip(model.parameters(), BITES))
        pair.step()


def clips_twice(rank: int, size: int) -> None:
    pair = Pair(rank, size, kernel="torch")
    for number in range(STEPS):
        pair.backward(number)
        for max_norm in (1.0, BITES, BITES / 3):
            pair.both(lambda model, max_norm=max_norm: clip(model.parameters(), max_norm))
        pair.step()


def scales_losses(rank: int, size: int, kernel: str, clips: bool, overflows: bool = True) -> None:
    """The loss of one rank becomes infinite: all ranks skip that step."""
    pair = Pair(rank, size, Net, kernel=kernel)
    models = (pair.plain, pair.model)
    scalers = {each: torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2) for each in models}
    updaters = {pair.plain: pair.theirs, pair.model: pair.ours}
    for number in range(4):
        blows_up = overflows and number == 2 and rank == 0

        def scaled(model: nn.Module, loss: torch.Tensor, blows_up: bool = blows_up) -> torch.Tensor:
            return scalers[model].scale(loss * float("inf") if blows_up else loss)

        pair.backward(number, scaled)
        if clips:
            for each in models:
                scalers[each].unscale_(updaters[each])
            pair.both(lambda model: clip(model.parameters(), BITES))
        for each in models:
            scalers[each].step(updaters[each])
            scalers[each].update()
            updaters[each].zero_grad()
        assert scalers[pair.plain].get_scale() == scalers[pair.model].get_scale()
        assert_same_bits(pair.model.state_dict(), pair.plain.state_dict())
    assert (scalers[pair.model].get_scale() != 2.0**12) == overflows


def clips_in_noria_s_kernels(rank: int, size: int, accumulates: bool, **policy: Any) -> None:
    """The norm is that of all elements, exact and rounded once; where it is taken for torch's, bits are a plain
    clip's by that norm."""
    pair = Pair(rank, size, kernel="fused", **policy)
    twin = Pair(rank, size, kernel="fused", update="blocking")
    for number in range(STEPS):
        for micro in range(2 if accumulates else 1):
            for each in (pair, twin):
                each.backward(10 * number + micro)
            exact = sum(float(g.double().square().sum()) for g in gradients(pair.plain)) ** 0.5
            norm = clip(pair.model.parameters(), BITES)
            assert abs(norm.item() / exact - 1) < 1e-6
            gathered = [torch.zeros(()) for _ in range(size)]
            dist.all_gather(gathered, norm)
            for its in gathered:
                assert_same_bits({"norm": its}, {"norm": gathered[0]})
            clip(pair.plain.parameters(), BITES)
            again = clip(twin.model.parameters(), BITES)
            assert_same_bits({"norm": norm}, {"norm": again})
            clip(twin.plain.parameters(), BITES)
        for each in (pair, twin):
            for updater in (each.theirs, each.ours):
                updater.step()
                updater.zero_grad()
        assert_same_bits(pair.model.state_dict(), twin.model.state_dict())
        for ours, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            assert ours.shape == theirs.shape
        with noria.materialize(pair.model, read_only=True):
            for ours, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
                torch.testing.assert_close(ours.data, theirs.data, rtol=1e-5, atol=1e-7)


def uses_the_norms_that_it_is_told(rank: int, size: int, kernel: str) -> None:
    """Wrong ones change the weights."""

    def trained(wrong: bool) -> torch.Tensor:
        own = ShardedNorms.norms

        def norms(self: ShardedNorms, *args: Any) -> Any:
            return [None if each is None else each * (2 if wrong else 1) for each in own(self, *args)]

        with mock.patch.object(ShardedNorms, "norms", norms):
            pair = Pair(rank, size, kernel=kernel)
            pair.backward(0)
            clip(pair.model.parameters(), BITES)
        pair.ours.step()
        return pair.model.state_dict()["head.weight"].clone()

    assert not torch.equal(trained(False), trained(True))


def updates_inside_backward(rank: int, size: int) -> None:
    pair = Pair(rank, size, kernel="fused", update="backward")
    for number in range(2):
        pair.backward(number)
        norm = clip(pair.model.parameters(), NEVER)
        torch.testing.assert_close(norm, clip(pair.plain.parameters(), NEVER), rtol=1e-6, atol=0)
        for updater in (pair.theirs, pair.ours):
            updater.step()
            updater.zero_grad()
    with pair.ours.accumulate():  # not used up yet: the last step's norm is not its norm
        pair.backward(2)
    with pytest.raises(RuntimeError, match="to accumulate, use"):
        clip(pair.model.parameters(), BITES)
    pair.backward(3)
    clip(pair.model.parameters(), BITES)
    with pytest.raises(noria.UsageError, match=r"clip that does not bite"):
        pair.ours.step()


def finds_no_number(rank: int, size: int) -> None:
    """In any part of the sum."""
    pair = Pair(rank, size, Net, kernel="fused")
    with torch.no_grad():
        for model in (pair.plain, pair.model):
            context = noria.materialize(model) if model is pair.model else contextlib.nullcontext()
            with context:
                model.head.bias[-1] = float("nan")
    pair.backward(0)
    for order in (2.0, float("inf")):
        assert nn.utils.get_total_norm(gradients(pair.plain), order).isnan()
        assert nn.utils.get_total_norm(gradients(pair.model), order).isnan()


def forgets_a_clip_of_what_it_does_not_use(rank: int, size: int) -> None:
    """Rank 0 alone uses a part of each block. Weights stand still, so the same batch has the same norm."""
    model = choosing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="fused")
    norms = []
    for _ in range(STEPS):
        loss_of(model, rank).backward()
        norms.append(clip(model.parameters(), BITES))
        optimizer.step()
        optimizer.zero_grad()
    assert norms[0] > BITES and all(torch.equal(each, norms[0]) for each in norms), norms


def other_touches_name_what_works(rank: int, size: int) -> None:
    pair = Pair(rank, size, kernel="torch")
    pair.backward(0)
    gradient = pair.model.head.weight.grad
    for touch in (
        gradient.sum,
        lambda: gradient.cpu().numpy(),
        lambda: gradient.add_(1),
        lambda: torch._foreach_add_([gradient], 1),
    ):
        with pytest.raises(Exception, match="ranks share the model"):
            touch()
    pair.both(lambda model: clip(model.parameters(), BITES))
    pair.step()


ACTS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}


def act(name: str, call: Callable[..., None], *args: Any) -> str:
    ACTS[name] = (call, args)
    return name


class With:
    """`act` with keywords, for another process."""

    def __init__(self, call: Callable[..., None], **how: Any) -> None:
        self.call, self.how = call, how

    def __call__(self, rank: int, size: int) -> None:
        self.call(rank, size, **self.how)


BY_TORCH = [
    act(f"clips, norm {order}, foreach={foreach}", With(clips, norm_type=order, foreach=foreach))
    for order in (2.0, 1.0, float("inf"))
    for foreach in (None, True, False)
]
TOTALS = [act(f"total norm, foreach={foreach}", clips_by_a_total_norm, foreach) for foreach in (True, False)]
SCALED = [
    act(f"scaled losses, {kernel}, clips={clips}", With(scales_losses, kernel=kernel, clips=clips))
    for kernel, clips in (("torch", False), ("torch", True), ("fused", False))
]
FINE = act("scaled losses that stay finite", With(scales_losses, kernel="torch", clips=False, overflows=False))
FUSED = [
    act("noria's kernels", With(clips_in_noria_s_kernels, accumulates=False)),
    act("noria's kernels, accumulating", With(clips_in_noria_s_kernels, accumulates=True)),
    act("noria's kernels, drafts", With(clips_in_noria_s_kernels, accumulates=False, draft_memory="64MiB")),
]
TOLD = [act(f"told norms, {kernel}", uses_the_norms_that_it_is_told, kernel) for kernel in ("torch", "fused")]
AFTER = act("accumulates after a clip", accumulates_after_a_clip)
TWICE = act("clips twice", clips_twice)
INSIDE = act("updates inside backward", updates_inside_backward)
NO_NUMBER = act("no number", finds_no_number)
UNUSED = act("forgets a clip", forgets_a_clip_of_what_it_does_not_use)
OTHERS = act("other touches", other_touches_name_what_works)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, ACTS))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*BY_TORCH, *TOTALS])
def test_a_clip_has_the_norm_of_the_whole_model_and_torchs_bits(found, name):
    assert_fine(found, name)


@pytest.mark.parametrize("name", [*SCALED, FINE])
def test_a_grad_scaler_unscales_and_skips_on_all_ranks_alike_with_torchs_bits(found, name):
    assert_fine(found, name)


@pytest.mark.parametrize("name", FUSED)
def test_noria_s_kernels_clip_by_the_exact_norm_which_all_ranks_have_alike(found, name):
    assert_fine(found, name)


@pytest.mark.parametrize("name", TOLD)
def test_wrong_norms_would_change_the_training(found, name):
    assert_fine(found, name)


def test_what_comes_after_a_clip_is_added_to_what_was_clipped(found):
    assert_fine(found, AFTER)


def test_a_clip_of_what_was_clipped_has_torchs_bits(found):
    assert_fine(found, TWICE)


def test_updates_inside_of_backward_let_a_clip_pass_that_does_not_bite(found):
    assert_fine(found, INSIDE)


def test_a_norm_of_what_is_no_number_is_none(found):
    assert_fine(found, NO_NUMBER)


def test_a_clip_is_forgotten_with_its_gradients_where_a_rank_does_not_use_all(found):
    assert_fine(found, UNUSED)


def test_what_a_part_cannot_answer_raises_and_names_what_works(found):
    assert_fine(found, OTHERS)
