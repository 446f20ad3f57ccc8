"""Which blocks compute again, alone: what is measured and when, what follows from it, and what is tried after that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from noria.forward.recompute import Recomputation, Recomputed
from noria.planning.measured_costs import MeasuredCosts
from torch import nn

SIZE, INPUT = 1000, 100  # bytes that a block saves, and of its input


class Block(nn.Module):
    """Writes its buffer, as BatchNorm does, if a test says so."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(25))
        self.register_buffer("seen", torch.zeros(()).add_(1))  # written before, as by a load
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.seen.add_(1)
        return (x * self.weight).sin().exp()


class Machine:
    """Has a root and blocks "a", "b", "c", whose forwards take as long as a test says. A copy takes 1 us a byte."""

    def __init__(
        self,
        *forward_us: int,
        device: str = "cpu",
        chooses: bool = True,
        plans: bool = False,
        writes: bool = False,
        own: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """`own`: a forward that the user has given each block. `plans`: the planner will choose later."""
        self.forward_us = forward_us
        self.blocks = [Block(writes=writes) for _ in forward_us]
        for block in self.blocks if own is not None else ():
            block.__dict__["forward"] = own
        self.saved = dict.fromkeys(
            ("saved", "offloaded", "reloaded", "offloaded_to_peers", "reloaded_from_peers", "num_looks"), 0
        )
        self.lanes = dict.fromkeys(("drain", "fetch", "peer"), 0)  # bytes, and so us
        self.stalled_us = self.num_steps = 0
        self.sent_home: list[set[int]] = []
        self.peer_cache: Any = SimpleNamespace(is_settled=True)
        hooks = [SimpleNamespace(module=nn.Identity(), is_block=False, name="", needs=[0])]
        hooks += [
            SimpleNamespace(module=each, is_block=True, name=name, needs=[unit])
            for unit, (each, name) in enumerate(zip(self.blocks, "abc", strict=False), 1)
        ]
        saved = SimpleNamespace(
            saved_stats=self.saved_stats, saved_by_module=self.by_hook, send_saved_home=self.sent_home.append
        )
        context: Any = SimpleNamespace(
            partition=SimpleNamespace(hooks=hooks),
            device=torch.device(device),
            backend=SimpleNamespace(stats=self.stats),
            engine=SimpleNamespace(saved=saved, statistics=SimpleNamespace(step_sums=self.step_sums)),
            unit_indices=lambda module: [1 + self.blocks.index(module)],
            policy=SimpleNamespace(activations="auto" if chooses else "recompute"),
            plan=SimpleNamespace(chooses_activations=plans),
        )
        self.costs: MeasuredCosts | None = None
        chosen = None if chooses else frozenset({1, 2, 3})
        self.recomputation = Recomputation(context, self.peer_cache, lambda: self.costs, chosen)

    def saved_stats(self) -> dict[str, int]:
        self.saved["num_looks"] += 1
        return dict(self.saved)

    def by_hook(self) -> dict[int, tuple[int, int, int, int]]:
        return {hook: (self.num_steps, SIZE, us, 0) for hook, us in enumerate(self.forward_us, 1)}

    def stats(self, lane: str) -> dict[str, Any]:
        if lane == "compute":
            of_units = 10**6 * self.num_steps
            return {"stalled_us": {("offload", "forward"): self.stalled_us, ("fetch", "forward"): of_units}}
        return {"busy_us": self.lanes[lane], "bytes": self.lanes[lane]}

    def step_sums(self) -> dict[str, int]:
        us = self.num_steps * sum(self.forward_us)
        return {"forward_us": us, "backward_us": 2 * us}

    def step(self, *, swapped: int | None = None, to_peers: int = 0, stalled_us: int = 0) -> list[str]:
        """Runs a step whose forwards leave `swapped` bytes at home or at peers. Returns who computes again after it."""
        swapped = SIZE * len(self.blocks) if swapped is None else swapped
        self.num_steps += 1
        x = torch.zeros(INPUT // 4)
        for block in self.blocks:
            self.recomputation.enter(block, (x,), {})
            block(x)
            self.recomputation.leave(block)
        for out, back, lane, moved in (
            ("offloaded", "reloaded", "", swapped),
            ("offloaded_to_peers", "reloaded_from_peers", "peer", to_peers),
        ):
            self.saved[out] += moved
            self.saved[back] += moved
            if lane:
                self.lanes[lane] += 2 * moved
        self.lanes["drain"] += swapped - to_peers
        self.lanes["fetch"] += swapped - to_peers
        self.stalled_us += stalled_us
        self.recomputation.begin_step()
        return self.recomputation.names()


# ---- the choice ----


def test_the_third_step_is_measured_and_cheap_blocks_compute_again():
    machine = Machine(10, 5000)
    assert [machine.step(), machine.step(), machine.step()] == [[], [], ["a"]]
    assert isinstance(machine.blocks[0].forward, Recomputed) and "forward" not in vars(machine.blocks[1])


def test_nothing_computes_again_if_nothing_is_swapped_and_no_more_is_looked_at():
    machine = Machine(10, 10)
    for _ in range(6):
        assert machine.step(swapped=0) == []
    assert machine.saved["num_looks"] == 2


def test_a_block_that_writes_a_buffer_is_never_computed_again():
    machine = Machine(10, 10, writes=True)
    for _ in range(5):
        assert machine.step(stalled_us=10**6) == []


def test_the_look_waits_for_copies_of_units_and_for_backwards_that_are_to_come():
    machine = Machine(10, 5000)
    machine.peer_cache.is_settled = False
    assert [machine.step() for _ in range(4)] == [[]] * 4
    machine.peer_cache.is_settled = True
    assert machine.step() == []
    machine.saved["saved"] = 1
    assert machine.step() == [] and machine.step() == []
    machine.saved["saved"] = 0
    assert machine.step() == ["a"]


def test_on_a_device_the_choice_waits_for_what_its_own_clock_has_measured(monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr("noria._C.choose_ways", lambda *given: told.append(given) or ["recompute", "host"])
    machine = Machine(5000, 10, device="cuda")  # as the host's clock has it, which is when blocks are launched
    for _ in range(5):
        assert machine.step() == [] and not machine.saved["num_looks"]
    machine.costs = MeasuredCosts([1.0, 10.0, 2500.0], [2.0, 20.0, 900.0], {}, {})
    assert [machine.step(), machine.step()] == [[], ["a"]]
    [(blocks, _, host, _)] = told
    assert blocks == [(SIZE, INPUT, 1, 10, 3400), (SIZE, INPUT, 1, 2500, 0)]
    assert host[2:] == (2511, 922)


@pytest.mark.parametrize(("to_peers", "sent"), [(0, []), (1000, [set()]), (500, [{2}])])
def test_what_goes_home_is_said_only_if_something_goes_to_peers(to_peers, sent, monkeypatch):
    ways = ["peers", "host" if to_peers == 500 else "peers"]
    monkeypatch.setattr("noria._C.choose_ways", lambda *_: ways)
    machine = Machine(10, 10)
    for _ in range(3):
        machine.step(to_peers=to_peers)
    assert machine.sent_home == sent


@pytest.mark.parametrize(
    ("gradients", "weights", "free"),
    [(100, 200, (1000, 2000)), (2500, 1200, (3000 - 2500, 3000 - 1200))],
    ids=["as_long_as_forwards_and_backwards", "what_gradients_and_weights_leave_of_both"],
)
def test_the_choice_is_told_sizes_prices_and_the_time_for_copies_to_hide_behind(gradients, weights, free, monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr("noria._C.choose_ways", lambda *given: told.append(given) or ["host", "host"])
    machine = Machine(300, 700)
    for _ in range(3):
        machine.lanes["drain"] += gradients
        machine.lanes["fetch"] += weights
        machine.lanes["peer"] += 400  # copies of units
        machine.step(to_peers=500)
    [(blocks, swapped, host, peers)] = told
    assert blocks == [(SIZE, INPUT, 1, 300, 0), (SIZE, INPUT, 1, 700, 0)]
    assert swapped == 2000
    assert host == (1.0, 1.0, *free)
    assert peers == (500, 1.0, 3000 - 400)


# ---- trials ----


def test_one_block_more_is_tried_where_the_wait_is_longer_and_stays_while_it_pays():
    machine = Machine(10, 5000, 6000)
    for _ in range(3):
        machine.step()
    assert machine.recomputation.names() == ["a"]
    assert machine.step(stalled_us=20_000) == ["a", "b"]
    assert machine.step(stalled_us=14_000) == ["a", "b", "c"], "6 ms less for 5 ms"
    assert machine.step(stalled_us=9_000) == ["a", "b"], "5 ms less for 6 ms"
    assert machine.step(stalled_us=10**6) == ["a", "b"], "the trials have ended"


@pytest.mark.parametrize(("b_us", "first"), [(5400, "b"), (6000, "c")])
def test_the_cheapest_is_tried_first_and_of_those_that_cost_about_the_same_the_first(b_us, first):
    machine = Machine(10, b_us, 5000)
    for _ in range(3):
        machine.step()
    assert machine.step(stalled_us=20_000) == ["a", first]


def test_nothing_is_tried_that_takes_longer_than_the_wait():
    machine = Machine(10, 5000)
    for _ in range(3):
        machine.step()
    assert machine.step(stalled_us=5000) == ["a"]
    assert machine.step(stalled_us=10**6) == ["a"], "the trials have ended"


# ---- forwards ----


def test_all_blocks_compute_again_without_a_choice_until_they_are_given_back():
    machine = Machine(10, 10, chooses=False)
    assert machine.recomputation.names() == ["a", "b"]
    assert machine.step() == ["a", "b"] and not machine.saved["num_looks"]
    machine.recomputation.remove()
    assert not machine.recomputation.names() and not any("forward" in vars(block) for block in machine.blocks)


def test_a_forward_of_the_users_own_comes_back():
    machine = Machine(10, chooses=False, own=torch.sin)
    [block] = machine.blocks
    assert isinstance(block.forward, Recomputed)
    machine.recomputation.remove()
    assert block.forward is torch.sin


def gradients(block: nn.Module) -> tuple[list[torch.Tensor], list[int]]:
    """Returns the gradients of a forward and backward, and how many elements each saved tensor has."""
    saved: list[int] = []
    x = torch.linspace(-1, 1, 25, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = block(x).square().sum()
    loss.backward()
    assert x.grad is not None and block.weight.grad is not None
    return [x.grad, block.weight.grad], saved


def test_a_block_that_computes_again_saves_nothing_inside_and_has_the_same_bits():
    plain, again = Block(), Block()
    again.__dict__["forward"] = Recomputed(again, by_choice=False)
    (expected, saved), (found, saved_again) = gradients(plain), gradients(again)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert len(saved_again) < len(saved)


def test_a_copy_of_a_block_computes_once_by_its_own_forward():
    block = Block()
    block.__dict__["forward"] = Recomputed(block, by_choice=False)
    copied = copy.deepcopy(block)
    assert copied.forward.__func__ is Block.forward and copied.forward.__self__ is copied


def test_a_copy_of_a_block_keeps_a_forward_of_the_users_own():
    block = Block()
    block.__dict__["forward"] = torch.sin
    block.__dict__["forward"] = Recomputed(block, by_choice=False)
    assert copy.deepcopy(block).forward is torch.sin


# ---- by the planner's choice ----


def test_where_the_planner_will_choose_nothing_is_tried():
    machine = Machine(10, 5000, 20, plans=True)
    assert [len(machine.step(stalled_us=10**6)) for _ in range(6)] == [0, 0, 2, 2, 2, 2]


def test_a_chosen_block_is_not_computed_again_in_a_mode_in_which_it_writes_buffers():
    """The first forward in each mode shows it. In eval mode BatchNorm only reads."""
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    block.__dict__["forward"] = Recomputed(block, by_choice=True)
    calls = []
    block[0].register_forward_hook(lambda *_: calls.append(1))

    def num_forwards() -> int:
        """Of one step."""
        calls.clear()
        block(torch.randn(3, 4)).sum().backward()
        return len(calls)

    block.eval()
    assert [num_forwards() for _ in range(3)] == [1, 2, 2]
    block.train()
    assert [num_forwards() for _ in range(3)] == [1, 1, 1]
    assert block[1].num_batches_tracked == 3
    block[1].eval()
    assert [num_forwards() for _ in range(2)] == [2, 2]  # known


class Counting(nn.Module):
    """Writes buffers in ways that raise no version."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.replaces, self.num_calls = replaces, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = self.linear(x)
        if self.replaces:
            self.mean = self.mean + 1
            return x
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_write_that_raises_no_version_is_seen(replaces):
    block = Counting(replaces=replaces)
    block.__dict__["forward"] = Recomputed(block, by_choice=True)
    for _ in range(3):
        block(torch.randn(3, 4)).sum().backward()
    assert block.num_calls == 3 and block.forward.writes()


def test_a_block_that_writes_is_not_among_those_that_compute_again():
    machine = Machine(10, 10, writes=True)
    machine.recomputation.take(frozenset({1, 2}))
    assert machine.recomputation.units() == {1, 2}  # nothing has run yet
    machine.step()
    assert machine.recomputation.names() == [] and machine.recomputation.writers() == {1, 2}


def test_a_forward_that_the_user_has_put_around_a_chosen_one_stays():
    machine = Machine(10, 10)
    machine.recomputation.take(frozenset({1, 2}))
    block = machine.blocks[0]
    inside, calls = block.forward, []

    def around(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return inside(x)

    block.forward = around
    machine.recomputation.take(frozenset({2}))
    assert machine.recomputation.units() == {2} and block.forward is around and inside.is_off
    block(torch.zeros(25)).sum().backward()
    assert calls == [1]
