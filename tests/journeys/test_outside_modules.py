"""Weights that are used outside of their modules' forward: in custom autograd functions, which save them or do not, and
in what checkpoints compute again. As chunked losses and fused linear layers do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE
from tests.journeys.models import ZOO, batch_for, build
from tests.journeys.pairs import BLOCKS, HOSTILE, VOCAB, WIDTH, Block, Side, adamw, both, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNK = 4


def _targets(hidden: torch.Tensor) -> torch.Tensor:
    return torch.arange(hidden.shape[0], device=hidden.device) % VOCAB


class SavesWeight(torch.autograd.Function):
    """A loss by chunks: logits are made again in backward, from the weight that was saved."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        targets = _targets(hidden)
        chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.stack([F.cross_entropy(x @ weight.t(), t, reduction="sum") for x, t in chunks]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return _backward(hidden, weight, grads[0])


def _backward(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    for rows in torch.arange(hidden.shape[0], device=hidden.device).split(CHUNK):
        grad = F.softmax(hidden[rows] @ weight.t(), -1)
        grad -= F.one_hot(_targets(hidden)[rows], weight.shape[0])
        grad_hidden[rows] = grad @ weight * scale
        grad_weight += grad.t() @ hidden[rows] * scale
    return grad_hidden, grad_weight


class KeepsWeight(torch.autograd.Function):
    """Saves nothing: it keeps both as attributes."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.hidden, ctx.weight = hidden.detach(), weight
        return F.cross_entropy(hidden @ weight.t(), _targets(hidden), reduction="sum")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _backward(ctx.hidden, ctx.weight, grads[0])


class SavesGradients(torch.autograd.Function):
    """Computes its gradients in forward, as Liger's fused losses do. So they arrive before any weight is needed."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*_backward(hidden, weight, torch.ones((), device=hidden.device)))
        return F.cross_entropy(hidden @ weight.t(), _targets(hidden), reduction="sum")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return tuple(each * grads[0] for each in ctx.saved_tensors)


class Pair(torch.autograd.Function):
    """Uses two weights of different units in one backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, first, second)
        return hidden @ (first + second).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, first, second = ctx.saved_tensors
        grad = grads[0].t() @ hidden
        return grads[0] @ (first + second), grad, grad.clone()


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(hidden @ weight.t(), _targets(hidden), reduction="sum")


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def enclosed(loss: Loss, reentrant: bool) -> Loss:
    """The weight does not pass through the checkpoint's arguments."""
    return lambda hidden, weight: checkpoint(lambda x: loss(x, weight), hidden, use_reentrant=reentrant)


def passed(loss: Loss, reentrant: bool) -> Loss:
    return lambda hidden, weight: checkpoint(loss, hidden, weight, use_reentrant=reentrant)


def by_offload(loss: Loss) -> Loss:
    def call(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return loss(hidden, weight)

    return call


def paired(hidden: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(Pair.apply(hidden, weight, other), _targets(hidden), reduction="sum")


PLAIN: dict[str, Loss] = {
    "saves": SavesWeight.apply,
    "keeps": KeepsWeight.apply,
    "gradients": SavesGradients.apply,
    "operators": plain_loss,
}
LOSSES: dict[str, Loss] = PLAIN | {
    f"{name} in a {'reentrant' if reentrant else 'plain'} checkpoint, {how.__name__}": how(loss, reentrant)
    for name, loss in PLAIN.items()
    for reentrant in (False, True)
    for how in (enclosed, passed)
}
LOSSES |= {f"{name}, saved on the CPU": by_offload(PLAIN[name]) for name in ("saves", "operators")}
LOSSES["two units"] = paired  # type: ignore[assignment]
LOSSES["two units in a checkpoint"] = lambda *all: checkpoint(paired, *all, use_reentrant=False)


class Patched(nn.Module):
    """Its forward computes a loss from the head's weight, and the head is not called."""

    def __init__(self, loss: str, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.other = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.loss = loss

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).flatten(0, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        others = [self.other.weight] if self.loss.startswith("two units") else []
        return LOSSES[self.loss](self.hidden(tokens), self.head.weight, *others)


def train(side: Side, first: int = 0, last: int = 4, micro_batches: int = 1) -> None:
    for number in range(first, last):
        for part in range(micro_batches):
            loss = side.model(tokens(10 * number + part))
            loss.backward()
            side.keep(f"loss {len(side.kept)}", loss)
        side.optimizer.step()
        side.optimizer.zero_grad()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_uses_the_heads_weight_has_its_bits(loss: str, tied: bool):
    both(train, model=functools.partial(Patched, loss, tied))


SOME = ["saves", "keeps", "gradients", "saves in a plain checkpoint, enclosed", "two units in a checkpoint"]


@pytest.mark.parametrize("activations", ["offload", "auto", "recompute"])
@pytest.mark.parametrize("loss", SOME)
def test_it_has_them_wherever_blocks_save(loss: str, activations: str):
    options: dict[str, Any] = {"activation_memory": "1MiB"} if activations == "auto" else {}
    both(train, model=functools.partial(Patched, loss, False), activations=activations, **options)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("loss", SOME)
def test_it_has_them_if_gradients_accumulate(loss: str, tied: bool):
    both(functools.partial(train, micro_batches=3), model=functools.partial(Patched, loss, tied))


@pytest.mark.parametrize("policy", [{"draft_memory": "16MiB"}, {"update": "backward", "window": 3}], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("loss", SOME)
def test_it_has_them_if_updates_begin_in_backward(loss: str, tied: bool, policy: dict[str, Any]):
    both(train, model=functools.partial(Patched, loss, tied), kernel="fused", **policy)


def test_forwards_that_are_replaced_after_wrap_are_learnt_anew():
    """In the model and in a block, when all passes are known; and put back."""

    def journey(side: Side) -> None:
        train(side, 0, 2)
        model = side.model
        own, block = model.forward, model.blocks[1]
        model.forward = lambda tokens: SavesWeight.apply(model.hidden(tokens), model.other.weight)
        train(side, 2, 4)
        model.norm.forward = lambda x: F.layer_norm(x, [WIDTH], model.norm.weight * 2, model.norm.bias)
        block.forward = lambda x: x + block.contract(F.relu(F.linear(x, block.expand.weight)))
        train(side, 4, 6)
        del block.forward, model.norm.forward
        model.forward = own
        train(side, 6, 8)

    both(journey, model=functools.partial(Patched, "operators", False))


def zoo_with(loss: str, species: str, tied: bool) -> nn.Module:
    """A model whose loss is computed from the head's weight, as fused losses do: its head computes nothing."""
    model: Any = build(species)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model.head
    inputs = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else model.tokens
    head.weight = inputs.weight if tied else nn.Parameter(inputs.weight.detach() * 0.9)
    own, head.forward = model.forward, lambda hidden: hidden

    def forward(*args: Any, **batch: Any) -> torch.Tensor:
        found = own(*args, **batch)
        hidden = found[0] if isinstance(found, tuple) else found.logits
        return LOSSES[loss](hidden.flatten(0, 1), head.weight)

    model.forward = forward
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("loss", ["saves", "gradients"])  # by chunks, and as Liger's
@pytest.mark.parametrize("species", ZOO)
def test_models_of_many_kinds_train_with_such_losses(species: str, loss: str, tied: bool):
    sides = []
    for is_wrapped in (False, True):
        model = zoo_with(loss, species, tied).to("cpu" if is_wrapped else DEVICE)
        side = Side(model, torch.optim.AdamW(model.parameters(), lr=1e-3), is_wrapped)
        sides.append(side)
        if is_wrapped:
            with on_machine(hostility=HOSTILE):
                noria.wrap(model, side.optimizer, device=DEVICE, window=3, kernel="torch")
        for number in range(4):
            batch = batch_for(species, number)
            labels = batch.pop("labels")
            if species == "t5":
                batch["decoder_input_ids"] = labels
            value = model(batch["input_ids"]) if species.startswith("gpt") and species != "gpt2" else model(**batch)
            value.backward()
            side.keep(f"loss {number}", value)
            side.optimizer.step()
            side.optimizer.zero_grad()
    assert_same_bits(sides[1].kept, sides[0].kept)
    assert_same_bits(sides[1].model.state_dict(), sides[0].model.state_dict())
    report = noria.report(sides[1].model)
    assert report.num_fetches > 0 and report.ledger_agrees, str(report)


class OnlyInBackward(torch.autograd.Function):
    """Its forward does not look at the weight's values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.weight, (grads[0] * 2).flatten(0, -2).sum(0)


class BeforeBlocks(Patched):
    """A function's output goes into a block at once."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(OnlyInBackward.apply(x, self.norm.weight))
        return self.norm(x).flatten(0, 1)


def test_a_function_that_needs_a_weight_in_backward_alone_has_it_in_each_step():
    both(functools.partial(train, last=6), model=functools.partial(BeforeBlocks, "operators", False))


class Around(Patched):
    """Blocks are called under checkpoints, or where what is saved goes to the CPU."""

    around = "plain"

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.around == "on the CPU":
                with torch.autograd.graph.save_on_cpu():
                    x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.around == "reentrant")
        return self.norm(x).flatten(0, 1)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("around", ["plain", "reentrant", "on the CPU"])
def test_blocks_under_hooks_of_others_leave_nothing_on_the_thread(around: str, compiled: bool):
    """Compiled ones are compiled without noria's mode, also where a backward computes them again."""

    def side(is_wrapped: bool) -> Side:
        torch.manual_seed(0)
        model = Around("operators", False)
        model.around = around
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        made = Side(model, adamw(model.parameters()), is_wrapped)
        if is_wrapped:
            with on_machine(hostility=HOSTILE):
                noria.wrap(made.model, made.optimizer, device=DEVICE, window=2, kernel="torch")
        return made

    sides, modes = [], _get_current_function_mode_stack()
    for is_wrapped in (False, True):
        torch._dynamo.reset()
        sides.append(side(is_wrapped))
        train(sides[-1])
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert _get_current_function_mode_stack() == modes
    assert_same_bits(sides[1].kept, sides[0].kept)
    assert_same_bits(sides[1].model.state_dict(), sides[0].model.state_dict())


class AskedFor(Patched):
    """Uses the weight outside of its module only if it is asked to, by a keyword, as TRL's fused heads do."""

    def forward(self, tokens: torch.Tensor, fused: bool = False) -> torch.Tensor:
        hidden = self.hidden(tokens)
        return SavesWeight.apply(hidden, self.head.weight) if fused else self.head(hidden).square().mean()


def test_calls_with_other_keywords_are_learnt_by_themselves():
    def journey(side: Side) -> None:
        for number in range(3):
            with torch.no_grad():
                side.keep(f"scored {number}", side.model(tokens(number)))
        for number in range(3, 6):
            with torch.no_grad():
                side.keep(f"fused {number}", side.model(tokens(number), fused=True))
            train(side, number, number + 1)

    both(journey, model=functools.partial(AskedFor, "operators", False))


def test_a_saved_weight_that_was_written_since_raises_as_in_torch():
    def journey(side: Side) -> None:
        train(side, 0, 2)
        loss = side.model(tokens(5))
        with torch.no_grad(), noria.materialize(side.model) if side.is_wrapped else contextlib.nullcontext():
            side.model.head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        side.optimizer.zero_grad()
        train(side, 6, 8)

    both(journey, model=functools.partial(Patched, "saves", False))


def test_a_backward_after_unwrap_is_refused():
    """The graph outlives the watch, and its weights have left the device."""
    model = Patched("saves", False)
    noria.wrap(model, adamw(model.parameters()), device=DEVICE, window=2)
    loss = model(tokens(0))
    noria.unwrap(model)
    with pytest.raises(RuntimeError, match=r"expected a backward before noria\.unwrap"):
        loss.backward()
