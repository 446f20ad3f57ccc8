"""The loops that people write: recomputation, compilation, evaluation in between, branches, several models and several
optimizers. None of them knows about noria, all of them give torch's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    VOCAB,
    WIDTH,
    Block,
    Net,
    Side,
    adamw,
    assert_moved,
    both,
    loss_of,
    new_side,
    sgd,
    tokens,
    wrap_side,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def train(side: Side) -> None:
    side.train(0, 4)


# ---- activation checkpointing ------------------------------------------------------------------------------


class Recomputing(Net):
    """Recomputes in backward: around each block, around pairs of blocks, or around pairs and in them around each."""

    around = "block"
    reentrant = False

    def forward(self, batch):
        again = functools.partial(checkpoint, use_reentrant=self.reentrant)
        x = self.embed(batch)
        if self.around != "block":
            for pair in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                each = [functools.partial(again, block) for block in pair] if self.around == "nested" else pair
                x = again(lambda h, each=each: each[1](each[0](h)), x)
        else:
            for block in self.blocks:
                x = again(block, x)
        return self.head(x)


class InsideBlock(Block):
    reentrant = False

    def forward(self, x):
        return x + checkpoint(
            lambda h: self.contract(F.gelu(self.expand(h))), self.norm(x), use_reentrant=self.reentrant
        )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", ["block", "pairs", "nested"])
def test_checkpoints_around_blocks(around, reentrant):
    def make():
        model = Recomputing(6)
        model.around, model.reentrant = around, reentrant
        return model

    both(train, model=make)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_blocks(reentrant):
    def make():
        model = Net()
        model.blocks = nn.ModuleList(InsideBlock() for _ in range(5))
        for block in model.blocks:
            block.reentrant = reentrant
        return model

    both(train, model=make)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_checkpoint_around_the_whole_model(reentrant, micro_batches):
    def journey(side):
        for step in range(4):
            for micro in range(micro_batches):
                batch = tokens(10 * step + micro)
                anchor = torch.ones((), requires_grad=True)
                logits = checkpoint(lambda b, a: side.model(b) * a, batch, anchor, use_reentrant=reentrant)
                F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
            side.keep_gradients(f"step {step}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(reentrant):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip

    def make():
        model = transformers.LlamaForCausalLM(config)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    def journey(side):
        for step in range(4):
            batch = tokens(step)
            side.model(input_ids=batch, labels=batch).loss.backward()
            side.keep_gradients(f"step {step}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, model=make)


# ---- torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        "blocks before wrap",
        "blocks run before wrap",
        "in place after wrap",
        "in place before wrap",
        "whole model",
    ],
)
def test_compiled_models(how):
    torch._dynamo.reset()
    num_compiled = 0

    def backend(graph, inputs):
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    compiled = functools.partial(torch.compile, backend=backend)

    def make():
        model = Net(3)
        for index, block in enumerate(model.blocks):
            if how == "in place before wrap":
                block.compile(backend=backend)
            elif how.startswith("blocks"):
                model.blocks[index] = compiled(block)
        if how == "blocks run before wrap":
            loss_of(model, 9).backward()
            model.zero_grad()
        return model

    def journey(side):
        torch._dynamo.reset()
        if how == "in place after wrap":
            for block in side.model.blocks:
                block.compile(backend=backend)
        model = compiled(side.model) if how == "whole model" else side.model
        for number in range(4):
            loss = loss_of(model, number)
            loss.backward()
            side.keep(f"loss {number}", loss)
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, model=make)
    assert 0 < num_compiled <= 8, "moving weights must not cause compilation again"


COMPILES: dict[str, Callable[..., None]] = {
    "wrapped": lambda blocks, at, **how: blocks.__setitem__(at, torch.compile(blocks[at], **how)),
    "in place": lambda blocks, at, **how: blocks[at].compile(**how),
    "forward": lambda blocks, at, **how: setattr(blocks[at], "forward", torch.compile(blocks[at].forward, **how)),
}


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute", "auto"])
@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
@pytest.mark.parametrize("how", COMPILES)
def test_compiled_blocks_that_are_cut_into_a_forward_and_a_backward_have_their_bits(how, when, activations):
    """As real compilers cut them: each side's backward takes what its own forward has saved, in its order."""
    sides = [new_side(model=functools.partial(Net, 3)) for _ in range(2)]
    for side in sides:
        torch._dynamo.reset()

        def compile_blocks(model):
            for at in range(3):
                COMPILES[how](model.blocks, at, backend="aot_eager_decomp_partition")

        if when == "before wrap":
            compile_blocks(side.model)
        if side is sides[1]:
            more = {"activation_memory": "1MiB"} if activations == "auto" else {}
            wrap_side(side, kernel="torch", window=2, activations=activations, **more)
        if when == "after wrap":
            compile_blocks(side.model)
        train(side)
    assert_same_bits(sides[1].kept, sides[0].kept)
    assert_moved(sides[1].model)


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize(
    "how",
    [
        "wrapped by torch.compile",
        "wrapped by torch.compile after wrap",
        "in place",
        "in place after wrap",
        "in place twice",
        "forward",
        "forward after wrap",
    ],
)
def test_a_compiled_block_is_one_graph_with_noria_as_without(how, fullgraph, activations):
    """In each kind of pass, also when all passes are known. And it is the same graph: of another one, compilers make
    other kernels, whose results may have other bits."""
    graphs, found = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_blocks(model):
        for index, block in enumerate(model.blocks):
            if how.startswith("wrapped"):
                model.blocks[index] = torch.compile(block, backend=backend, fullgraph=fullgraph)
            elif how.startswith("forward"):
                block.forward = torch.compile(block.forward, backend=backend, fullgraph=fullgraph)
            else:
                block.compile(backend=backend, fullgraph=fullgraph)

    sides = [new_side(model=functools.partial(Net, 3)) for _ in range(2)]
    for side in sides:
        torch._dynamo.reset()
        graphs.clear()
        if not how.endswith("after wrap"):
            compile_blocks(side.model)
        if side is sides[1]:
            wrap_side(side, kernel="torch", window=2, activations=activations)
        if how.endswith(("after wrap", "twice")):
            compile_blocks(side.model)
        train(side)
        with torch.no_grad():
            side.keep("no gradients", loss_of(side.model, 40))
        assert len(graphs) == 2, "with gradients and without"
        found.append([[node.target for node in graph.graph.nodes if node.op != "placeholder"] for graph in graphs])
        for block in side.model.blocks:
            block._compiled_call_impl = None
        side.train(41, 43)
    assert_same_bits(sides[1].kept, sides[0].kept)
    assert found[0] == found[1]
    assert_moved(sides[1].model)


