"""After a failure inside forward, backward or an update the model goes on, with the bits of a twin that failed alike;
and a process always ends, with the exit code it would have had.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys

import noria
import pytest
import torch
from noria.wrapped import wrapped_by

from tests.device import DEVICE
from tests.journeys.pairs import Net, Side, adamw, assert_moved, both, loss_of, new_side, sgd, wrap_side

FAILURES = [ValueError, MemoryError, KeyboardInterrupt, SystemExit]


pytestmark = pytest.mark.usefixtures("one_thread")


def fail_once(failure):
    """A callable that raises when it is called first, and a list that says whether it was."""
    raised = []

    def fail(*_):
        if not raised:
            raised.append(failure)
            raise failure("on purpose")

    return fail, raised


def expect_failure(side, failure, number):
    with pytest.raises(failure, match="on purpose"):
        loss_of(side.model, number).backward()


# ---- forward -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("where", ["first block", "inside a block", "root", "head"])
@pytest.mark.parametrize("after_steps", [0, 2])
def test_a_forward_that_raises_is_forgotten(failure, where, after_steps):
    class Root(Net):
        fail = None

        def forward(self, tokens):
            out = super().forward(tokens)
            if self.fail is not None:
                self.fail()
            return out

    def journey(side: Side) -> None:
        side.train(0, after_steps)
        fail, raised = fail_once(failure)
        if where == "root":
            side.model.fail = fail
        else:
            module = {
                "first block": side.model.blocks[0],
                "inside a block": side.model.blocks[3].contract,
                "head": side.model.head,
            }[where]
            handle = module.register_forward_hook(fail)
        expect_failure(side, failure, 50)
        assert raised
        if where != "root":
            handle.remove()
        side.train(after_steps, after_steps + 3)
        if side.is_wrapped:
            passes = noria.report(side.model).passes
            learnt = {(each.phase, each.num_visits): each.times for each in passes}
            assert learnt == {("forward", 7): after_steps + 3, ("backward", 7): after_steps + 3}

    both(journey, model=Root)


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_after_a_forward_that_raised_other_calls_work_at_once(failure):
    """Not only another forward of the root: an eval pass, materialize, a checkpoint, a block by itself, step()."""

    def journey(side: Side) -> None:
        def break_forward():
            fail, _ = fail_once(failure)
            handle = side.model.blocks[2].expand.register_forward_hook(fail)
            expect_failure(side, failure, 50)
            handle.remove()

        side.train(0, 2)
        break_forward()
        with torch.no_grad():
            side.keep("eval", side.model.eval()(torch.arange(5)[None]))
        side.model.train()
        break_forward()
        side.keep("saved", next(iter(side.model.state_dict().values())))
        break_forward()
        if side.is_wrapped:
            with noria.materialize(side.model, read_only=True):
                side.keep("head", side.model.head.weight)
        else:
            side.keep("head", side.model.head.weight)
        break_forward()
        side.keep("block", side.model.blocks[1](torch.ones(1, 16)))
        break_forward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.train(2, 5)

    both(journey)


def test_an_interrupted_forward_leaves_no_mode_of_torchs_on():
    model = Net()
    noria.wrap(model, device=DEVICE, window=2)
    before = torch.overrides._get_current_function_mode()
    fail, _ = fail_once(KeyboardInterrupt)
    handle = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(torch.arange(5)[None])
    handle.remove()
    model(torch.arange(5)[None])
    assert torch.overrides._get_current_function_mode() is before


def test_ctrl_c_at_the_end_of_a_forward_is_forgotten(monkeypatch):
    """While noria itself ends the pass, when the user's own code has returned."""

    def journey(side: Side) -> None:
        side.train(0, 2)
        if side.is_wrapped:
            watch = wrapped_by(side.model).hooks.watch
            interrupt, raised = fail_once(KeyboardInterrupt)
            with monkeypatch.context() as patch:
                patch.setattr(watch, "stop", interrupt)
                expect_failure(side, KeyboardInterrupt, 50)
            assert raised
        side.model.load_state_dict(side.model.state_dict())
        side.train(2, 4)

    both(journey)


# ---- backward ----------------------------------------------------------------------------------------------


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.fail()
        return gradient, None


