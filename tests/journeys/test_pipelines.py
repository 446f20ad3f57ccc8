"""Stages of torch.distributed.pipelining, each wrapped by the one call: the bits of the same pipeline without noria."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import noria
import pytest
import torch
import torch.distributed as dist
from noria.planning import wrap_plan
from noria.testing import assert_same_bits, on_machine
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, WIDTH, Block, adamw, sgd, state_tensors
from tests.ranks import asked_for, in_turn_on_ranks, on_ranks

NUM_MICRO_BATCHES, STEPS = 4, 3


class OfOnesOwn(pipelining.ScheduleGPipe):
    """As schedules of users do, it does not tell its order."""

    def _get_pipeline_order(self) -> None:
        return None


SCHEDULES: dict[str, tuple[Any, int]] = {
    "GPipe": (pipelining.ScheduleGPipe, 1),
    "1F1B": (pipelining.Schedule1F1B, 1),
    "interleaved 1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
    "of one's own": (OfOnesOwn, 1),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
}
POLICIES: dict[str, dict[str, Any]] = {
    "torch updates": {"kernel": "torch"},
    "blocking": {"kernel": "torch", "update": "blocking"},
    "offloaded": {"kernel": "torch", "activations": "offload"},
    "recomputed": {"kernel": "torch", "activations": "recompute"},
    "drafts": {"draft_memory": "64MiB"},  # SGD by noria's kernels has torch's bits
}


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def models_of(
    rank: int, schedule: str, dtype: torch.dtype = torch.float32, make_stage: Callable[[], nn.Module] = Stage
) -> list[nn.Module]:
    torch.manual_seed(rank)
    return [make_stage().to(dtype) for _ in range(SCHEDULES[schedule][1])]


def batch_of(
    step: int, replica: int, num_micro_batches: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target; two rows for each micro-batch."""
    generator = torch.Generator(DEVICE).manual_seed(10 * step + replica)
    shape = (2 * num_micro_batches, length, WIDTH)
    x, target = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    return x, target