def put(blocks: nn.ModuleList, others: Sequence[nn.Module]) -> None:
    for number, other in enumerate(others):
        blocks[number] = other


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
def test_blocks_may_be_wrapped_by_torch_compile_and_bare_in_turns(activations):
    def journey(side):
        torch._dynamo.reset()
        bare = list(side.model.blocks)
        for number in range(0, 12, 4):
            side.train(number, number + 2)
            put(side.model.blocks, [torch.compile(block, backend="eager") for block in bare])
            side.train(number + 2, number + 4)
            put(side.model.blocks, bare)

    both(journey, model=functools.partial(Net, 3), activations=activations)


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
def test_blocks_that_torch_compile_wrapped_are_as_before_after_unwrap(activations):
    torch._dynamo.reset()
    model = Net(3)
    noria.wrap(model, device=DEVICE, window=2, activations=activations)
    bare = list(model.blocks)
    put(model.blocks, [torch.compile(block, backend="eager") for block in bare])
    forwards = [block.forward for block in model.blocks]
    loss_of(model, 0)
    noria.unwrap(model)
    assert [block.forward for block in model.blocks] == forwards
    for block in [*model.modules(), *bare]:
        assert not block._forward_pre_hooks and not block._forward_hooks
    assert not any("forward" in vars(block) for block in bare)


class Rooted(Net):
    """The root has a weight of its own, and may write one where it must not."""

    writes = False

    def __init__(self):
        super().__init__(3)
        self.shift = nn.Parameter(torch.randn(VOCAB))

    def forward(self, batch):
        logits = super().forward(batch) + self.shift
        if self.writes:
            with torch.no_grad():
                self.blocks[0].norm.weight.mul_(2)
        return logits


@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
def test_a_compiled_root_leaves_nothing_on_the_thread_also_if_a_hook_raises(when):
    modes = _get_current_function_mode_stack()
    sides = [new_side(model=Rooted) for _ in range(2)]
    for side in sides:
        torch._dynamo.reset()
        if when == "before wrap":
            side.model.compile(backend="eager")
        if side is sides[1]:
            wrap_side(side, kernel="torch", window=3)
        if when == "after wrap":
            side.model.compile(backend="eager")
        side.train(0, 3)
    assert_same_bits(sides[1].kept, sides[0].kept)
    with pytest.raises(RuntimeError):  # the weight is on the device no more, or the write is lost
        sides[1].model.writes = True
        loss_of(sides[1].model, 50)
    sides[1].model.writes = False
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert _get_current_function_mode_stack() == modes
    for side in sides:
        side.optimizer.zero_grad()
        side.train(3, 5)
    assert_same_bits(sides[1].kept, sides[0].kept)


