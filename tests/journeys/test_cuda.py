"""Training whose layers compute on a CUDA device: the bits of a model that lies there, updated by torch on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.journeys.pairs import VOCAB, Net, adamw, sgd
from tests.journeys.test_outside_modules import Patched
from tests.pretend_gpu import vehicle

DEVICE = "cuda"
STEPS, WIDTH = 4, 64
TIMEOUT_S = 60.0
pytestmark = pytest.mark.gpu

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def batch_of(number: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 32), generator=torch.Generator().manual_seed(number)).to(DEVICE)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    batch = batch_of(number)
    return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())


def net() -> nn.Module:
    return Net(width=WIDTH)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model on the CPU, and its loss of batch `number` on the device."""

    model: Callable[[], nn.Module] = net
    loss: Callable[[nn.Module, int], torch.Tensor] = loss_of


NET = Kind()


def made(kind: Kind = NET) -> nn.Module:
    torch.manual_seed(0)
    return kind.model()


def resident(make_optimizer: Make, clip: float | None = None, kind: Kind = NET) -> dict[str, torch.Tensor]:
    """On the device but for its optimizer, whose parameters and gradients are copies on the CPU."""
    model = made(kind).to(DEVICE)
    masters = [nn.Parameter(each.detach().cpu().clone()) for each in model.parameters()]
    optimizer, left = make_optimizer(masters), {}
    for number in range(STEPS):
        loss = kind.loss(model, number)
        loss.backward()
        left[f"loss {number}"] = loss.detach().cpu()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                left[f"gradient {number} of {name}"] = parameter.grad.cpu()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad if parameter.grad is None else parameter.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return left | {name: value.cpu() for name, value in model.state_dict().items()}


def wrapped(
    make_optimizer: Make, clip: float | None = None, kind: Kind = NET, **policy: Any
) -> dict[str, torch.Tensor]:
    model = made(kind)
    optimizer, left = make_optimizer(model.parameters()), {}
    noria.wrap(model, optimizer, device=DEVICE, window=2, **policy)
    for number in range(STEPS):
        loss = kind.loss(model, number)
        loss.backward()
        left[f"loss {number}"] = loss.detach().cpu()
        if policy.get("update") != "backward":
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    assert parameter.grad.device.type == DEVICE
                    left[f"gradient {number} of {name}"] = parameter.grad.cpu()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    report = noria.report(model)
    assert report.ledger_agrees and report.num_fetches > 0, str(report)
    left |= {name: value.clone() for name, value in model.state_dict().items()}
    noria.unwrap(model, optimizer)
    return left


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_training_has_the_bits_of_a_model_on_the_device(make_optimizer, activations):
    assert_same_bits(wrapped(make_optimizer, kernel="torch", activations=activations), resident(make_optimizer))


