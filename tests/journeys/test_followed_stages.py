"""Stages that are given to noria.wrap themselves: it knows which backward is the last, how gradients are scaled, and
what a stage keeps of micro-batches in flight. The bits are those of the same pipeline without noria."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import noria
import pytest
import torch
from noria.pipeline.pipelining_compat import FOLLOWED
from noria.planning import wrap_plan
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tests.device import DEVICE
from tests.journeys.pairs import WIDTH, adamw, go_on_here, sgd, state_tensors
from tests.journeys.test_lending import AUTO, LENGTH, keeps_in_room
from tests.journeys.test_pipelines import SCHEDULES, STEPS, Stage, trained
from tests.ranks import asked_for, assert_fine, in_turn_on_ranks
from tests.torch_versions import STAGES_OF_ONE_RANK

Act = tuple[Callable[..., Any], Any]
NOT_A_POWER_OF_TWO = 6
POLICIES: dict[str, dict[str, Any]] = {
    "torch updates": {"kernel": "torch"},
    "offloaded": {"kernel": "torch", "activations": "offload"},
    "recomputed": {"kernel": "torch", "activations": "recompute"},
    "drafts": {"draft_memory": "64MiB", "activations": "offload"},
    "clipped": {"draft_memory": "64MiB", "max_grad_norm": 1e9},
    "inside backward": {"update": "backward", "activations": "offload"},
}


def like_plain(rank: int, size: int, schedule: str, policy: dict[str, Any], scale_grads: bool) -> None:
    wrap_plan.LEAST_SAVED = 64
    make_optimizer = adamw if policy.get("kernel") == "torch" else sgd
    how: dict[str, Any] = {"scale_grads": scale_grads, "num_micro_batches": NOT_A_POWER_OF_TWO}

    def look(report: noria.Report) -> None:
        if "draft_memory" in policy:  # the first step has no state to draft from
            num_units = 3 * SCHEDULES[schedule][1]
            assert report.drafts["kept"] == (STEPS - 1) * num_units, str(report)
            assert report.drafts["dropped"] == report.drafts["redone"] == 0, str(report)

    ours = trained(schedule, policy, make_optimizer, follows=True, look=look, **how)
    assert_same_bits(ours, trained(schedule, None, make_optimizer, **how))


def updates_alike(rank: int, size: int) -> None:
    """Ranks that share a stage: no rank has all of what torch would scale."""
    how: dict[str, Any] = {"replicas": 2, "follows": True, "num_micro_batches": NOT_A_POWER_OF_TWO, "scale_grads": True}
    kept: list[int] = []

    def look(report: noria.Report) -> None:
        kept.append(report.drafts["kept"])

    drafted = trained("1F1B", {"draft_memory": "64MiB"}, sgd, look=look, **how)
    assert kept == [(STEPS - 1) * 3]
    for policy in ({"update": "blocking"}, {"update": "backward"}, {"kernel": "torch"}):
        assert_same_bits(trained("1F1B", policy, sgd, **how), drafted)
    # Divided by a power of two the loss has the same digits.
    how["num_micro_batches"] = 4
    ours, divided = (trained("1F1B", {}, sgd, **{**how, "scale_grads": scales}) for scales in (True, False))
    assert_same_bits(*({n: v for n, v in each.items() if "loss" not in n} for each in (ours, divided)))


# ---- what is in flight ----


def storages_of(stage: Any) -> list[torch.UntypedStorage]:
    """What torch keeps for micro-batches: buffers, inputs and outputs; not what is the user's."""
    infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    buffers = [getattr(info, "buffer", None) for row in infos for info in row]
    tensors = [buffer for buffer in buffers if buffer is not None]
    for outputs, inputs in stage.fwd_cache.values():
        tensors += [*([] if stage.is_last else outputs), *([] if stage.is_first else inputs)]
    return [tensor.untyped_storage() for tensor in tensors]