def test_a_module_that_was_compiled_in_place_is_as_before_after_unwrap():
    model = Net(3)
    model.blocks[0].compile(backend="eager")
    compiled = model.blocks[0]._compiled_call_impl
    noria.wrap(model, device=DEVICE, window=2)
    loss_of(model, 0)
    assert model.blocks[0]._compiled_call_impl is not compiled
    noria.unwrap(model)
    assert model.blocks[0]._compiled_call_impl is compiled
    assert not model.blocks[0]._forward_pre_hooks and not model.blocks[0]._forward_hooks


@pytest.mark.long
@pytest.mark.cpu_only("inductor asks for triton where a device computes")
def test_blocks_compiled_by_inductor_have_the_bits_of_inductor():
    torch._dynamo.reset()

    def make():
        model = Net(3)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block)
        return model

    both(train, model=make)


# ---- graphs that go their own ways ---------------------------------------------------------------------------


class Changed(Net):
    """Blocks return views (a linear layer on three dimensions does), and what they return is changed in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, batch):
        x = self.embed(batch)
        for block in self.blocks:
            y = block(x)
            y += x
            x = F.relu_(y)
        return self.head(x)


@pytest.mark.parametrize("check", ["auto", "operators", "off"])
def test_outputs_that_are_changed_in_place(check):
    both(train, model=Changed, check=check)


class Force(Block):
    """Uses the gradient of an energy with respect to its input in its forward, as models of molecules do."""

    def forward(self, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.expand(self.norm(inner)).square().sum(), inner)
        return super().forward(x) + force


def test_a_gradient_that_is_taken_inside_of_a_forward():
    def make():
        model = Net()
        model.blocks[1], model.blocks[3] = Force(), Force()
        return model

    both(train, model=make)


def test_passes_that_never_repeat_themselves_fill_no_memory():
    class Dropping(Net):
        def forward(self, batch):
            x = self.embed(batch)
            for number, block in enumerate(self.blocks):
                if self.path >> number & 1:
                    x = block(x)
            return self.head(x)

    model = Dropping(10)
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    for model.path in range(150):
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = noria.report(model)
    assert len(report.passes) <= 2 * 64
    assert report.forgotten_passes == 2 * 150 - sum(each.times for each in report.passes) > 0


# ---- other passes in between -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_eval_passes_between_training_steps(mode):
    def journey(side):
        for step in range(4):
            side.train(step, step + 1)
            side.model.eval()
            with mode():
                for number in range(1 + step % 2):
                    side.keep(f"eval {step} {number}", loss_of(side.model, 50 + number))
            side.model.train()

    both(journey)


def test_an_eval_pass_between_forward_and_backward():
    def journey(side):
        for step in range(4):
            loss = loss_of(side.model, step)
            with torch.no_grad():
                side.keep(f"eval {step}", loss_of(side.model, 50))
            loss.backward()
            side.keep_gradients(f"step {step}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey)


def test_fetches_for_a_forward_that_does_not_come_are_counted_apart():
    model = Net()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=3, kernel="fused")
    in_passes = 0

    def count(phase, training):
        nonlocal in_passes
        in_passes += next(
            each.fetches for each in noria.report(model).passes if (each.phase, each.training) == (phase, training)
        )

    for step in range(4):
        loss = loss_of(model, step)
        count("forward", True)
        loss.backward()
        count("backward", True)
        optimizer.step()
        optimizer.zero_grad()
    assert noria.report(model).unclaimed_fetches == 0
    model.eval()
    with torch.no_grad():
        loss_of(model, 50)  # step() had fetched for a training pass
    count("forward", False)
    report = noria.report(model)
    assert report.unclaimed_fetches > 0
    assert report.num_fetches == in_passes + report.unclaimed_fetches


def test_layers_dropped_at_random():
    class Dropping(Net):
        def forward(self, batch):
            x = self.embed(batch)
            for block in self.blocks:
                if torch.rand(()) < 0.6:
                    x = block(x)
            return self.head(x)

    both(lambda side: side.train(0, 8), model=Dropping)


def test_blocks_called_by_themselves():
    def journey(side):
        for step in range(3):
            side.train(step, step + 1)
            x = torch.randn(2, 16, generator=torch.Generator(DEVICE).manual_seed(step))
            side.model.blocks[2](x).square().mean().backward()
            for block in side.model.blocks[::2]:
                x = block(x)
            side.keep(f"alone {step}", x)
            side.keep_gradients(f"alone {step}")
            side.optimizer.step()
            if side.is_wrapped:
                with noria.materialize(side.model, read_only=True):
                    pass
            side.optimizer.zero_grad()
            side.keep(f"again {step}", side.model.head(side.model.blocks[1](x)))
            if side.is_wrapped:
                with noria.materialize(side.model, read_only=True):
                    pass

    both(journey)


def test_a_block_called_several_times_in_one_forward():
    class Universal(Net):
        def forward(self, batch):
            x = self.embed(batch)
            for _ in range(3):
                for block in self.blocks[:2]:
                    x = block(x)
            for block in self.blocks:
                x = block(x) + block(x * 0.5)
            return self.head(x)

    both(train, model=Universal)


def test_a_model_that_calls_itself():
    class Tree(Net):
        def forward(self, batch):
            if batch.dim() == 2 and batch.shape[1] > 2:
                half = batch.shape[1] // 2
                return torch.cat([self(batch[:, :half]), self(batch[:, half:])], 1)
            return super().forward(batch)

    both(train, model=Tree)


class TiedByHand(Net):
    """No head: the logits come from the embedding's weight, used as a tensor."""

    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, batch):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


