"""The tools that torch brings, and what stands close to it: its compiler, profilers, checkpoints, hooks, averages of
weights, parametrizations; generation by transformers; optimizers of other packages; models without weights (meta).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import bitsandbytes
import noria
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torchao.optim
import transformers
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.nn.utils import parametrizations, prune
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tests.ecosystem import tiny
from tests.ecosystem.harness import Run, Script, assert_equal, cases

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model of five blocks without libraries in it. It is called as those of transformers, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, tiny.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_of(model: Any, number: int, **sizes: int) -> torch.Tensor:
    output = model(**tiny.batch(number, **sizes))
    return getattr(output, "loss", output)


def train(run: Run, model: Any, optimizer: Any, steps: int = 4, name: str = "loss") -> None:
    for number in range(steps):
        loss = loss_of(model, number)
        loss.backward()
        run.keep(f"{name} {number}", loss)
        optimizer.step()
        optimizer.zero_grad()


def start(run: Run, make: Callable[[], nn.Module] = Net, **policy: Any) -> tuple[Any, Any]:
    model = make()
    return run.wrap(model, tiny.adamw(model), **policy)


# ---- torch.compile -----------------------------------------------------------------------------------------


class Counting:
    """torch.compile's backend "eager", which counts its graphs."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def replace_blocks(blocks: nn.ModuleList, **options: Any) -> None:
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, **options)


def compile_blocks(blocks: nn.ModuleList, **options: Any) -> None:
    for block in blocks:
        block.compile(**options)


def compile_forwards(blocks: nn.ModuleList, **options: Any) -> None:
    for block in blocks:
        block.forward = torch.compile(block.forward, **options)


def compiled_blocks(
    run: Run,
    compile_: Callable[..., None] = replace_blocks,
    when: str = "before",
    make: Callable[[], Any] = Net,
    counted: bool = False,
    called: bool = False,
    check: str = "auto",
    **options: Any,
) -> None:
    backend = Counting()
    options = {"backend": backend, **options}
    model = make()
    blocks = model.blocks if isinstance(model, Net) else model.model.layers
    if when == "before":
        compile_(blocks, **options)
    optimizer = tiny.adamw(model)
    if called:
        loss_of(model, 9).backward()
        optimizer.zero_grad()
    run.wrap(model, optimizer, check=check)
    if when == "after":
        compile_(blocks, **options)
    train(run, model, optimizer)
    model.eval()
    with torch.no_grad():
        run.keep("evaluated", loss_of(model, 8))
    run.keep_model(model)
    if counted:
        run.keep("graphs", backend.graphs)
    elif options["backend"] is backend:
        assert backend.graphs > 0


def compiled_model(
    run: Run,
    how: str = "wrapper",
    when: str = "before",
    make: Callable[[], Any] = Net,
    called: bool = False,
    **options: Any,
) -> None:
    backend = Counting()
    options["backend"] = backend
    model = make()
    optimizer = tiny.adamw(model)

    def compiled() -> Any:
        if how == "wrapper":
            return torch.compile(model, **options)
        model.compile(**options)
        return model

    if when == "before":
        used = compiled()
        if called:
            loss_of(used, 9).backward()
            optimizer.zero_grad()
        run.wrap(model, optimizer)
    elif when == "wrapper is wrapped":
        used = compiled()
        run.wrap(used, optimizer)
    else:
        run.wrap(model, optimizer)
        used = compiled()
    train(run, used, optimizer)
    run.keep_model(model)
    assert backend.graphs > 0


def compiled_then_unwrapped(run: Run) -> None:
    torch._dynamo.reset()
    model, optimizer = start(run)
    compile_blocks(model.blocks, backend="eager")
    train(run, model, optimizer)
    run.unwrap(model, optimizer)
    train(run, model, optimizer, name="unwrapped")
    run.wrap(model, optimizer)
    train(run, model, optimizer, name="wrapped again")
    run.keep_model(model)