def lets_go(rank: int, size: int, schedule: str, activations_are: str) -> None:
    """Whenever a backward begins, of all micro-batches in flight only this one's gradient has memory that is torch's to
    keep; and once they are offloaded, inputs and outputs of those that went are nowhere on the device."""
    wrap_plan.LEAST_SAVED = 64
    policy = {"kernel": "torch", "activations": activations_are}
    seen: list[tuple[int, int]] = []  # micro-batches in flight, those with an input or output that still exists

    def watch(stages: list[Any], play: Any) -> None:
        [stage] = stages
        alive: dict[int, list[StorageWeakRef]] = {}
        forward, backward = stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync

        def watched_forward(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            number = len(alive)
            alive[number] = [] if stage.is_first else [StorageWeakRef(args[0].untyped_storage())]
            alive[number] += [] if stage.is_last else [StorageWeakRef(output.untyped_storage())]
            return output

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            in_flight = len(stage.fwd_cache)
            with_memory = sum(storage.nbytes() > 0 for storage in storages_of(stage))
            assert with_memory == (0 if stage.is_last else 1), (with_memory, in_flight)
            seen.append((in_flight, sum(any(not each.expired() for each in refs) for refs in alive.values())))
            return backward(*args, **kwargs)

        stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync = watched_forward, watched_backward

    how: dict[str, Any] = {"num_micro_batches": 6, "length": LENGTH}
    ours = trained(schedule, policy, adamw, follows=True, watch=watch, **how)
    assert_same_bits(ours, trained(schedule, None, adamw, **how))
    most_in_flight = max(num for num, _ in seen)
    assert most_in_flight == (5 if schedule == "GPipe" else 1 - rank), seen
    if activations_are == "offload" and schedule == "GPipe":
        # Beside the one that begins those that are on their way back or not yet out: of six blocks at most.
        assert all(num <= 3 for _, num in seen), seen


def keeps_to_its_room(rank: int, size: int) -> None:
    wrap_plan.LEAST_SAVED = 64
    ours = trained(
        "1F1B",
        {"kernel": "torch", **AUTO},
        adamw,
        length=LENGTH,
        follows=True,
        look=lambda report: keeps_in_room(rank, size, report),
    )
    assert_same_bits(ours, trained("1F1B", None, adamw, length=LENGTH))


def goes_on_unwrapped(rank: int, size: int) -> None:
    """The buffers in which torch receives have memory again."""
    wrap_plan.LEAST_SAVED = 64
    left = []
    for policy in ({"kernel": "torch", "activations": "offload"}, None):
        torch.manual_seed(rank)
        model = Stage()
        optimizer = adamw(model.parameters())
        stage = pipelining.PipelineStage(model, rank, size, torch.device(DEVICE))
        if policy is not None:
            alone = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("stages", "replicas"))["replicas"]
            noria.wrap(stage, optimizer, device=DEVICE, mesh=alone, **policy)
        play = pipelining.Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
        for step in range(3):
            x = torch.randn(8, 5, WIDTH, generator=torch.Generator(DEVICE).manual_seed(step))
            play.step(*([x] if rank == 0 else []), **({"target": x} if rank else {}))
            optimizer.step()
            optimizer.zero_grad()
            if policy is not None and step == 0:
                noria.unwrap(stage, optimizer)
                go_on_here(model, optimizer)
                assert all(storage.nbytes() > 0 for storage in storages_of(stage))
        left.append({**model.state_dict(), **state_tensors(optimizer)})
    assert_same_bits(*left)