class Attention(nn.Module):
    """A block with causal attention, heads of 32, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(2, (-1, 32)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, 2))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return x + self.dropout(self.out(found.transpose(1, 2).flatten(2)))


class Transformer(Net):
    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__(width=WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(5))
        self.checkpoints = checkpoints

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return self.head(x)


def in_bfloat16(model: nn.Module, number: int) -> torch.Tensor:
    torch.manual_seed(number)  # for what is dropped
    with torch.autocast(DEVICE, torch.bfloat16):
        return loss_of(model, number)


def compiled_blocks() -> nn.Module:
    model = Net(width=WIDTH)
    for block in model.blocks:
        block.compile()
    return model


def own_loss(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch_of(number))


KINDS = {
    "autocast": Kind(loss=in_bfloat16),
    "attention": Kind(Transformer, in_bfloat16),
    "checkpoint": Kind(functools.partial(Transformer, False), in_bfloat16),
    "reentrant checkpoint": Kind(functools.partial(Transformer, True), in_bfloat16),
    **{
        f"{loss}, {'tied' if tied else 'untied'}": Kind(functools.partial(Patched, loss, tied), own_loss)
        for loss in ("saves", "keeps", "gradients", "saves in a reentrant checkpoint, passed", "two units")
        for tied in (False, True)
    },
}


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_scripts_of_many_kinds_have_the_bits_of_a_model_on_the_device(kind, activations):
    ours = wrapped(adamw, kind=KINDS[kind], kernel="torch", activations=activations)
    assert_same_bits(ours, resident(adamw, kind=KINDS[kind]))


@pytest.mark.skipif(vehicle.is_installed(), reason="there are no compilers for the pretend GPU")
@pytest.mark.parametrize("loss", [loss_of, in_bfloat16])
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
def test_compiled_blocks_have_the_bits_of_compiled_blocks_on_the_device(loss, activations):
    kind = Kind(compiled_blocks, loss)
    assert_same_bits(wrapped(adamw, kind=kind, kernel="torch", activations=activations), resident(adamw, kind=kind))


def test_clipping_by_torch_has_the_bits_of_a_model_on_the_device():
    assert_same_bits(wrapped(sgd, 0.1, kernel="torch"), resident(sgd, 0.1))


@pytest.mark.parametrize(
    "policy",
    [
        {"update": "auto"},
        {"draft_memory": "64MiB"},
        {"update": "backward"},
        {"draft_memory": "64MiB", "activations": "offload"},
        {"update": "backward", "activations": "auto"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_updates_have_the_same_bits_whenever_they_are_made(policy, dtype):
    ours = wrapped(adamw, kernel="fused", dtype=dtype, **policy)
    blocking = wrapped(adamw, kernel="fused", dtype=dtype, update="blocking")
    assert_same_bits(ours, {name: value for name, value in blocking.items() if name in ours})
    assert not torch.equal(ours["head.weight"].float(), made().head.weight)


def test_steps_on_another_stream_have_the_same_bits_and_give_no_warning(recwarn):
    """Of AccumulateGrad, whose nodes keep the stream that they were made on."""

    def trained(streams: list[Any]) -> dict[str, torch.Tensor]:
        model = made()
        optimizer = sgd(model.parameters())
        noria.wrap(model, optimizer, device=DEVICE, window=2)
        for number in range(STEPS):
            stream = streams[number % len(streams)]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss_of(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.current_stream().wait_stream(stream)
        left = {name: value.clone() for name, value in model.state_dict().items()}
        noria.unwrap(model, optimizer)
        return left

    one = torch.cuda.current_stream()
    assert_same_bits(trained([torch.cuda.Stream(), torch.cuda.Stream(), one]), trained([one]))
    assert not [each for each in recwarn if "AccumulateGrad" in str(each.message)]


@pytest.mark.parametrize("by_noria", [False, True], ids=["bytes", "pending"])
def test_what_a_device_still_writes_is_there_when_the_home_is_read(by_noria):
    """A weight that is given a device's tensor inside a block, and a gradient that is multiplied before unwrap: its
    bytes, or by a factor that noria keeps until they are needed."""
    model = made()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    loss_of(model, 0).backward()
    expected = {name: parameter.grad.cpu() * 0.5 for name, parameter in model.named_parameters()}
    weight = model.blocks[0].expand.weight
    with noria.materialize(model):
        value = torch.full_like(weight, 3.0, device=DEVICE)
        for _ in range(200):
            value.add_(1)
        weight.data = value
    assert model.state_dict()["blocks.0.expand.weight"].eq(203).all()
    for parameter in model.parameters():
        torch._foreach_mul_([parameter.grad], 0.5)
        if not by_noria:
            parameter.grad.add_(0)
    noria.unwrap(model, optimizer)
    assert_same_bits({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_edits_that_a_block_has_queued_are_there_when_it_reads_and_loads(dtype):
    model, name = made(), "blocks.0.expand.weight"
    noria.wrap(model, adamw(model.parameters()), device=DEVICE, window=2, dtype=dtype, kernel="fused")
    weight = model.blocks[0].expand.weight
    with noria.materialize(model), torch.no_grad():

        def edit() -> None:
            for _ in range(100):
                weight.add_(1)

        weight.fill_(0)
        edit()
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        assert saved[name].eq(100).all()
        edit()
        with noria.materialize(model.blocks[0]):
            edit()
        edit()
        shown = model.state_dict()[name]
        edit()
        shown.fill_(7)
        assert weight.eq(7).all()
        edit()
        model.load_state_dict(saved)
        assert weight.eq(100).all()
    assert model.state_dict()[name].eq(100).all()


def test_the_least_device_memory_that_a_refusal_names_is_enough():
    model = made()
    optimizer = sgd(model.parameters())
    with pytest.raises(noria.UsageError, match="half of it for activations") as refused:
        noria.plan(model, optimizer, device=DEVICE, device_memory=1)
    found = re.search(r"\((\d+) bytes\)", str(refused.value))
    assert found is not None
    least = int(found[1])
    with pytest.raises(noria.UsageError, match=f"\\({least} bytes\\)"):
        noria.plan(model, optimizer, device=DEVICE, device_memory=least - 2)
    noria.wrap(model, optimizer, device=DEVICE, device_memory=least)
    loss_of(model, 0).backward()
    optimizer.step()
    noria.unwrap(model, optimizer)


def test_a_learning_rate_may_lie_on_the_device():
    def on_device(parameters: Any) -> torch.optim.Optimizer:
        return adamw(parameters, lr=torch.tensor(1e-2, device=DEVICE), foreach=False)

    assert_same_bits(wrapped(on_device, kernel="torch"), resident(lambda ps: adamw(ps, lr=torch.tensor(1e-2))))


def test_weights_between_passes_are_not_there():
    model = made()
    noria.wrap(model, adamw(model.parameters()), device=DEVICE, window=2)
    loss_of(model, 0).backward()
    weight = model.blocks[0].expand.weight
    with pytest.raises(RuntimeError, match="evicted"):
        weight.sum().item()
    with noria.materialize(model, read_only=True):
        assert model.blocks[0].expand.weight.isfinite().all()
    noria.unwrap(model)


@pytest.mark.parametrize("update", ["auto", "backward", "blocking"])
def test_the_report_knows_what_the_device_did_and_when(update):
    model = made()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="fused", update=update)
    for number in range(STEPS):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = wrapped_by(model).context.engine
    engine.updates.run_all_deferred()
    engine.idle()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    report = noria.report(model, host_memory_gib_s=1e6)
    bound, updates, lanes = report.bound, report.updates, {lane.lane: lane for lane in report.lanes}
    assert bound is not None and updates is not None
    assert min(lanes[lane].busy_us for lane in ("compute", "fetch", "drain", "update")) > 0
    sums = engine.statistics.step_sums()
    assert 0 < sums["forward_us"] + sums["backward_us"] < lanes["compute"].busy_us  # without the first step
    shares = (updates.behind_forward_us, updates.behind_backward_us, updates.exposed_us)
    assert min(shares) >= 0 and sum(shares) == updates.total_us > 0
    assert update != "blocking" or updates.exposed_us == updates.total_us
    assert bound.step_us > 0 and "host memory" not in bound.limit
    copied = sums["copied"] / sums["num_steps"]
    assert bound.host_memory.copied == copied * (1 if DEVICE == "cuda" else 2) > 0
    slow = noria.report(model, host_memory_gib_s=1e-6).bound
    assert slow is not None and "host memory" in slow.limit


@pytest.mark.parametrize("update", ["auto", "backward"])
def test_a_forward_comes_after_all_of_a_backward_that_raised(update):
    """On the launching thread, while autograd's thread of the device is in a block."""
    sides = []
    for _ in range(2):
        model = made()
        sides.append((model, sgd(model.parameters())))
        noria.wrap(*sides[-1], device=DEVICE, update=update)
    (model, _), (plain, _) = sides
    is_in_block, comes_forward, came = threading.Event(), threading.Event(), []

    def stay(gradient: torch.Tensor) -> None:
        is_in_block.set()
        assert comes_forward.wait(TIMEOUT_S)
        came.append("block")

    def fail(gradient: torch.Tensor) -> None:
        assert is_in_block.wait(TIMEOUT_S)
        raise ValueError("a hook of the user's")

    number = torch.zeros((), requires_grad=True)
    number.register_hook(fail)
    more = number * 1  # autograd goes back to it when it has left for the device: that came later
    with model.blocks[-1].register_forward_hook(lambda module, args, output: output.register_hook(stay) and None):
        loss = loss_of(model, 0).cpu()
    with pytest.raises(ValueError, match="a hook of the user's"):
        (loss + more).backward()

    model.register_forward_pre_hook(lambda module, args: comes_forward.set(), prepend=True)
    model.embed.register_forward_pre_hook(lambda module, args: came.append("forward"))
    if update == "backward":
        with pytest.raises(RuntimeError, match="different steps"):
            loss_of(model, 1)
        assert came == ["block"]
        return
    for each, its in sides:
        for step in range(STEPS):
            loss = loss_of(each, step)
            its.zero_grad()
            loss.backward()
            its.step()
    assert came[:2] == ["block", "forward"]
    assert_same_bits(model.state_dict(), plain.state_dict())