@pytest.mark.sampled(5)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("where", ["function", "output hook", "parameter hook", "post accumulate hook"])
@pytest.mark.parametrize("after_steps", [0, 2])
def test_a_backward_that_raises_is_forgotten_by_zero_grad(failure, where, after_steps):
    def journey(side: Side) -> None:
        side.train(0, after_steps)
        fail, raised = fail_once(failure)
        block = side.model.blocks[2]
        handle = {
            "function": lambda: block.register_forward_hook(lambda m, a, out: FailsInBackward.apply(out, fail)),
            "output hook": lambda: block.register_forward_hook(
                lambda m, a, out: out.register_hook(fail) and None if out.requires_grad else None
            ),
            "parameter hook": lambda: block.contract.weight.register_hook(fail),
            "post accumulate hook": lambda: block.contract.weight.register_post_accumulate_grad_hook(fail),
        }[where]()
        expect_failure(side, failure, 50)
        assert raised
        handle.remove()
        side.optimizer.zero_grad()
        side.train(after_steps, after_steps + 3)

    both(journey)


def test_a_failed_micro_batch_may_be_repeated_after_zero_grad():
    def journey(side: Side) -> None:
        for step in range(3):
            fail, _ = fail_once(MemoryError)
            handle = side.model.blocks[1].norm.bias.register_hook(fail)
            expect_failure(side, MemoryError, step)
            handle.remove()
            side.model.zero_grad()
            for micro in range(2):
                loss_of(side.model, 10 * step + micro).backward()
            side.keep_gradients(f"step {step}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey)


def test_a_backward_that_failed_while_another_forward_was_in_flight():
    def journey(side: Side) -> None:
        side.train(0, 2)
        first, second = loss_of(side.model, 5), loss_of(side.model, 6)
        fail, _ = fail_once(ValueError)
        handle = side.model.blocks[1].norm.bias.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            second.backward()
        handle.remove()
        side.model.zero_grad()
        first.backward()
        side.keep_gradients("first")
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.train(2, 4)

    both(journey)


# ---- updates -----------------------------------------------------------------------------------------------


def stumbling_step(failing):
    """SGD's step, which fails once on a parameter of the shape that `failing` holds."""
    original = torch.optim.SGD.step.__wrapped__

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if failing and parameter.shape == failing[0]:
                    failing.clear()
                    raise ArithmeticError("on purpose")
        return original(self, closure)

    return step


@pytest.mark.parametrize("update", ["auto", "blocking"])
def test_an_update_that_raises_surfaces_where_it_is_needed(monkeypatch, update):
    model = Net()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, update=update, kernel="torch")
    failing = []
    step = stumbling_step(failing)
    step.hooked = False
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, 3).backward()
    failing.append(model.head.weight.shape)
    with pytest.raises(ArithmeticError, match="on purpose"):
        optimizer.step()
        loss_of(model, 4)
    assert not failing
    optimizer.zero_grad()
    loss_of(model, 5).backward()
    optimizer.step()
    assert_moved(model)


@pytest.mark.parametrize("update", ["auto", "blocking"])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_an_update_that_raises_breaks_off_its_step_as_in_torch(optimizer, update):
    """What came before the parameter is updated, what comes after it is not, and training goes on."""

    def journey(side: Side) -> None:
        side.train(0, 1)
        key = "momentum_buffer" if optimizer is sgd else "exp_avg"
        state = side.optimizer.state[side.model.blocks[2].expand.bias]
        good, state[key] = state[key].clone(), torch.zeros(3, device=state[key].device)
        loss_of(side.model, 1).backward()
        with pytest.raises(RuntimeError, match=r"shape|size"):
            side.optimizer.step()
            loss_of(side.model, 2)
        assert side.optimizer.state[side.model.blocks[2].expand.bias] is state
        state[key] = good
        side.optimizer.zero_grad()
        side.train(2, 5)

    both(journey, optimizer=optimizer, update=update, moved=False)


def amsgrad_turned_on(optimizer):
    optimizer.param_groups[0]["amsgrad"] = True


def lr_a_string(optimizer):
    optimizer.param_groups[0]["lr"] = "small"