@pytest.mark.parametrize("check", ["auto", "operators"])
def test_a_root_that_uses_an_embedding_as_a_head(check):
    both(train, model=TiedByHand, check=check)


def test_a_root_with_parameters_of_its_own_beside_the_blocks():
    class WithDirect(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.shift = nn.Parameter(torch.zeros(1, 1, 16))

        def forward(self, batch):
            x = self.embed(batch) * self.scale
            for block in self.blocks:
                x = block(x) + self.shift
            return self.head(x)

    both(train, model=WithDirect)


def test_direct_parameters_used_between_blocks_in_a_large_window_and_a_small_one():
    class Prompted(Net):
        def __init__(self):
            super().__init__()
            self.prompts = nn.ParameterList([nn.Parameter(torch.randn(16)) for _ in range(5)])

        def forward(self, batch):
            x = self.embed(batch)
            for block, prompt in zip(self.blocks, self.prompts, strict=True):
                x = block(x + prompt)
            return self.head(x)

    for window in (2, 7):
        both(train, model=Prompted, window=window)


@pytest.mark.parametrize("how", ["positional", "by name", "a view"])
def test_parameters_that_are_handed_to_blocks(how):
    class Biased(Block):
        def forward(self, x, bias):
            return super().forward(x) * bias

    class Handing(Net):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(1, WIDTH))
            self.blocks = nn.ModuleList(Biased() for _ in range(4))

        def forward(self, batch):
            x = self.embed(batch)
            for index, block in enumerate(self.blocks):
                if index % 2 or how == "positional":
                    x = block(x, self.bias)
                elif how == "by name":
                    x = block(x, bias=self.bias)
                else:
                    x = block(x, self.bias[0])
            return self.head(x)

    both(train, model=Handing)


# ---- several models, several optimizers --------------------------------------------------------------------


def together(journey, make, *, window=2, **policy):
    """`make()` gives models and optimizers; the journey takes both lists."""
    policy.setdefault("kernel", "torch")
    results = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        models, optimizers = make()
        if is_wrapped:
            with on_machine(hostility=HOSTILE):
                assert noria.wrap(models, optimizers, device=DEVICE, window=window, **policy) == (
                    models,
                    optimizers,
                )
        kept = Side(models, optimizers, is_wrapped)
        torch.manual_seed(1)
        journey(kept)
        for number, model in enumerate(models):
            for name, value in model.state_dict().items():
                kept.keep(f"{number} {name}", value)
            if is_wrapped:
                assert_moved(model, window)
        results.append(kept.kept)
    assert_same_bits(*results)


