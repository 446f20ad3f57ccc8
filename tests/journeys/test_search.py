"""A random search: journeys x optimizers x policies x machines, each drawn from a seed, until the time is over.

    PRETEND_GPU=1 SEARCH_SECONDS=600 SEARCH_FROM=1000 python -m pytest tests/journeys/test_search.py -m search

What fails names its seed. It is found again with SEARCH_FROM=<seed> SEARCH_SECONDS=0, which makes one run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import random
import time
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria import _C
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE, IS_PRETEND
from tests.journeys.pairs import BLOCKS, OPTIMIZERS, Net, Side, both, loss_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.search]
STEPS = 4
Journey = Callable[[Side], None]


def step(side: Side, number: int) -> None:
    side.optimizer.step()
    side.optimizer.zero_grad()


def backward(side: Side, number: int) -> None:
    loss = loss_of(side.model, number)
    loss.backward()
    side.keep(f"loss {len(side.kept)}", loss)


# ---- journeys -----------------------------------------------------------------------------------------------------


def plain(side: Side) -> None:
    side.train(0, STEPS)


def evaluates(side: Side) -> None:
    for number in range(STEPS):
        backward(side, number)
        step(side, number)
        with torch.no_grad():
            side.keep(f"evaluation {number}", loss_of(side.model, 100 + number))


def clips(side: Side) -> None:
    for number in range(STEPS):
        backward(side, number)
        side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.parameters(), 0.1))
        step(side, number)


def accumulates(side: Side) -> None:
    for number in range(STEPS):
        for micro_batch in range(1 + number % 3):
            backward(side, 10 * number + micro_batch)
        step(side, number)


def scales(side: Side) -> None:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)
    for number in range(STEPS):
        loss = loss_of(side.model, number)
        scaler.scale(loss).backward()
        scaler.unscale_(side.optimizer)
        side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.parameters(), 0.1))
        scaler.step(side.optimizer)
        scaler.update()
        side.optimizer.zero_grad()
        side.keep(f"loss {number}", loss)


def sets_to_zero(side: Side) -> None:
    for number in range(STEPS):
        backward(side, number)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=False)


def keeps_gradients(side: Side) -> None:
    for number in range(STEPS):
        backward(side, number)
        if number % 2:
            side.keep_gradients(f"step {number}")
        step(side, number)


def edits_gradients(side: Side) -> None:
    for number in range(STEPS):
        backward(side, number)
        torch._foreach_mul_(list(side.gradients()), 0.5)
        side.model.blocks[number % BLOCKS].expand.weight.grad.add_(0.01)
        side.model.blocks[number % BLOCKS].norm.bias.grad = None
        step(side, number)


def edits_weights(side: Side) -> None:
    for number in range(STEPS):
        backward(side, number)
        step(side, number)
        reach = noria.materialize(side.model) if wrapped_by(side.model) else contextlib.nullcontext()
        with reach, torch.no_grad():
            side.model.blocks[number % BLOCKS].contract.weight.mul_(0.9)


def looks_at_weights(side: Side) -> None:
    for number in range(STEPS):
        backward(side, number)
        step(side, number)
        for name, value in side.model.state_dict().items():
            side.keep(f"step {number}: {name}", value)


def schedules(side: Side) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(side.optimizer, T_max=3)
    for number in range(STEPS):
        backward(side, number)
        step(side, number)
        schedule.step()


def loads(side: Side) -> None:
    side.train(0, 2)
    saved = copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict()))
    side.train(2, 4)
    side.model.load_state_dict(saved[0])
    side.optimizer.load_state_dict(saved[1])
    side.train(4, 6)


def calls_blocks(side: Side) -> None:
    """Blocks are called by themselves, in another order, and one of them twice."""
    for number in range(STEPS):
        backward(side, number)
        x = torch.ones(2, 6, side.model.embed.embedding_dim, device=DEVICE, dtype=side.model.embed.weight.dtype)
        for index in (3, 1, 3):
            x = side.model.blocks[index](x)
        x.square().mean().backward()
        step(side, number)


def waits_now_and_then(side: Side) -> None:
    for number in range(STEPS):
        backward(side, number)
        if DEVICE == "cuda" and number % 2:
            torch.cuda.synchronize()
        side.optimizer.step()
        side.optimizer.zero_grad()


def runs_out_of_memory(side: Side) -> None:
    """As after an error of torch's: the window shrinks, and what stays streams."""
    for number in range(STEPS):
        backward(side, number)
        step(side, number)
        wrapped = wrapped_by(side.model)
        if wrapped is not None and number % 2:
            for told in wrapped.run.on_out_of_memory:
                told(1 << 12)