def no_betas(optimizer):
    del optimizer.param_groups[0]["betas"]


def state_of_another_optimizer(optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {number: {"step": torch.tensor(1.0)} for number in saved["state"]}
    optimizer.load_state_dict(saved)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("update", ["auto", "blocking"])
@pytest.mark.parametrize("cause", [amsgrad_turned_on, lr_a_string, no_betas, state_of_another_optimizer])
@pytest.mark.parametrize(
    "need", ["forward", "weights", "state", "load weights", "load state", "save", "unwrap", "step", "materialize"]
)
def test_an_update_that_fails_in_every_unit_is_heard_of_once_and_leaves_what_was(need, cause, update, tmp_path):
    torch.manual_seed(0)
    model = Net(2)
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, kernel="torch", window=2, update=update)
    side = Side(model, optimizer, True)
    side.train(0, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    needs = {
        "forward": lambda: loss_of(model, 4),
        "weights": model.state_dict,
        "state": optimizer.state_dict,
        "load weights": lambda: model.load_state_dict(weights),
        "load state": lambda: optimizer.load_state_dict(copy.deepcopy(saved)),
        "save": lambda: noria.save(tmp_path / "run.pt", model, optimizer),
        "unwrap": lambda: noria.unwrap(model, optimizer),
        "step": optimizer.step,
        "materialize": lambda: noria.materialize(model).__enter__(),
    }
    loss_of(model, 3).backward()
    cause(optimizer)
    with pytest.raises((KeyError, TypeError, ValueError)) as caught:
        optimizer.step()
        needs[need]()
    assert any('unit "' in note for note in caught.value.__notes__)
    noria.testing.assert_same_bits(model.state_dict(), weights)
    if need == "load state" or cause is state_of_another_optimizer:
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0].update(lr=1e-2, betas=(0.9, 0.999), amsgrad=False)
    if need not in ("step", "materialize"):
        needs[need]()
    optimizer.zero_grad()
    if need == "unwrap":
        noria.wrap(model, optimizer, device=DEVICE, kernel="torch", window=2)
    side.train(4, 6)
    assert not torch.equal(model.state_dict()["head.weight"], weights["head.weight"])


def test_an_update_that_raises_does_not_break_off_that_of_another_optimizer():
    def journey(side: Side) -> None:
        first, second = side.optimizer
        for number in range(3):
            loss_of(side.model, number).backward()
            first.param_groups[0]["lr"] = "small" if number == 1 else 1e-2
            if number == 1 and not side.is_wrapped:
                with pytest.raises(TypeError):
                    first.step()
                second.step()
            else:
                first.step()
                second.step()
            if number == 1 and side.is_wrapped:
                with pytest.raises(TypeError):
                    side.model.state_dict()
            side.keep(f"head {number}", side.model.state_dict()["head.weight"])
            side.keep(f"embedding {number}", side.model.state_dict()["embed.weight"])
            side.model.zero_grad()

    twin, side = (Side(Net(), None, wrapped) for wrapped in (False, True))
    side.model.load_state_dict(twin.model.state_dict())
    for each in (twin, side):
        halves = [each.model.embed, each.model.blocks], [each.model.head]
        each.optimizer = [adamw([p for m in half for p in m.parameters()]) for half in halves]
    noria.wrap(side.model, side.optimizer, device=DEVICE, kernel="torch", window=2)
    journey(twin)
    journey(side)
    noria.testing.assert_same_bits(side.kept, twin.kept)


# ---- the end of the process --------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
sys.modules["tabulate"] = None  # torch imports it as it exits; that runs code, and then Python forgets the interrupt
import torch, noria
from noria.testing import on_machine
from tests.device import DEVICE
from tests.journeys.pairs import LATE_UPDATES, Net, adamw, loss_of, sgd
model = Net()
optimizer = adamw(model.parameters())
with on_machine(hostility=LATE_UPDATES):
    noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="{kernel}")
