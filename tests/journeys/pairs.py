"""One journey, gone twice: by a model of plain PyTorch, and by its copy that streams through a window of two units on a
hostile machine. All that the journey keeps must have the same bits, and so must weights and optimizer state at its end.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import noria
import torch
from noria.testing import assert_same_bits, on_machine
from torch import nn
from torch.nn import functional as F

from tests.device import DEVICE

WIDTH, VOCAB, BLOCKS = 16, 23, 5
HOSTILE = {"seed": 7, "max_delay_us": 100, "poison": True}
LATE_UPDATES = {**HOSTILE, "hold_us": {"update": 20_000}}


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.contract(F.gelu(self.expand(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, head; gives logits."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 6), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    batch = tokens(number)
    return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())


def hand_over(parameter: nn.Parameter, giver: torch.optim.Optimizer, taker: torch.optim.Optimizer) -> None:
    """Moves a parameter of the first group of one optimizer to a group of its own in another."""
    group = giver.param_groups[0]
    group["params"] = [each for each in group["params"] if each is not parameter]
    giver.state.pop(parameter)
    taker.add_param_group({"params": [parameter]})


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, **options})


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def lion(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return noria.optim.Lion(parameters, **{"lr": 1e-3, "weight_decay": 0.1, **options})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": sgd,
    "lion": lion,
}
"""By name, one for each rule of kernel="fused"."""


def go_on_here(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """After `unwrap`, as a user does: what lies on the CPU goes to the device that journeys train on."""
    if DEVICE != "cpu":
        model.to(DEVICE)
        optimizer.load_state_dict(optimizer.state_dict())


@dataclasses.dataclass
class Side:
    """What a journey gets: the objects, and a place for what it wants compared."""

    model: Any
    optimizer: Any
    is_wrapped: bool
    kept: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def keep(self, name: str, value: torch.Tensor | float) -> None:
        assert name not in self.kept
        value = torch.as_tensor(value)
        self.kept[name] = value.detach().clone()

    def keep_gradients(self, name: str) -> None:
        for key, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.keep(f"{name}: gradient of {key}", parameter.grad)

    def train(self, first: int, last: int) -> None:
        """The plain loop, over the batches from `first` up to, not including, `last`."""
        for number in range(first, last):
            loss = loss_of(self.model, number)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.keep(f"loss {len(self.kept)}", loss)

    def step_by_closure(self, number: int) -> None:
        """Clearing, forward and backward of batch `number` all happen inside of `step()`."""

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, number)
            loss.backward()
            return loss

        self.keep(f"loss {number}", self.optimizer.step(closure))

    def gradients(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                yield parameter.grad


@contextlib.contextmanager
def halved_in_hooks(early: nn.Parameter, late: nn.Parameter) -> Iterator[None]:
    """A backward that accumulates halves what `early` holds twice: when its gradient comes, and when that of `late`
    does."""

    def halve(gradient: torch.Tensor) -> None:
        early.grad.mul_(0.5)

    handles = [each.register_hook(halve) for each in (early, late)]
    yield
    for handle in handles:
        handle.remove()


def new_side(
    seed: int = 0,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    model: Callable[[], nn.Module] = Net,
) -> Side:
    """Plain PyTorch; the same seed gives the same weights."""
    torch.manual_seed(seed)
    made = model()
    return Side(made, optimizer(made.parameters()), False)


def wrap_side(side: Side, hostility: dict[str, Any] = HOSTILE, **policy: Any) -> Side:
    """The same side, wrapped."""
    with on_machine(hostility=hostility):
        noria.wrap(side.model, side.optimizer, device=DEVICE, **policy)
    side.is_wrapped = True
    return side


def state_tensors(optimizer: Any) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{key}": value
        for number, values in state.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def assert_moved(model: nn.Module, window: int | None = 2) -> None:
    """Units were fetched, in known passes as often as planned, and the window held."""
    report = noria.report(model)
    assert report.num_fetches > 0
    assert report.ledger_agrees, str(report)
    if window is not None:
        assert report.peak_units <= window, str(report)
    for each in report.passes:
        if each.planned_fetches is not None:
            assert each.fetches == each.planned_fetches, str(report)


def both(
    journey: Callable[[Side], Any],
    *,
    model: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = adamw,
    window: int | None = 2,
    hostility: dict[str, Any] | None = None,
    compare_state: bool = True,
    moved: bool = True,
    **policy: Any,
) -> None:
    """Leads the twins through `journey`, with kernel="torch" where nothing else is said. kernel="fused" and dtype= have
    no plain twin: there the other side is wrapped too, blocking, with everything resident, on a quiet machine."""
    policy.setdefault("kernel", "torch")
    torch.manual_seed(0)
    plain = model()
    ours = copy.deepcopy(plain).cpu()
    twin = Side(plain, optimizer(plain.parameters()) if optimizer else None, False)
    side = Side(ours, optimizer(ours.parameters()) if optimizer else None, True)
    if policy.get("kernel") == "fused" or policy.get("dtype") is not None:
        at_home = {"update": "blocking", "optimizer_device": "host"}
        noria.wrap(twin.model, twin.optimizer, device=DEVICE, **{**policy, **at_home})
    with on_machine(hostility=HOSTILE if hostility is None else hostility):
        if window is not None:
            policy["window"] = window
        noria.wrap(side.model, side.optimizer, device=DEVICE, **policy)
    torch.manual_seed(1)
    journey(twin)
    torch.manual_seed(1)
    journey(side)
    if twin.kept or side.kept:
        assert_same_bits(side.kept, twin.kept)
    assert_same_bits(side.model.state_dict(), twin.model.state_dict())
    if compare_state and side.optimizer is not None and state_tensors(twin.optimizer):
        assert_same_bits(state_tensors(side.optimizer), state_tensors(twin.optimizer))
    if moved:
        assert_moved(side.model, window)