def compiled_with_lengths(run: Run) -> None:
    torch._dynamo.reset()
    model, optimizer = start(run)
    compile_blocks(model.blocks, backend="eager", dynamic=True)
    for number, length in enumerate((12, 7, 16, 9)):
        loss = loss_of(model, number, length=length)
        loss.backward()
        run.keep(f"loss {number}", loss)
        optimizer.step()
        optimizer.zero_grad()
    run.keep_model(model)


def compiled_loss(run: Run, step_too: bool = False) -> None:
    torch._dynamo.reset()
    model, optimizer = start(run, tiny.llama)
    loss_function = torch.compile(nn.functional.cross_entropy, backend="eager", fullgraph=True)
    step = torch.compile(optimizer.step, backend="eager") if step_too else optimizer.step
    for number in range(4):
        given = tiny.batch(number)
        logits = model(given["input_ids"]).logits
        loss = loss_function(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())
        loss.backward()
        run.keep(f"loss {number}", loss)
        step()
        optimizer.zero_grad()
    run.keep_model(model)


# ---- autograd, amp, hooks ----------------------------------------------------------------------------------


def functional_call(run: Run, others: bool = False) -> None:
    """`others`: the head is called with other weights, which are made of its own."""
    model, optimizer = start(run)
    scale = torch.tensor(0.5, requires_grad=True)
    for number in range(4):
        given = dict(model.named_parameters())
        if others:
            given["head.bias"] = scale * torch.ones(tiny.VOCAB)
        loss = torch.func.functional_call(model, given, kwargs=tiny.batch(number))
        loss.backward()
        run.keep(f"loss {number}", loss)
        optimizer.step()
        optimizer.zero_grad()
    if others:
        run.keep("gradient", scale.grad)
    run.keep_model(model)


def frozen_blocks(run: Run) -> nn.Module:
    return run.wrap(nn.Sequential(*[Block() for _ in range(5)]).requires_grad_(False))


def jacobian_of_inputs(run: Run) -> None:
    model = frozen_blocks(run)
    for number in range(3):
        x = torch.randn(2, WIDTH)
        run.keep(f"jacobian {number}", torch.func.jacfwd(lambda each: model(each).sum(0))(x))
        run.keep(f"product {number}", torch.func.jvp(model, (x,), (x.flip(0),)))


def gradient_of_a_factor(run: Run) -> None:
    """The gradient of what was multiplied with a model's output."""
    model = run.wrap(Net())
    for number in range(3):
        factor = torch.tensor(2.0 + number)
        gradient = torch.func.grad(lambda each, number=number: (each * loss_of(model, number)).square())(factor)
        run.keep(f"gradient {number}", gradient)


def trained_with_jvp(run: Run) -> None:
    """MeanFlow's and consistency models' losses: the derivative along a direction is part of the target."""
    model = nn.Sequential(*[Block() for _ in range(5)])
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    for number in range(3):
        x, direction = torch.randn(2, 4, WIDTH)
        value, slope = torch.func.jvp(model, (x,), (direction,))
        loss = (value - (direction - slope).detach()).square().mean()
        loss.backward()
        run.keep(f"loss {number}", loss)
        optimizer.step()
        optimizer.zero_grad()
    run.keep_model(model)