def keeps_what_the_user_has(rank: int, size: int) -> None:
    """Hooks that take a stage's input, output and gradients have them until they let go."""
    wrap_plan.LEAST_SAVED = 64

    def run(policy: dict[str, Any] | None) -> list[torch.Tensor]:
        taken: list[torch.Tensor] = []

        def take(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            taken.append(args[0])
            taken.append(output)
            if output.requires_grad:
                output.register_hook(taken.append)

        def watch(stages: list[Any], play: Any) -> None:
            stages[0].submod.register_forward_hook(take)

        step = lambda number, models: [kept.append(each.detach().clone()) for each in taken[3:]] and taken.clear()  # noqa: E731
        kept: list[torch.Tensor] = []
        trained("GPipe", policy, adamw, follows=policy is not None, watch=watch, after_step=step)
        return kept

    ours, theirs = run({"kernel": "torch", "activations": "offload"}), run(None)
    assert len(ours) == len(theirs) > 0
    assert_same_bits(dict(enumerate(ours)), dict(enumerate(theirs)))


TIMES_EVALUATED = [3, 0, 1]  # after each step


def evaluates_between(rank: int, size: int, policy: dict[str, Any]) -> None:
    """A batch that is only looked at is none of those that come before a step: drafts go on. Nothing of it stays."""
    wrap_plan.LEAST_SAVED = 64
    make_optimizer = adamw if policy.get("kernel") == "torch" else sgd

    def look(report: noria.Report) -> None:
        if "draft_memory" in policy:
            assert report.drafts["kept"] == (STEPS - 1) * 3, str(report)

    def run(policy: dict[str, Any] | None) -> dict[str, torch.Tensor]:
        plays: list[Any] = []
        stages: list[Any] = []
        sent: list[StorageWeakRef] = []
        losses: list[torch.Tensor] = []

        def watch(given: list[Any], play: Any) -> None:
            plays.append(play)
            stages.extend(given)
            if rank == 0:
                keep = lambda module, args, output: sent.append(StorageWeakRef(output.untyped_storage()))  # noqa: E731
                given[0].submod.register_forward_hook(keep)

        def evaluate(step: int, models: Any) -> None:
            x = torch.ones(8, 5, WIDTH)
            for _ in range(TIMES_EVALUATED[step]):
                found: list[torch.Tensor] = []
                with torch.no_grad():
                    plays[-1].eval(*([x] if rank == 0 else []), **({"target": x, "losses": found} if rank else {}))
                losses.extend(found)
                if policy is not None:
                    assert not any(storage.nbytes() for stage in stages for storage in storages_of(stage))
                    assert all(each.expired() for each in sent)

        how: dict[str, Any] = {"watch": watch, "after_step": evaluate, "look": look}
        left = trained("1F1B", policy, make_optimizer, follows=policy is not None, **how)
        assert len(losses) == 4 * sum(TIMES_EVALUATED) * rank
        return left | {f"evaluated {number}": loss for number, loss in enumerate(losses)}

    assert_same_bits(run(policy), run(None))


# ---- loops of other kinds ----


class Loop:
    """Two stages of one rank, and what a test does with them. `tie`: what the two modules have in common. `order`: of
    the stages, as noria is given them."""

    def __init__(
        self,
        policy: dict[str, Any] | None,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        num_micro_batches: int = 3,
        tie: Callable[[Stage, Stage], None] = lambda early, late: None,
        order: tuple[int, int] = (0, 1),
    ) -> None:
        torch.manual_seed(0)
        self.num_micro_batches = num_micro_batches
        self.models = [Stage(), Stage()]
        tie(*self.models)
        self.parameters = list(dict.fromkeys(p for model in self.models for p in model.parameters()))
        self.optimizer = make_optimizer(self.parameters)
        self.stages = [pipelining.PipelineStage(m, nth, 2, torch.device(DEVICE)) for nth, m in enumerate(self.models)]
        if policy is not None:
            noria.wrap([self.stages[nth] for nth in order], self.optimizer, device=DEVICE, **policy)
        self.scheduled()

    def scheduled(self) -> None:
        self.play = pipelining.ScheduleInterleaved1F1B(self.stages, self.num_micro_batches, loss_fn=F.mse_loss)

    def run(self, number: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(number)
        x, target = (torch.randn(2 * self.num_micro_batches, 5, WIDTH, generator=generator) for _ in range(2))
        self.play.step(x, target=target)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def left(self) -> dict[str, torch.Tensor]:
        kept = {f"{n}.{name}": v.clone() for n, m in enumerate(self.models) for name, v in m.state_dict().items()}
        return kept | {name: value.clone() for name, value in state_tensors(self.optimizer).items()}


def hook_that_fails_in_backward(fail: Callable[..., None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(fail)

    return hook


def goes_on_after_an_error(loop: Loop) -> None:
    """Raised in the second stage, by the second forward of a step, then by its second backward; both batches are given
    up."""
    loop.run(0)
    loop.update()
    block = loop.models[1].blocks[1]

    def failing() -> Callable[..., None]:
        calls: list[int] = []

        def fail(*args: Any) -> None:
            calls.append(len(calls))
            if len(calls) > 1 + is_new:  # a new schedule looks at shapes first
                raise ValueError("no such luck")

        return fail

    for is_new, register in enumerate((block.register_forward_pre_hook, block.register_forward_hook)):
        fail = failing()
        hook = register(hook_that_fails_in_backward(fail) if is_new else fail)
        with pytest.raises(RuntimeError, match="ailed to run"):
            loop.run(1)
        hook.remove()
        loop.optimizer.zero_grad()
        loop.scheduled()  # torch's own remembers losses of the step that was given up
    for number in (2, 3):
        loop.run(number)
        loop.update()


def steps_every_other_time(loop: Loop) -> None:
    for number in range(6):
        if hasattr(loop.optimizer, "accumulate") and number % 2 == 0:
            with loop.optimizer.accumulate():
                loop.run(number)
        else:
            loop.run(number)
        if number % 2:
            loop.update()


def hands_on_in_memory(loop: Loop) -> None:
    """The second stage has its input from the first, and nothing is sent."""
    for number in range(3):
        loop.run(number)
        loop.update()


LOOPS = [hands_on_in_memory, goes_on_after_an_error, steps_every_other_time]
OF_LOOPS = ["torch updates", "offloaded", "drafts", "inside backward"]


def goes(rank: int, size: int, which: int, policy: dict[str, Any]) -> None:
    wrap_plan.LEAST_SAVED = 64
    make_optimizer = adamw if policy.get("kernel") == "torch" else sgd
    ours, theirs = Loop(policy, make_optimizer), Loop(None, make_optimizer)
    if LOOPS[which] is goes_on_after_an_error and policy.get("update") == "backward":
        return  # a backward that raises there tears the weights, with or without stages
    for loop in (ours, theirs):
        LOOPS[which](loop)
    assert_same_bits(ours.left(), theirs.left())
    if LOOPS[which] is steps_every_other_time and "draft_memory" in policy:
        drafts = noria.report(ours.stages[0]).drafts
        assert drafts["kept"] == 12 and drafts["dropped"] == 0, drafts  # by two steps, the first having no state


def scales_back(rank: int, size: int) -> None:
    """The schedule divides gradients by a power of two, and the user multiplies them again: they have the digits that
    a draft was made of, which would have divided them itself. By what they are multiplied is known when they are used:
    a look finds each draft changed."""
    ours, theirs = (Loop(policy, sgd, num_micro_batches=4) for policy in (POLICIES["drafts"], None))
    wrapped = wrapped_by(ours.stages[0])
    assert wrapped is not None
    for loop in (ours, theirs):
        for stage in loop.stages if loop is ours else []:
            scale_grads = stage.scale_grads

            def drafted_first(factor: int, own: Callable[[int], None] = scale_grads) -> None:
                wrapped.context.engine.idle()
                own(factor)

            stage.scale_grads = drafted_first
        for number in range(3):
            loop.run(number)
            for parameter in loop.parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(loop.num_micro_batches)
            loop.update()
    assert_same_bits(ours.left(), theirs.left())
    drafts = noria.report(ours.stages[0]).drafts
    assert drafts["changed"] == 2 * 6 and not drafts["kept"] and not drafts["unchanged"], drafts


def ties_a_parameter(early: Stage, late: Stage) -> None:
    """Its unit has others, which are one stage's alone."""
    early.blocks[1].norm.weight = late.blocks[1].norm.weight


def ties_a_block(early: Stage, late: Stage) -> None:
    early.blocks[1] = late.blocks[1]


def have_a_parameter_in_common(rank: int, size: int, policy: dict[str, Any]) -> None:
    """torch divides what two stages of one rank have in common once for each of them."""
    make_optimizer = adamw if policy.get("kernel") == "torch" else sgd
    for tie in (ties_a_parameter, ties_a_block):
        plain = Loop(None, make_optimizer, tie=tie)
        hands_on_in_memory(plain)
        for order in ((0, 1), (1, 0)):
            ours = Loop(policy, make_optimizer, tie=tie, order=order)
            hands_on_in_memory(ours)
            assert_same_bits(ours.left(), plain.left())


def wants_steps(rank: int, size: int) -> None:
    loop = Loop({"update": "backward"}, sgd)
    loop.run(0)
    with pytest.raises(noria.UsageError, match="another step of a schedule before the step"):
        loop.run(1)
    loop.update()
    loop.run(1)
    loop.optimizer.step()


def raises_after_another_stage_has_updated(rank: int, size: int) -> None:
    """In a backward of the first stage, or between two of its: the second has had its last one. Either way the weights
    are of different steps, until both are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        for fails in (in_its_backward, between_its_backwards):
            break_off_and_load(f"{folder}/stages.pt", fails)


def in_its_backward(loop: Loop, fail: Callable[..., None]) -> Callable[[], None]:
    return loop.models[0].blocks[1].register_forward_hook(hook_that_fails_in_backward(fail)).remove


def between_its_backwards(loop: Loop, fail: Callable[..., None]) -> Callable[[], None]:
    stage = loop.stages[0]
    receive = stage.set_local_bwd_input

    def failing(*args: Any, **kwargs: Any) -> None:
        fail()
        receive(*args, **kwargs)

    stage.set_local_bwd_input = failing
    return lambda: setattr(stage, "set_local_bwd_input", receive)


def break_off_and_load(path: str, fails: Callable[..., Callable[[], None]]) -> None:
    ours, plain = (Loop(policy, sgd) for policy in ({"update": "backward"}, None))
    for loop in (ours, plain):
        loop.run(0)
        loop.update()
    noria.save(path, ours.stages, ours.optimizer)
    calls: list[int] = []

    def fail(*args: Any) -> None:
        calls.append(len(calls))
        if len(calls) == ours.num_micro_batches:
            raise ValueError("no such luck")

    end = fails(ours, fail)
    with pytest.raises((RuntimeError, ValueError), match=r"ailed to run|no such luck"):
        ours.run(1)
    end()
    assert len(calls) == ours.num_micro_batches
    with pytest.raises(RuntimeError, match="weights and optimizer state are of different steps"):
        ours.optimizer.step()
    noria.load(path, ours.stages, ours.optimizer)
    ours.optimizer.zero_grad()
    ours.scheduled()  # torch's own remembers the step that was given up
    for loop in (ours, plain):
        loop.run(1)
        loop.update()
    assert_same_bits(ours.left(), plain.left())


def scales_otherwise(rank: int, size: int) -> None:
    """Than the schedule says: what updates inside backward have divided by is told, drafts are made again."""
    ours, told, plain = (Loop(policy, sgd) for policy in (POLICIES["drafts"], {"update": "backward"}, None))
    for loop in (ours, told, plain):
        for stage in loop.stages:
            stage.scale_grads = lambda factor: None
    for number in range(3):
        for loop in (ours, plain):
            loop.run(number)
            loop.update()
    assert_same_bits(ours.left(), plain.left())
    told.run(0)
    with pytest.raises(noria.UsageError, match=r"scale_grads\(3\) after .* found none"):
        told.optimizer.step()
    told.update()
    told.run(1)
    with pytest.raises(noria.UsageError, match=r"scale_grads\(3\) after .* found none"):
        told.optimizer.step()


def is_restored(rank: int, size: int) -> None:
    """After unwrap the stages are torch's own, and train on."""
    loop, plain = (Loop(policy, adamw) for policy in ({"kernel": "torch", "activations": "offload"}, None))
    before = [set(stage.__dict__) for stage in plain.stages]
    for each in (loop, plain):
        each.run(0)
        each.update()
    with noria.materialize(loop.stages[0], read_only=True) as module:
        assert module is loop.stages[0]
        assert loop.models[0].blocks[0].expand.weight.isfinite().all()
    assert any(name in loop.stages[0].__dict__ for name in FOLLOWED)
    assert noria.unwrap(loop.stages, loop.optimizer) == (loop.stages, loop.optimizer)
    assert [set(stage.__dict__) for stage in loop.stages] == before
    go_on_here(nn.ModuleList(loop.models), loop.optimizer)
    for each in (loop, plain):
        each.run(1)
        each.update()
    assert_same_bits(loop.left(), plain.left())


def saves_and_loads(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_and_load(folder)


def save_and_load(folder: str) -> None:
    ours, other = (Loop({"kernel": "torch"}, adamw) for _ in range(2))
    ours.run(0)
    ours.update()
    noria.save(f"{folder}/stages.pt", ours.stages, ours.optimizer)
    noria.load(f"{folder}/stages.pt", other.stages, other.optimizer)
    assert_same_bits(other.left(), ours.left())
    assert noria.plan(Loop(None, adamw).stages, device=DEVICE).units


def refuses(rank: int, size: int) -> None:
    def wrap(stage: Any) -> None:
        noria.wrap(stage, sgd(stage.submod.parameters()), device=DEVICE)

    def stage(device: str = DEVICE) -> Any:
        return pipelining.PipelineStage(Stage(), 0, 1, torch.device(device))

    receives_here = f"a stage that receives on {torch.empty(0).device}, where its layers compute, but found one on"
    with pytest.raises(noria.UsageError, match=receives_here):
        wrap(stage("cuda" if DEVICE == "cpu" else "cpu"))
    lacking = stage()
    without = mock.patch.object(type(lacking).__mro__[1], "scale_grads", None)
    with without, pytest.raises(noria.UsageError, match=r"torch 2\.\S+ without scale_grads\(\)"):
        wrap(lacking)
    lacking.backward_one_chunk = lambda bwd_chunk_id: None
    with pytest.raises(noria.UsageError, match=r"whose backward_one_chunk\(\) has no full_backward, last_backward"):
        wrap(lacking)
    twice = stage()
    wrap(twice)
    with pytest.raises(noria.UsageError, match="a model that is not wrapped"):
        wrap(twice)
    assert wrapped_by(twice) is wrapped_by(twice.submod) is not None


OF_TWO: dict[str, Act] = {
    f"{schedule}, {name}": (like_plain, (schedule, policy, True))
    for schedule in SCHEDULES
    if schedule != "zero-bubble"
    for name, policy in POLICIES.items()
    if schedule != "GPipe" or name in ("offloaded", "drafts", "inside backward")
}
OF_TWO |= {
    f"1F1B, {name}, not scaled": (like_plain, ("1F1B", POLICIES[name], False)) for name in ("drafts", "inside backward")
}
OF_TWO |= {
    f"{schedule} lets go, {how}": (lets_go, (schedule, how))
    for schedule in ("GPipe", "1F1B")
    for how in ("offload", "recompute")
}
OF_TWO |= {"unwrapped": (goes_on_unwrapped, ())}
OF_TWO |= {"shared": (updates_alike, ()), "room": (keeps_to_its_room, ()), "hooks": (keeps_what_the_user_has, ())}
OF_TWO |= {f"eval, {name}": (evaluates_between, (POLICIES[name],)) for name in ("drafts", "inside backward")}
OF_ONE: dict[str, Act] = {
    f"{LOOPS[which].__name__}, {name}": (goes, (which, POLICIES[name]))
    for which in range(len(LOOPS))
    for name in OF_LOOPS
}
OF_ONE |= {
    f"a parameter in common, {name}": (have_a_parameter_in_common, (POLICIES[name],))
    for name in ("torch updates", "drafts", "inside backward")
}
OF_ONE |= {
    "scaled back": (scales_back, ()),
    "wants steps": (wants_steps, ()),
    "broken off": (raises_after_another_stage_has_updated, ()),
    "scaled otherwise": (scales_otherwise, ()),
    "unwrap": (is_restored, ()),
    "misuse": (refuses, ()),
    "save": (saves_and_loads, ()),
}


@pytest.fixture(scope="module")
def of_two(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, OF_TWO))


@pytest.fixture(scope="module")
def of_one(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(1, asked_for(request, OF_ONE))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OF_TWO)
def test_followed_stages_have_the_bits_of_the_same_pipeline(of_two, name):
    assert_fine(of_two, name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "misuse" else STAGES_OF_ONE_RANK) for name in OF_ONE]
)
def test_stages_of_one_rank_have_the_bits_of_the_same_loop(of_one, name):
    assert_fine(of_one, name)