def trained(
    schedule: str,
    policy: dict[str, Any] | None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
    replicas: int = 1,
    length: int | Sequence[int] = 5,
    num_micro_batches: int = NUM_MICRO_BATCHES,
    hostility: dict[str, Any] = HOSTILE,
    make_stage: Callable[[], nn.Module] = Stage,
    look: Callable[[noria.Report], None] = lambda report: None,
    after_step: Callable[[int, list[nn.Module]], None] = lambda step, models: None,
    follows: bool = False,
    scale_grads: bool | None = None,
    watch: Callable[[list[Any], Any], None] = lambda stages, schedule: None,
    machine: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """What is left after some steps of this rank's stages, and the losses of the last one. `policy` None: plain.
    `length`: of sequences; or of those of each step. `follows`: noria is given the stages, and not their modules alone.
    `scale_grads` None: both values, if the schedule allows False."""
    lengths = [length] * STEPS if isinstance(length, int) else length
    mesh = init_device_mesh(
        DEVICE, (dist.get_world_size() // replicas, replicas), mesh_dim_names=("stages", "replicas")
    )
    rank, size, replica = mesh.get_local_rank("stages"), mesh["stages"].size(), mesh.get_local_rank("replicas")
    make_schedule = SCHEDULES[schedule][0]
    models = models_of(rank, schedule, dtype, make_stage)
    num_models = len(models)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = make_optimizer(parameters)
    stages = [
        pipelining.PipelineStage(
            model, rank + nth * size, num_models * size, torch.device(DEVICE), group=mesh["stages"].get_group()
        )
        for nth, model in enumerate(models)
    ]
    if policy is not None:
        with on_machine(**(machine or {"hostility": hostility})):
            policy = {"mesh": mesh["replicas"], "stages": mesh["stages"], **policy}
            noria.wrap(stages if follows else models, optimizer, device=DEVICE, window=2, **policy)
    if scale_grads is None:
        scale_grads = replicas == 1  # no rank has a whole gradient that torch could scale

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target)
        return loss if scale_grads else loss / num_micro_batches

    kept: dict[str, torch.Tensor] = {}
    for step, now in enumerate(lengths):
        if step == 0 or now != lengths[step - 1]:  # a schedule knows one shape
            play = make_schedule(
                stages if num_models > 1 else stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=scale_grads
            )
            watch(stages, play)
        x, target = batch_of(step, replica, num_micro_batches, now, dtype)
        losses: list[torch.Tensor] = []
        play.step(*([x] if rank == 0 else []), **({"target": target, "losses": losses} if rank == size - 1 else {}))
        if policy is None and replicas > 1:
            for parameter in parameters:
                dist.all_reduce(parameter.grad, group=mesh["replicas"].get_group())
                parameter.grad.div_(replicas)
        optimizer.step()
        optimizer.zero_grad()
        after_step(step, models)
        kept |= {f"loss {step}.{nth}": loss.detach() for nth, loss in enumerate(losses)}
    for nth, model in enumerate(models):
        kept |= {f"{nth}.{name}": value.clone() for name, value in model.state_dict().items()}
        if policy is not None:
            report = noria.report(model)
            assert report.num_fetches > 0 and report.ledger_agrees and report.peak_units <= 2, str(report)
            assert "offload" not in policy.get("activations", "") or report.saved["num_offloaded"] > 0, str(report)
            look(report)
    return kept | {name: value.clone() for name, value in state_tensors(optimizer).items()}


def unpipelined(
    schedule: str,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    rank: int,
    size: int,
    *,
    replica: int = 0,
    replicas: int = 1,
    length: Sequence[int],
    num_micro_batches: int = NUM_MICRO_BATCHES,
    make_stage: Callable[[], nn.Module] = Stage,
) -> dict[str, torch.Tensor]:
    """What `trained` gives, by plain torch on one device: the stages of all ranks, one behind the other, accumulate the
    gradients of the same micro-batches, of all replicas in turn."""
    of_ranks = [models_of(each, schedule, make_stage=make_stage) for each in range(size)]
    line = [of_ranks[stage % size][stage // size] for stage in range(size * len(of_ranks[0]))]
    parameters = [[p for model in models for p in model.parameters()] for models in of_ranks]
    optimizers = [make_optimizer(each) for each in parameters]
    of_all = [p for each in parameters for p in each]
    kept: dict[str, torch.Tensor] = {}
    for step, now in enumerate(length):
        batches = [batch_of(step, each, num_micro_batches, now, torch.float32) for each in range(replicas)]
        for nth in range(num_micro_batches):
            gradients = []
            for each, (inputs, targets) in enumerate(batches):
                x, target = inputs.chunk(num_micro_batches)[nth], targets.chunk(num_micro_batches)[nth]
                for model in line:
                    x = model(x)
                loss = F.mse_loss(x, target)
                if replicas > 1:
                    loss = loss / num_micro_batches
                gradients.append(torch.autograd.grad(loss, of_all))
                if each == replica and rank == size - 1:
                    kept[f"loss {step}.{nth}"] = loss.detach()
            for parameter, *of_each in zip(of_all, *gradients, strict=True):
                mean = torch.stack([gradient / replicas for gradient in of_each]).sum(0)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        for parameter in of_all:
            if replicas == 1:
                parameter.grad.div_(num_micro_batches)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for nth, model in enumerate(of_ranks[rank]):
        kept |= {f"{nth}.{name}": value for name, value in model.state_dict().items()}
    return kept | state_tensors(optimizers[rank])


def like_plain(rank: int, size: int, schedule: str, policy: dict[str, Any]) -> None:
    wrap_plan.LEAST_SAVED = 64
    make_optimizer = adamw if policy.get("kernel") == "torch" else sgd
    assert_same_bits(trained(schedule, policy, make_optimizer), trained(schedule, None, make_optimizer))


def refuses(rank: int, size: int) -> None:
    """The first stage."""
    refusal = "ScheduleInterleavedZeroBubble, whose backwards of inputs and of weights are apart"
    with pytest.raises((noria.UsageError, RuntimeError), match=refusal):
        trained("zero-bubble", {}, sgd)


ACTS: dict[str, tuple[Callable[..., Any], Any]] = {
    f"{schedule}, {name}": (like_plain, (schedule, policy))
    for schedule in SCHEDULES
    if schedule not in ("zero-bubble", "of one's own")
    for name, policy in POLICIES.items()
    if schedule == "1F1B" or name in ("torch updates", "drafts")
} | {"of one's own": (like_plain, ("of one's own", POLICIES["blocking"]))}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, ACTS))


@pytest.mark.parametrize("name", ACTS)
def test_stages_that_are_wrapped_have_the_bits_of_the_same_pipeline(found, name):
    assert not found[name], found[name]


def test_zero_bubble_schedules_are_refused_by_name():
    on_ranks(2, refuses, dying=(1,))  # which would wait for the first until the group's timeout