WITHOUT_GRADIENTS: tuple[Journey, ...] = (
    plain,
    evaluates,
    edits_weights,
    looks_at_weights,
    schedules,
    loads,
    runs_out_of_memory,
)
JOURNEYS: tuple[Journey, ...] = (
    *WITHOUT_GRADIENTS,
    clips,
    accumulates,
    scales,
    sets_to_zero,
    keeps_gradients,
    edits_gradients,
    calls_blocks,
    waits_now_and_then,
)

# ---- draws --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Draw:
    journey: Journey
    optimizer: str
    policy: dict[str, Any]
    hostility: dict[str, Any]
    machine: dict[str, Any]

    def __str__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return str(fields | {"journey": self.journey.__name__})


SEARCHED = OPTIMIZERS | {"adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2, weight_decay=0.1)}


def drawn(seed: int) -> Draw:
    draw = random.Random(seed)
    policy: dict[str, Any] = {
        "kernel": draw.choice(("torch", "fused")),
        "window": draw.choice((2, 3, None)),
        "update": draw.choice(("auto", "auto", "backward", "blocking")),
        "activations": draw.choice(("keep", "keep", "offload", "recompute", "auto")),
        "draft_memory": draw.choice((0, 0, "64MiB", "20KiB")),
    }
    if policy["update"] != "auto":
        del policy["draft_memory"]
    if policy["update"] == "backward":
        policy["kernel"] = "fused"
    if policy["kernel"] == "fused" and draw.random() < 0.3:
        policy["dtype"] = torch.bfloat16
    hostility = {"seed": seed, "max_delay_us": draw.choice((0, 100, 500)), "poison": True}
    if draw.random() < 0.5:
        verb = draw.choice(
            ("fetch", "drain", "update", "forward", "backward", "offload", "reload", "fetch_state", "drain_state")
        )
        hostility["hold_us"] = {verb: draw.choice((500, 3000))}
    machine = {
        "seed": seed,
        "max_delay_us": draw.choice((0, 100, 1000)),
        "delayed_percent": draw.choice((5, 50)),
        "lazy": draw.random() < 0.4,
        "writes_everything": draw.random() < 0.2,
    }
    journeys = WITHOUT_GRADIENTS if policy["update"] == "backward" else JOURNEYS
    optimizer = draw.choice(tuple(SEARCHED))
    runs_there = policy["kernel"] == "torch" or DEVICE == "cpu" or _C.has_kernel_images()
    runs_there = runs_there and (optimizer != "adafactor" or policy["kernel"] == "torch")  # else on the host alone
    if policy["update"] != "backward" and runs_there:
        if draw.random() < 0.3:
            policy["optimizer_device"] = "device"
        if policy["kernel"] == "fused" or "optimizer_device" in policy:
            may_stand_still = policy["activations"] in ("keep", "recompute")
            policy["resident"] = draw.choice(("none", "all" if may_stand_still else "auto", "8KiB", "40KiB", "100KiB"))
    return Draw(draw.choice(journeys), optimizer, policy, hostility, machine)


def run(draw: Draw) -> None:
    policy = dict(draw.policy)
    window = policy.pop("window")
    on_device: Any = contextlib.nullcontext()
    if IS_PRETEND:
        from tests.pretend_gpu.machine import machine

        on_device = machine(**draw.machine)
    with on_device:
        both(
            draw.journey,
            model=Net,
            optimizer=SEARCHED[draw.optimizer],
            window=window,
            hostility=draw.hostility,
            compare_state=policy.get("dtype") is None,
            moved=False,
            **policy,
        )


def test_no_draw_changes_a_bit():
    first, seconds = int(os.environ.get("SEARCH_FROM", "0")), float(os.environ.get("SEARCH_SECONDS", "60"))
    begun, seed, failures = time.monotonic(), first, []
    while seed == first or time.monotonic() - begun < seconds:
        draw = drawn(seed)
        try:
            run(draw)
        except (AssertionError, RuntimeError) as error:
            failures.append(f"SEARCH_FROM={seed} SEARCH_SECONDS=0: {draw}\n{error}")
        seed += 1
    print(f"{seed - first} draws")
    assert not failures, f"{len(failures)} of {seed - first} draws failed\n" + "\n\n".join(failures[:5])


def test_draws_hold_every_journey_and_every_kind_of_machine():
    draws = [drawn(seed) for seed in range(200)]
    assert {draw.journey for draw in draws} == set(JOURNEYS)
    assert {draw.optimizer for draw in draws} == set(SEARCHED)
    assert {draw.machine["lazy"] for draw in draws} == {True, False}
    assert {draw.policy["update"] for draw in draws} == {"auto", "backward", "blocking"}
    assert {draw.policy.get("resident") for draw in draws} >= {"all", "8KiB", "40KiB", "100KiB"}
    assert {draw.policy.get("optimizer_device") for draw in draws} == {"device", None}
    assert drawn(7) == drawn(7)