def scaled(run: Run, dtype: torch.dtype = torch.float16) -> None:
    model, optimizer = start(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=8)
    for number in range(6):
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, number)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        run.keep(f"norm {number}", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        run.keep(f"loss {number}", loss)
        run.keep(f"scale {number}", scaler.get_scale())
    run.keep_model(model)


def clipped_by_parts(run: Run) -> None:
    model, optimizer = start(run)
    for number in range(4):
        loss_of(model, number).backward()
        gradients = [each.grad for each in model.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        run.keep(f"norm {number}", norm)
        optimizer.step()
        optimizer.zero_grad()
    run.keep_model(model)


def module_hooks_and_anomaly_mode(run: Run) -> None:
    model, optimizer = start(run, tiny.llama)
    numbers = itertools.count()

    def seen(module: nn.Module, args: Any, output: Any) -> None:
        run.keep(f"output {next(numbers)}", output)

    def seen_gradients(module: nn.Module, inputs: Any, outputs: Any) -> None:
        run.keep(f"gradient {next(numbers)}", [each for each in (*inputs, *outputs) if each is not None])

    def doubled(module: nn.Module, args: Any) -> Any:
        return (args[0] * 2, *args[1:])

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(seen)
        layer.mlp.register_full_backward_hook(seen_gradients)
        layer.register_full_backward_pre_hook(lambda module, outputs: None)
    model.lm_head.register_forward_pre_hook(doubled)
    with torch.autograd.set_detect_anomaly(True):
        train(run, model, optimizer)
    run.keep_model(model)


def gradient_hooks(run: Run) -> None:
    model, optimizer = start(run)
    numbers = itertools.count()
    weight = model.blocks[1].up.weight
    weight.register_hook(lambda gradient: gradient * 0.5)
    weight.register_post_accumulate_grad_hook(lambda each: run.keep(f"gradient {next(numbers)}", each.grad))
    optimizer.register_step_pre_hook(lambda *_: run.keep(f"before step {next(numbers)}", 1))
    optimizer.register_step_post_hook(lambda *_: run.keep(f"after step {next(numbers)}", 1))
    train(run, model, optimizer)
    run.keep_model(model)


def saved_on_cpu(run: Run) -> None:
    model, optimizer = start(run)
    with torch.autograd.graph.save_on_cpu():
        train(run, model, optimizer)
    run.keep_model(model)


def selective_checkpoints(run: Run) -> None:
    model, optimizer = start(run)

    def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        matrices = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if matrices else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    train(run, model, optimizer)
    run.keep_model(model)


# ---- modules -----------------------------------------------------------------------------------------------


def with_each_block(run: Run, change: Callable[[nn.Module], object]) -> None:
    model = Net()
    for block in model.blocks:
        change(block)
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    train(run, model, optimizer)
    model.eval()
    with torch.inference_mode():
        run.keep("evaluated", loss_of(model, 9))
    run.keep_model(model)


def moved(run: Run) -> None:
    model, optimizer = start(run)
    for number in range(3):
        model.to("cpu").float().train()
        model.to(device=torch.device("cpu"), dtype=torch.float32, non_blocking=True)
        loss = loss_of(model, number)
        loss.backward()
        run.keep(f"loss {number}", loss)
        optimizer.step()
        model.zero_grad()
        model.cpu().eval().requires_grad_(True)
        run.keep(f"evaluated {number}", loss_of(model, 9).detach())
    run.keep_model(model)


class Encoder(nn.Module):
    """In evaluation torch takes its fast path, which hands all weights of a layer to one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(WIDTH, tiny.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros_like(input_ids, dtype=torch.bool)
        padding[:, -2:] = True
        x = self.head(self.encoder(self.embed(input_ids), src_key_padding_mask=padding))
        return nn.functional.cross_entropy(x[:, :8].flatten(0, 1), labels[:, 1:9].flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, tiny.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)[0]
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained_and_evaluated(run: Run, make: Callable[[], nn.Module], fast: bool = True) -> None:
    model, optimizer = start(run, make)
    had = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        for number in range(3):
            train(run, model.train(), optimizer, 2, f"loss {number}")
            with torch.no_grad():
                run.keep(f"evaluated {number}", loss_of(model.eval(), 9))
    finally:
        torch.backends.mha.set_fastpath_enabled(had)
    run.keep_model(model)


# ---- checkpoints -------------------------------------------------------------------------------------------


def resumed_by_dcp(run: Run, options: dcp_state.StateDictOptions | None = None) -> None:
    model, optimizer = start(run)
    train(run, model, optimizer)
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer, options=options)
    run.keep("state", optimizer_state)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=run.folder / "dcp", no_dist=True)
    train(run, model, optimizer, name="dropped")

    model, optimizer = start(run)
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer, options=options)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=run.folder / "dcp", no_dist=True)
    dcp_state.set_state_dict(
        model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
    )
    train(run, model, optimizer, name="resumed")
    run.keep_model(model)


def resumed_by_torch_save(run: Run, **load: Any) -> None:
    model, optimizer = start(run)
    train(run, model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run.folder / "state.pt")
    model, optimizer = start(run)
    state = torch.load(run.folder / "state.pt", weights_only=True, **load)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(run, model, optimizer, name="resumed")
    run.keep_model(model)
    run.keep("state", optimizer.state_dict()["state"])


def safetensors_file(run: Run) -> None:
    model, optimizer = start(run)
    train(run, model, optimizer)
    safetensors.torch.save_file(model.state_dict(), run.folder / "model.safetensors")
    train(run, model, optimizer, name="more")
    model.load_state_dict(safetensors.torch.load_file(run.folder / "model.safetensors"))
    train(run, model, optimizer, name="again")
    run.keep("file", safetensors.torch.load_file(run.folder / "model.safetensors"))
    run.keep_model(model)


def safetensors_model(run: Run, tied: bool = False) -> None:
    model, optimizer = start(run, functools.partial(tiny.llama, tied))
    train(run, model, optimizer)
    safetensors.torch.save_model(model, str(run.folder / "model.safetensors"))
    train(run, model, optimizer, name="more")
    missing, unexpected = safetensors.torch.load_model(model, str(run.folder / "model.safetensors"))
    assert not missing and not unexpected
    train(run, model, optimizer, name="again")
    run.keep("file", safetensors.torch.load_file(run.folder / "model.safetensors"))
    run.keep_model(model)


# ---- measuring ---------------------------------------------------------------------------------------------


def flops(run: Run) -> None:
    model, optimizer = start(run, tiny.llama)
    for number in range(3):
        with FlopCounterMode(model, display=False) as counter:
            loss = loss_of(model, number)
            loss.backward()
        run.keep(f"flops {number}", counter.get_total_flops())
        by_module = {module: sum(each.values()) for module, each in counter.get_flop_counts().items()}
        run.keep(f"flops by module {number}", by_module)
        run.keep(f"loss {number}", loss)
        optimizer.step()
        optimizer.zero_grad()
    run.keep_model(model)


def profiled(run: Run, **options: Any) -> None:
    model, optimizer = start(run)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule, **options) as profiler:
        for number in range(4):
            train(run, model, optimizer, 1, f"loss {number}")
            profiler.step()
    table = {each.key: each.count for each in profiler.key_averages() if each.key in ("aten::addmm", "aten::gelu")}
    assert set(table) == {"aten::addmm", "aten::gelu"}
    run.keep("operators", table)
    profiler.export_chrome_trace(str(run.folder / "trace.json"))
    run.keep_model(model)


# ---- averages of weights -----------------------------------------------------------------------------------


def reading(run: Run, model: Any) -> Any:
    """As a user reads and edits weights between passes."""
    return noria.materialize(model) if run.is_wrapped else torch.no_grad()


def averaged(run: Run, inside: bool = True, ema: bool = False) -> None:
    model, optimizer = start(run)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9) if ema else None

    def guarded() -> Any:
        return reading(run, model) if inside else torch.no_grad()

    with guarded():
        averages = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
    for number in range(4):
        train(run, model, optimizer, 1, f"loss {number}")
        with guarded():
            averages.update_parameters(model)
    run.keep_model(averages, "averages")
    run.keep("loss of averages", loss_of(averages, 9).detach())
    run.keep_model(model)


def averaged_by_state_dict(run: Run) -> None:
    """The average is an ordinary model, made before the wrap; state_dict() gives it the weights."""
    model, averages = Net(), Net().requires_grad_(False)
    averages.load_state_dict(model.state_dict())
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    for number in range(4):
        train(run, model, optimizer, 1, f"loss {number}")
        weights = model.state_dict()
        with torch.no_grad():
            for name, each in averages.state_dict().items():
                each.lerp_(weights[name], 0.1)
    run.keep_model(averages, "averages")
    run.keep_model(model)


def average_is_streamed(run: Run) -> None:
    """The averaged copy is wrapped, too. Both are materialized while one takes from the other."""
    model = Net()
    averages = torch.optim.swa_utils.AveragedModel(model)
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    run.wrap(averages.requires_grad_(False))
    for number in range(4):
        train(run, model, optimizer, 1, f"loss {number}")
        with reading(run, model), reading(run, averages):
            averages.update_parameters(model)
        with torch.no_grad():
            run.keep(f"loss of averages {number}", loss_of(averages, 9))
    run.keep_model(averages, "averages")
    run.keep_model(model)


# ---- generation by transformers ----------------------------------------------------------------------------


def prompt() -> dict[str, torch.Tensor]:
    given = tiny.batch(5, length=6)
    return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}


def generated(run: Run, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    model = run.wrap(tiny.llama(dtype=dtype).eval())
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    run.keep("tokens", model.generate(**prompt(), **options))
    output = model.generate(**prompt(), **options, return_dict_in_generate=True, output_scores=True)
    run.keep("tokens again", output.sequences)
    run.keep("scores", list(output.scores))


def generated_between_steps(run: Run) -> None:
    model, optimizer = start(run, tiny.llama)
    for number in range(3):
        train(run, model.train(), optimizer, 2, f"loss {number}")
        with torch.inference_mode():
            run.keep(f"tokens {number}", model.eval().generate(**prompt(), max_new_tokens=6, do_sample=True))
    run.keep_model(model)


def generated_by_an_assistant(run: Run) -> None:
    model, assistant = tiny.llama().eval(), tiny.llama(num_hidden_layers=3).eval()
    run.wrap(model)
    run.wrap(assistant)
    given = {name: each[:1] for name, each in prompt().items()}
    run.keep("tokens", model.generate(**given, assistant_model=assistant, max_new_tokens=8, do_sample=False))


def generated_by_pipeline(run: Run) -> None:
    model = run.wrap(tiny.llama().eval())
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tiny.tokenizer())
    made = pipe(["w1 w2 w3", "w4 w5"], max_new_tokens=6, do_sample=False, batch_size=2)
    words = [each[0]["generated_text"] for each in made]
    run.keep("words", [list(each.encode()) for each in words])


# ---- optimizers --------------------------------------------------------------------------------------------


def optimized(run: Run, make: Callable[..., torch.optim.Optimizer], **more: Any) -> None:
    """Weights of 8192 elements and more: for smaller ones these optimizers keep no 8-bit states."""
    model = tiny.llama(hidden_size=64, intermediate_size=128)
    optimizer = make(model.parameters(), **more)
    run.wrap(model, optimizer)
    train(run, model, optimizer)
    run.keep_model(model)


def muon(run: Run) -> None:
    model = tiny.llama()
    optimizer = torch.optim.Muon([each for each in model.parameters() if each.ndim == 2], lr=1e-2)
    for name, each in model.named_parameters():
        each.requires_grad_(each.ndim == 2 or "norm" not in name)
    run.wrap(model, optimizer)
    train(run, model, optimizer)
    run.keep_model(model)


def lbfgs(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    run.wrap(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for number in range(3):
        run.keep(f"loss {number}", optimizer.step(closure))
    run.keep_model(model)


# ---- models without weights --------------------------------------------------------------------------------


def empty_llama(tied: bool = False) -> nn.Module:
    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM(tiny.llama(tied).config)
    model.tie_weights()  # accelerate has untied them
    return model


def shards(run: Run, tied: bool = False) -> list[Path]:
    tiny.llama(tied).save_pretrained(run.folder / "saved", max_shard_size="40KB")
    found = sorted((run.folder / "saved").glob("*.safetensors"))
    assert len(found) > 2
    return found


def loaded_by_safetensors(run: Run, model: nn.Module, tied: bool) -> None:
    safetensors.torch.save_model(tiny.llama(tied), str(run.folder / "model.safetensors"))
    safetensors.torch.load_model(model, str(run.folder / "model.safetensors"))


def loaded_by_accelerate(run: Run, model: nn.Module, tied: bool) -> None:
    shards(run, tied)
    accelerate.load_checkpoint_in_model(model, str(run.folder / "saved"))


def loaded_and_dispatched(run: Run, model: nn.Module, tied: bool) -> None:
    shards(run, tied)
    assert accelerate.load_checkpoint_and_dispatch(model, str(run.folder / "saved")) is model


def loaded_when_wrapped(run: Run, load: Callable[[Run, nn.Module, bool], None], tied: bool = False) -> None:
    model = empty_llama(tied) if run.is_wrapped else tiny.llama(tied)
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    if run.is_wrapped:
        load(run, model, tied)
    train(run, model, optimizer)
    run.keep_model(model)


def from_shards(run: Run, trains: bool = True) -> None:
    files = shards(run)
    model = empty_llama()
    if run.is_wrapped:
        optimizer = tiny.adamw(model) if trains else None
        run.wrap(model, optimizer)
        for file in files:
            model.load_state_dict(safetensors.torch.load_file(file), strict=False)
    else:
        for file in files:
            model.load_state_dict(safetensors.torch.load_file(file), strict=False, assign=True)
        optimizer = tiny.adamw(model) if trains else None
    if trains:
        train(run, model, optimizer)
    run.keep("tokens", model.eval().generate(**prompt(), max_new_tokens=4, do_sample=False))
    run.keep_model(model)


sparse = functools.partial(prune.l1_unstructured, name="weight", amount=0.3)

SCRIPTS: dict[str, Script] = {
    "compile, blocks replaced before wrap": compiled_blocks,
    "compile, blocks replaced after wrap": functools.partial(compiled_blocks, when="after"),
    "compile, blocks in place before wrap": functools.partial(compiled_blocks, compile_=compile_blocks),
    "compile, blocks in place after wrap": functools.partial(compiled_blocks, compile_=compile_blocks, when="after"),
    "compile, forwards before wrap": functools.partial(compiled_blocks, compile_=compile_forwards),
    "compile, forwards after wrap": functools.partial(compiled_blocks, compile_=compile_forwards, when="after"),
    "compile, blocks called before wrap": functools.partial(compiled_blocks, called=True),
    "compile, blocks in place, called before wrap": functools.partial(
        compiled_blocks, compile_=compile_blocks, called=True
    ),
    "compile, blocks of a Llama": functools.partial(compiled_blocks, compile_=compile_blocks, make=tiny.llama),
    "compile, fullgraph, blocks replaced": functools.partial(compiled_blocks, fullgraph=True),
    "compile, fullgraph, blocks in place": functools.partial(compiled_blocks, compile_=compile_blocks, fullgraph=True),
    "compile, fullgraph, forwards": functools.partial(compiled_blocks, compile_=compile_forwards, fullgraph=True),
    "compile, fullgraph, blocks replaced, check off": functools.partial(compiled_blocks, fullgraph=True, check="off"),
    "compile, fullgraph, forwards, check off": functools.partial(
        compiled_blocks, compile_=compile_forwards, fullgraph=True, check="off"
    ),
    "compile, aot_eager": functools.partial(compiled_blocks, backend="aot_eager"),
    "compile, inductor": functools.partial(compiled_blocks, backend="inductor"),
    "compile, graphs of blocks replaced": functools.partial(compiled_blocks, counted=True),
    "compile, graphs of blocks in place": functools.partial(compiled_blocks, compile_=compile_blocks, counted=True),
    "compile, graphs of blocks, check off": functools.partial(compiled_blocks, check="off", counted=True),
    "compile, model before wrap": compiled_model,
    "compile, model after wrap": functools.partial(compiled_model, when="after"),
    "compile, the compiled model is wrapped": functools.partial(compiled_model, when="wrapper is wrapped"),
    "compile, model in place before wrap": functools.partial(compiled_model, how="in place"),
    "compile, model in place after wrap": functools.partial(compiled_model, how="in place", when="after"),
    "compile, model called before wrap": functools.partial(compiled_model, called=True),
    "compile, model of a Llama": functools.partial(compiled_model, make=tiny.llama, when="after"),
    "compile, fullgraph, model": functools.partial(compiled_model, fullgraph=True, when="after"),
    "compile, then unwrapped": compiled_then_unwrapped,
    "compile, lengths": compiled_with_lengths,
    "compile, loss": compiled_loss,
    "compile, loss and step": functools.partial(compiled_loss, step_too=True),
    "functional_call": functional_call,
    "functional_call with others": functools.partial(functional_call, others=True),
    "jacfwd, jvp": jacobian_of_inputs,
    "torch.func.grad of a factor": gradient_of_a_factor,
    "jvp in training": trained_with_jvp,
    "GradScaler, autocast, clip": scaled,
    "clipped by parts": clipped_by_parts,
    "module hooks, anomaly mode": module_hooks_and_anomaly_mode,
    "gradient hooks, step hooks": gradient_hooks,
    "save_on_cpu": saved_on_cpu,
    "selective checkpoints": selective_checkpoints,
    "weight_norm": functools.partial(with_each_block, change=lambda block: parametrizations.weight_norm(block.up)),
    "spectral_norm": functools.partial(with_each_block, change=lambda block: parametrizations.spectral_norm(block.up)),
    "orthogonal": functools.partial(with_each_block, change=lambda block: parametrizations.orthogonal(block.up)),
    "prune": functools.partial(with_each_block, change=lambda block: sparse(block.up)),
    "to, float, train, cpu": moved,
    "TransformerEncoder": functools.partial(trained_and_evaluated, make=Encoder),
    "TransformerEncoder, no fast path": functools.partial(trained_and_evaluated, make=Encoder, fast=False),
    "LSTM": functools.partial(trained_and_evaluated, make=Recurrent),
    "DCP": resumed_by_dcp,
    "DCP, full state on the CPU": functools.partial(
        resumed_by_dcp, options=dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    ),
    "DCP, flat optimizer state": functools.partial(
        resumed_by_dcp, options=dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
    ),
    "torch.save": resumed_by_torch_save,
    "torch.save, mapped": functools.partial(resumed_by_torch_save, mmap=True),
    "safetensors, save_file": safetensors_file,
    "safetensors, save_model": safetensors_model,
    "safetensors, save_model, tied": functools.partial(safetensors_model, tied=True),
    "FlopCounterMode": flops,
    "profiler": functools.partial(profiled, record_shapes=True, profile_memory=True, with_flops=True),
    "profiler, with_stack": functools.partial(profiled, with_stack=True),
    "profiler, with_modules": functools.partial(profiled, with_modules=True),
    "AveragedModel": averaged,
    "AveragedModel, EMA": functools.partial(averaged, ema=True),
    "AveragedModel, streamed": average_is_streamed,
    "averages by state_dict": averaged_by_state_dict,
    "generate, greedy": generated,
    "generate, bfloat16": functools.partial(generated, dtype=torch.bfloat16),
    "generate, sampled": functools.partial(generated, do_sample=True, top_k=20, temperature=0.7),
    "generate, beams": functools.partial(generated, num_beams=3),
    "generate, static cache": functools.partial(generated, cache_implementation="static"),
    "generate, no cache": functools.partial(generated, use_cache=False),
    "generate, between steps": generated_between_steps,
    "generate, an assistant": generated_by_an_assistant,
    "generate, pipeline()": generated_by_pipeline,
    "bitsandbytes AdamW": functools.partial(optimized, make=bitsandbytes.optim.AdamW),
    "bitsandbytes AdamW8bit": functools.partial(optimized, make=bitsandbytes.optim.AdamW8bit),
    "bitsandbytes PagedAdamW8bit": functools.partial(optimized, make=bitsandbytes.optim.PagedAdamW8bit),
    "bitsandbytes Lion8bit": functools.partial(optimized, make=bitsandbytes.optim.Lion8bit),
    "torchao AdamW8bit": functools.partial(optimized, make=torchao.optim.AdamW8bit),
    "transformers Adafactor": functools.partial(
        optimized, make=transformers.optimization.Adafactor, lr=1e-3, relative_step=False
    ),
    "torch Adafactor": functools.partial(optimized, make=torch.optim.Adafactor),
    "Muon": muon,
    "LBFGS": lbfgs,
    "load_model into meta": functools.partial(loaded_when_wrapped, load=loaded_by_safetensors),
    "load_model into meta, tied": functools.partial(loaded_when_wrapped, load=loaded_by_safetensors, tied=True),
    "load_checkpoint_in_model into meta": functools.partial(loaded_when_wrapped, load=loaded_by_accelerate),
    "load_checkpoint_in_model into meta, tied": functools.partial(
        loaded_when_wrapped, load=loaded_by_accelerate, tied=True
    ),
    "load_checkpoint_and_dispatch into meta": functools.partial(loaded_when_wrapped, load=loaded_and_dispatched),
    "init_empty_weights, shards, training": from_shards,
    "init_empty_weights, shards, frozen": functools.partial(from_shards, trains=False),
}


NOT_EQUAL: dict[str, str] = {
    "compile, fullgraph, model": "a model that streams is cut at its units",
    "compile, loss and step": "torch rounds otherwise in a compiled step; noria's step is not compiled",
    "jvp in training": "a module's outputs are dual tensors, whose backward announces no visit",
    "TransformerEncoder": "torch takes its fast path, which rounds otherwise, in modules without hooks alone",
}


@cases(SCRIPTS, NOT_EQUAL)
def test_torch_tools(script: Script, tmp_path: Path):
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert_equal(script, tmp_path)


# ---- what is refused ---------------------------------------------------------------------------------------


def another_optimizer(run: Run) -> None:
    model, _ = start(run)
    loss_of(model, 0).backward()
    tiny.adamw(model).step()


def gradients_by_func(run: Run) -> None:
    model = run.wrap(Net())

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, kwargs=tiny.batch(0))

    torch.func.grad(loss)(dict(model.named_parameters()))


def rotary_on_meta(run: Run) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny.llama().config)
    run.wrap(model)


def loaded_with_device_map(run: Run) -> None:
    shards(run)
    model = run.wrap(empty_llama())
    accelerate.load_checkpoint_in_model(model, str(run.folder / "saved"), device_map={"": "cpu"})
    loss_of(model, 0)


def loaded_with_assign(run: Run) -> None:
    run.wrap(empty_llama()).load_state_dict(tiny.llama().state_dict(), assign=True)


def one_shard_missing(run: Run) -> None:
    model = run.wrap(empty_llama())
    for file in shards(run)[1:]:
        model.load_state_dict(safetensors.torch.load_file(file), strict=False)
    loss_of(model, 0)


def traced_in_materialize(run: Run) -> None:
    model = frozen_blocks(run)
    with noria.materialize(model):
        torch.jit.trace(model, torch.ones(2, WIDTH))


MATERIALIZE = "read and edit parameters inside `with noria.materialize(model):`"

REFUSED: dict[str, tuple[Script, str]] = {
    "AveragedModel of a wrapped model": (functools.partial(averaged, inside=False), MATERIALIZE),
    "torch.save of a model": (lambda run: torch.save(run.wrap(Net()), run.folder / "model.pt"), MATERIALIZE),
    "an optimizer made later": (another_optimizer, "give this optimizer to noria.wrap"),
    "bfloat16()": (lambda run: run.wrap(Net()).bfloat16(), "change dtypes before noria.wrap"),
    "torch.func.grad of weights": (gradients_by_func, "compute higher derivatives on an unwrapped model"),
    "jit.trace in materialize": (traced_in_materialize, "leave the block"),
    "rotary buffers on meta": (rotary_on_meta, "compute it before noria.wrap, on the CPU"),
    "load_checkpoint_in_model with device_map": (loaded_with_device_map, "accelerate: without device_map"),
    "load with assign": (loaded_with_assign, "leave assign out"),
    "a shard is missing": (one_shard_missing, "built on the meta device and not loaded since"),
}


@pytest.mark.parametrize(("script", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_torch_tools(script: Script, words: str, tmp_path: Path):
    with pytest.raises((noria.UsageError, RuntimeError), match=f"(?s)noria expected .*{re.escape(words)}"):
        script(Run(True, tmp_path))