def test_two_models_with_one_optimizer():
    def make():
        models = [Net(3), Net(2)]
        return models, [adamw([*models[0].parameters(), *models[1].parameters()])]

    def journey(side):
        (first, second), (optimizer,) = side.model, side.optimizer
        for step in range(4):
            (loss_of(first, step) + loss_of(second, step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(first, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    together(journey, make)


@pytest.mark.parametrize("kernel", ["torch", "fused"])
@pytest.mark.parametrize("split", ["by block", "inside every block"])
def test_one_model_with_two_optimizers(split, kernel):
    def make():
        model = Net()
        named = dict(model.named_parameters())
        chosen = [p for n, p in named.items() if ("blocks.1" in n if split == "by block" else "expand" in n)]
        others = [p for p in named.values() if all(p is not each for each in chosen)]
        second = adamw if kernel == "fused" else sgd
        return [model], [adamw(others, foreach=False), second(chosen, lr=0.05)]

    def journey(side):
        (model,), optimizers = side.model, side.optimizer
        for step in range(5):
            loss_of(model, step).backward()
            for optimizer in optimizers[: 1 + (step != 2)]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    if kernel == "torch":
        together(journey, make)
        return
    results = []
    for window, update in ((2, "auto"), (7, "blocking")):
        torch.manual_seed(0)
        models, optimizers = make()
        with on_machine(hostility=HOSTILE):
            noria.wrap(models, optimizers, device=DEVICE, window=window, update=update, kernel="fused")
        journey(Side(models, optimizers, True))
        results.append({k: v.clone() for k, v in models[0].state_dict().items()})
    assert_same_bits(*results)


def test_an_optimizer_that_looks_at_all_parameters_beside_one_that_does_not():
    class Normed(torch.optim.SGD):
        """Not separable: scales by the norm of everything it holds."""

        @torch.no_grad()
        def step(self, closure=None):
            held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            for p in held:
                p.sub_(p.grad / norm, alpha=0.1)

    def make():
        model = Net()
        chosen = list(model.blocks[1].parameters()) + [model.blocks[2].norm.weight]
        others = [p for p in model.parameters() if all(p is not each for each in chosen)]
        return [model], [adamw(others), Normed(chosen, lr=0.1)]

    def journey(side):
        (model,), optimizers = side.model, side.optimizer
        for step in range(4):
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    together(journey, make)


@pytest.mark.parametrize("freeze", [True, False])
def test_two_models_that_train_against_each_other(freeze):
    class Judge(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.out = nn.Linear(WIDTH, 1)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    class Maker(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))

        def forward(self, x):
            return self.blocks(x)

    def make():
        models = [Maker(), Judge()]
        return models, [adamw(models[0].parameters()), adamw(models[1].parameters())]

    def journey(side):
        (maker, judge), (of_maker, of_judge) = side.model, side.optimizer
        for step in range(4):
            noise = torch.randn(4, WIDTH)
            of_judge.zero_grad()
            judged = judge(torch.randn(4, WIDTH)).square().mean() - judge(maker(noise).detach()).square().mean()
            judged.backward()
            of_judge.step()
            if freeze:
                judge.requires_grad_(False)
            of_maker.zero_grad()
            made = judge(maker(noise)).square().mean()
            made.backward()
            of_maker.step()
            if freeze:
                judge.requires_grad_(True)
            side.keep(f"judged {step}", judged)
            side.keep(f"made {step}", made)

    together(journey, make)


def test_a_teacher_and_a_student():
    torch.manual_seed(0)
    teacher = Net(3)
    teacher.requires_grad_(False).eval()

    def journey(side):
        for step in range(4):
            with torch.no_grad():
                wanted = teacher(tokens(step))
            F.mse_loss(side.model(tokens(step)), wanted).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    def with_wrapped_teacher(side):
        journey(side)
        if not side.is_wrapped:
            with on_machine(hostility=HOSTILE):
                noria.wrap(teacher, device=DEVICE, window=2)

    both(with_wrapped_teacher)
    assert_moved(teacher)
    report = noria.report(teacher)
    assert not any(each.phase == "backward" for each in report.passes)


# ---- autocast ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_on_the_cpu(cache):
    def journey(side):
        for step in range(4):
            for micro in range(2):
                with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=cache):
                    loss = loss_of(side.model, 10 * step + micro)
                loss.backward()
            side.keep_gradients(f"step {step}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey)


def test_autocast_around_several_forwards_sees_the_weights_of_each_step():
    def journey(side):
        with torch.autocast(DEVICE, torch.bfloat16):
            for step in range(3):
                loss_of(side.model, step).backward()
                side.optimizer.step()
                side.optimizer.zero_grad()
                torch.clear_autocast_cache()

    both(journey)