for number in range(2):
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()
loss = loss_of(model, 5)
signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that runs the tests may be ignoring it
{end}
"""

ENDS = {
    "normal end": ("", 0),
    "between step and forward": ("loss.backward(); optimizer.step()", 0),
    "exception": ("raise ValueError('on purpose')", 1),
    "exception inside forward": ("model.head.register_forward_hook(lambda *_: 1 / 0)\nloss_of(model, 1)", 1),
    "exception inside backward": (
        "model.embed.weight.register_hook(lambda g: 1 / 0)\nloss_of(model, 1).backward()",
        1,
    ),
    "sys.exit": ("loss.backward(); optimizer.step(); sys.exit(7)", 7),
    "sys.exit inside forward": (
        "model.head.register_forward_hook(lambda *_: sys.exit(5))\nloss_of(model, 1)",
        5,
    ),
    "SIGINT": (
        "loss.backward(); optimizer.step(); os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
        -signal.SIGINT,
    ),
    "SIGINT inside forward": (
        "model.head.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))\nloss_of(model, 1)",
        -signal.SIGINT,
    ),
    "inside materialize": ("with noria.materialize(model): sys.exit(3)", 3),
    "in a forked child": (
        "loss.backward(); optimizer.step()\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(4)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        4,
    ),
    "in a forked child that used the model": (
        "loss.backward(); optimizer.step()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    uses = [lambda: model(torch.arange(3)[None]), optimizer.step, model.state_dict, optimizer.state_dict,\n"
        "            lambda: optimizer.state[model.head.weight], lambda: noria.materialize(model).__enter__(),\n"
        "            lambda: model.head.weight.grad.mul_(2), lambda: noria.unwrap(model, optimizer),\n"
        "            lambda: model.blocks[0](torch.ones(1, 16)), lambda: optimizer.load_state_dict({}),\n"
        "            lambda: model.load_state_dict({}, strict=False), optimizer.zero_grad]\n"
        "    refused = 0\n"
        "    for use in uses:\n"
        "        try: use()\n"
        "        except noria.UsageError as error: refused += 'forked' in str(error)\n"
        "    print('refused', refused)\n"
        "    sys.exit(len(uses) - refused)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        0,
    ),
}


ALWAYS = {
    "exception inside backward",
    "sys.exit",
    "SIGINT inside forward",
    "in a forked child that used the model",
}


@pytest.mark.parametrize(
    ("end", "kernel"),
    [
        pytest.param(end, kernel, marks=[] if end in ALWAYS and kernel == "fused" else pytest.mark.long)
        for end in ENDS
        for kernel in ("torch", "fused")
    ],
)
def test_a_process_ends_with_the_exit_code_it_would_have_had(end, kernel):
    code, expected = ENDS[end]
    paths = [os.path.dirname(os.path.dirname(noria.__file__)), "."]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=code, kernel=kernel)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    for word in ("terminate called", "Fatal", "core dumped", "Exception ignored"):
        assert word not in done.stderr, done.stderr


@pytest.mark.parametrize("steps", [0, 2])
def test_a_backward_after_unwrap_is_told_that_it_comes_too_late(steps):
    side = wrap_side(new_side(0, adamw, Net), window=2)
    side.train(0, steps)
    loss = loss_of(side.model, steps)
    noria.unwrap(side.model, side.optimizer)
    with pytest.raises(RuntimeError, match=r"backward before noria\.unwrap.*run the forward again"):
        loss.backward()
    loss_of(side.model.to(DEVICE), steps).backward()


def test_a_graph_from_before_the_wrap_is_refused_beside_one_of_the_wrapped_model():
    side = new_side(0, adamw, Net)
    old = loss_of(side.model, 0)
    wrap_side(side, window=2)
    new = loss_of(side.model, 1)
    with pytest.raises(noria.UsageError, match=r"a graph from before noria\.wrap"):
        old.backward()
    assert all(each.grad is None for each in side.model.parameters())
    del new
    side.train(1, 3)


def test_a_forked_child_may_read_what_was_unwrapped():
    """A data loader's worker that looks at a model which was wrapped once."""
    model = Net()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    loss_of(model, 0).backward()
    optimizer.step()
    noria.unwrap(model, optimizer)
    wanted = model.head.weight[0, 0].item()
    child = os.fork()
    if child == 0:
        os._exit(0 if model.head.weight[0, 0].item() == wanted and model.head.weight.grad is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
