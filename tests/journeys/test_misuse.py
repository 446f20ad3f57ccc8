"""Misuse raises at the line that caused it, with what was expected, what was found and the remedy; and it leaves the
training as it was: what follows has the bits of a twin without misuse.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import re

import noria
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from noria.testing import on_machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import device
from tests.device import DEVICE, NEEDS_FULL_HOST, NEEDS_SPARSE, not_on_a_gpu
from tests.journeys.pairs import (
    HOSTILE,
    VOCAB,
    WIDTH,
    Net,
    Side,
    adamw,
    assert_moved,
    both,
    go_on_here,
    loss_of,
    sgd,
    tokens,
)

THREE_PARTS = r"(?s)noria expected .+, but found .+\. Remedy: .+"


pytestmark = pytest.mark.usefixtures("one_thread")


def refused(*words: str, error: type[Exception] = noria.UsageError):
    """The three parts in their order, with these words somewhere."""
    together = "".join(f"(?=.*{re.escape(word)})" for word in words)
    return pytest.raises(error, match=f"(?s)^{together}.*{THREE_PARTS[4:]}")


# ---- wrap: refused before anything is changed --------------------------------------------------------------


def refused_by_wrap(make, *words, model=None, optimizer=None):
    """`make(model, optimizer)` raises in `plan` and in `wrap`; afterwards both objects train as if never touched."""
    plain = (model or Net)()
    ours = copy.deepcopy(plain)
    side, twin = (Side(each, (optimizer or adamw)(each.parameters()), False) for each in (ours, plain))
    for call in (noria.plan, noria.wrap):
        with refused(*words):
            make(call, side.model, side.optimizer)
    side.train(0, 2)
    twin.train(0, 2)
    noria.testing.assert_same_bits(side.kept, twin.kept)
    noria.testing.assert_same_bits(side.model.state_dict(), twin.model.state_dict())
    assert type(side.optimizer) is type(twin.optimizer)


def test_a_window_too_small_for_what_one_module_needs_at_once():
    class Tied(Net):
        """The head uses the embedding's weight: two units at once, and a third that its block shares."""

        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.first, block.second = self.embed, self.head

    refused_by_wrap(
        lambda call, m, o: call(m, o, device=DEVICE, window=2),
        "a window of at least 3 units",
        "window=3",
        model=Tied,
    )
    model = Tied()
    noria.wrap(model, device=DEVICE, window=3)


class Positions(Net):
    """The root has a weight of its own, beside its blocks."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(("kind", "largest"), [(Net, ""), (Positions, "blocks.0")])
def test_a_budget_too_small_says_what_would_fit_and_that_fits(kind, largest):
    model = kind()
    with pytest.raises(noria.UsageError) as caught:
        noria.plan(model, adamw(model.parameters()), device=DEVICE, device_memory=1024)
    least = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
    for too_small in (1024, least - 1):
        refused_by_wrap(
            lambda call, m, o, too_small=too_small: call(m, o, device=DEVICE, device_memory=too_small),
            f"({least} bytes)",
            f"the largest unit is {largest}",
            model=kind,
        )
    both(lambda side: side.train(0, 3), model=kind, device_memory=least, window=None)


@NEEDS_FULL_HOST
def test_a_host_budget_too_small_says_what_would_fit_and_that_fits():
    model = Net()
    with pytest.raises(noria.UsageError) as caught:
        noria.plan(model, adamw(model.parameters()), device=DEVICE, host_memory=1024)
    least = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
    refused_by_wrap(
        lambda call, m, o: call(m, o, device=DEVICE, host_memory=least - 1),
        f"({least} bytes)",
        "working copies",
    )
    both(lambda side: side.train(0, 3), host_memory=least)


def test_an_optimizer_with_parameters_that_no_wrapped_model_has():
    stranger = nn.Linear(3, 3)
    refused_by_wrap(
        lambda call, m, o: call(m, o, device=DEVICE),
        "belong to the wrapped models",
        "(3, 3)",
        optimizer=lambda parameters: adamw([*parameters, *stranger.parameters()]),
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 1}, ["2 units or more"]),
        ({"window": 2.5}, ["window="]),
        ({"window": 2**31}, ["2**31", "window="]),
        ({"device_memory": "8 bananas"}, ["device_memory="]),
        ({"device_memory": -1}, ["device_memory="]),
        ({"device_memory": 1.5}, ["device_memory="]),
        ({"host_memory": 0.5}, ["host_memory="]),
        ({"units": []}, ["units="]),
        ({"units": ["*.no_such_module"]}, ["no_such_module"]),
        ({"dtype": torch.float16}, ["dtype="]),
        ({"kernel": "fastest"}, ["kernel="]),
        ({"activations": "sometimes"}, ["activations="]),
        ({"activation_memory": "1GiB"}, ['activations="auto"']),
        ({"check": True}, ["check="]),
        ({"trace": 3}, ["trace="]),
        ({"trace": "/no such folder/trace.json"}, ["trace='/no such folder/trace.json'", "make the folder first"]),
        ({"trace": "/"}, ["the folder '/'"]),
        ({"device": "tpu"}, ["device="]),
        ({"device_memroy": "1GiB"}, ["device_memroy", "did you mean 'device_memory'?"]),
        ({"optimizer": 3}, ["optimizer=3"]),
    ],
    ids=lambda value: ",".join(map(str, value)),
)
def test_nonsense_in_the_policy(fields, words):
    refused_by_wrap(lambda call, m, o: call(m, o, **{"device": DEVICE, **fields}), *words)


@pytest.fixture
def group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.skipif(DEVICE != "cpu", reason="gloo has no collectives for the pretend GPU")
def test_a_wrapped_model_in_data_parallel():
    model = Net()
    _, optimizer = noria.wrap(model, adamw(model.parameters()), device=DEVICE)
    with refused("a wrapped model without DistributedDataParallel around it", "leave it out"):
        DistributedDataParallel(model)
    with refused("DistributedDataParallel"):
        DistributedDataParallel(model.blocks[0])
    assert copy.deepcopy(model)._ddp_params_and_buffers_to_ignore == []
    model.new = DistributedDataParallel(nn.Linear(2, 2))
    with refused("DistributedDataParallel in it"):
        optimizer.add_param_group({"params": model.new.parameters()})
    del model.new
    loss_of(model, 0).backward()  # it trains on
    noria.unwrap(model)
    loss_of(DistributedDataParallel(model), 0).backward()


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda held: torch.optim.AdamW(held, foreach=False),
        lambda held: torch.optim.AdamW(held, fused=True),
        lambda held: torch.optim.SGD(held, lr=0.1, weight_decay=0.1),
        lambda held: torch.optim.Adam(held, weight_decay=0.1, foreach=False),
    ],
    ids=["AdamW", "AdamW, a loop", "AdamW, fused", "SGD", "Adam, a loop"],
)
def test_an_optimizer_that_is_made_after_wrap(make, monkeypatch):
    monkeypatch.setattr(device, "steps_at_home", False)
    model = Net()
    noria.wrap(model, adamw(model.parameters()), device=DEVICE)
    loss_of(model, 0).backward()
    optimizer = make(model.parameters())
    with refused(
        "is evicted", f"{type(optimizer).__name__}.step() about to use it", "give this optimizer to noria.wrap"
    ):
        optimizer.step()


def test_a_read_inside_of_a_pass_names_the_module_and_one_after_it_names_materialize():
    model = Net()
    noria.wrap(model, adamw(model.parameters()), device=DEVICE, window=2)
    loss_of(model, 0).backward()
    weight = model.blocks[3].expand.weight
    reads = model.blocks[0].register_forward_hook(lambda *_: weight.sum() and None)
    with refused('"blocks.3"', "call the module that holds it", error=RuntimeError):
        loss_of(model, 1)
    reads.remove()
    loss_of(model, 2).backward()
    with refused('"blocks.3"', "is evicted: use noria.materialize", error=RuntimeError) as caught:
        weight.sum()
    assert "call the module that holds it" not in str(caught.value)


@pytest.mark.parametrize("make", [adamw, lambda held: torch.optim.LBFGS(held)], ids=["AdamW", "LBFGS"])
def test_a_closure_that_writes_weights_is_not_taken_for_an_optimizer(make):
    model = Net()
    _, optimizer = noria.wrap(model, make(model.parameters()), device=DEVICE)

    def closure():
        model.head.weight.data.mul_(2)

    with refused("read and edit parameters inside `with noria.materialize(model):`", error=RuntimeError):
        optimizer.step(closure)


def test_things_that_are_no_models_and_no_optimizers():
    model = Net()
    for wrong in ("model", None, [model, 3], []):
        with refused("torch.nn.Module"):
            noria.wrap(wrong, device=DEVICE)
    with refused("torch.optim.Optimizer"):
        noria.wrap(model, model.parameters(), device=DEVICE)
    with refused("a model with parameters"):
        noria.wrap(nn.ReLU(), device=DEVICE)
    with refused("a policy or fields of one, not both"):
        noria.wrap(model, None, noria.Policy(), device=DEVICE)


def test_parameters_that_cannot_move():
    def check(model, *words):
        with refused(*words):
            noria.wrap(model, device=DEVICE)

    check(nn.LazyLinear(3), "not initialised")
    shared = nn.Module()
    shared.first = nn.Parameter(torch.zeros(8))
    shared.second = nn.Parameter(shared.first.data[2:6])
    shared.forward = lambda: None
    check(shared, "share no memory")


def test_what_an_optimizer_may_not_be():
    model = Net()
    with refused("SparseAdam"):
        noria.wrap(model, torch.optim.SparseAdam(model.parameters()), device=DEVICE)
    with refused("differentiable"):
        noria.wrap(model, adamw(model.parameters(), differentiable=True), device=DEVICE)
    optimizer = adamw(model.parameters())
    optimizer.step = lambda: None
    with refused("replaced on the object"):
        noria.wrap(model, optimizer, device=DEVICE)


def test_a_module_compiled_for_cuda_graphs_is_refused():
    for compiled in ("inside", "in place", "around"):
        model = Net()
        if compiled == "inside":
            model.blocks[1] = torch.compile(model.blocks[1], mode="reduce-overhead")
        elif compiled == "in place":
            model.blocks[1].compile(mode="reduce-overhead")
        else:
            model = torch.compile(model, mode="reduce-overhead")
        with refused("reduce-overhead", "bake the addresses"):
            noria.wrap(model, device=DEVICE, window=2)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_a_model_under_data_parallel(inside):
    """What trainers make of a model if a process has several devices."""
    model = nn.DataParallel(Net())
    with refused("a plain model", "one with DataParallel in it"):
        noria.wrap(nn.Sequential(model) if inside else model, device=DEVICE)


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model = Net()
    with refused('"embed.weight" made in torch.inference_mode', "outside"):
        noria.wrap(model, device=DEVICE)


def accelerated(optimizer, scaler=None):
    AcceleratorState._reset_state(reset_partial_state=True)  # of the process, which other tests may have made
    Accelerator(cpu=True)
    return AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)


@pytest.mark.parametrize("is_given", [False, True], ids=["made from a wrapped one", "given to wrap"])
def test_accelerates_optimizer_is_seen_through(is_given, tmp_path):
    plain = Side(Net(), None, False)
    ours = Side(copy.deepcopy(plain.model), None, True)
    plain.optimizer = adamw(plain.model.parameters())
    optimizer = adamw(ours.model.parameters())
    ours.optimizer = accelerated(optimizer) if is_given else optimizer
    with on_machine(hostility=HOSTILE):
        model, returned = noria.wrap(ours.model, ours.optimizer, device=DEVICE, window=2, kernel="torch")
    assert model is ours.model and returned is ours.optimizer
    if not is_given:
        ours.optimizer = accelerated(optimizer)
    for side in (plain, ours):
        side.train(0, 3)
    noria.save(tmp_path / "run.pt", ours.model, ours.optimizer)
    for side in (plain, ours):
        side.train(3, 5)
    noria.testing.assert_same_bits(ours.kept, plain.kept)
    noria.testing.assert_same_bits(ours.model.state_dict(), plain.model.state_dict())
    noria.load(tmp_path / "run.pt", ours.model, ours.optimizer)
    ours.kept.clear()
    ours.train(3, 5)
    noria.testing.assert_same_bits(ours.model.state_dict(), plain.model.state_dict())
    with refused("an optimizer that is not wrapped"):
        noria.wrap(Net(), ours.optimizer, device=DEVICE)


def test_accelerates_optimizer_that_keeps_methods_for_a_scaler():
    model = Net()
    optimizer = accelerated(adamw(model.parameters()), torch.amp.GradScaler(DEVICE))
    with refused("one (AcceleratedOptimizer) that has kept some", "before the AcceleratedOptimizer is made"):
        noria.wrap(model, optimizer, device=DEVICE)
    assert not noria.is_wrapped(model)


# ---- after wrap: refused, and training goes on -------------------------------------------------------------


def undisturbed(misuse, **options):
    """Trains, misuses on the wrapped side only, trains on: the bits are those of the twin without misuse."""

    def journey(side: Side) -> None:
        side.train(0, 2)
        if side.is_wrapped:
            misuse(side)
        side.train(2, 5)

    both(journey, **options)


def test_what_is_wrapped():
    model = Net()
    optimizer = adamw(model.parameters())
    assert not noria.is_wrapped(model)
    noria.wrap(model, optimizer, device=DEVICE)
    assert noria.is_wrapped(model) and noria.is_wrapped(model.blocks[1])
    assert not noria.is_wrapped(optimizer) and not noria.is_wrapped(nn.Sequential(model))
    noria.unwrap(model, optimizer)
    assert not noria.is_wrapped(model)


def test_wrapping_twice():
    def misuse(side):
        with refused("not wrapped"):
            noria.wrap(side.model, device=DEVICE)
        with refused("not wrapped"):
            noria.wrap(side.model.blocks[0], device=DEVICE)
        with refused("not wrapped"):
            noria.wrap(Net(), side.optimizer, device=DEVICE)

    undisturbed(misuse)


CASTS = [
    lambda model: model.to(torch.float64),
    lambda model: model.half(),
    lambda model: model.blocks[2].bfloat16(),
    lambda model: nn.Sequential(model).double(),
    lambda model: model.type(torch.float16),
]


@pytest.mark.parametrize("cast", CASTS, ids=["to(float64)", "half", "a block's bfloat16", "around it", "type"])
@pytest.mark.parametrize("inside", [False, True], ids=["", "in materialize"])
def test_a_cast(cast, inside):
    def misuse(side):
        where = noria.materialize(side.model) if inside else contextlib.nullcontext()
        with where, refused("no change of dtype after noria.wrap", "dtype=torch.bfloat16"):
            cast(side.model)

    undisturbed(misuse)


def test_a_move_to_another_device():
    def misuse(side):
        with refused(f"a model that stays on {DEVICE}", "meta"):
            side.model.to("meta")
        with refused("meta"):
            nn.Sequential(side.model.blocks[0]).to_empty(device="meta")

    undisturbed(misuse)


@pytest.mark.cpu_only("memory of a device is always shared, says torch")
def test_sharing_the_models_memory():
    def misuse(side):
        with refused("share_memory", "noria.unwrap"):
            side.model.share_memory()

    undisturbed(misuse)


def test_changing_the_shape_of_a_parameter():
    """As transformers' resize_token_embeddings does."""

    def misuse(side):
        grown = nn.Parameter(torch.zeros(VOCAB + 5, WIDTH, device=DEVICE))
        weight = side.model.embed.weight
        with noria.materialize(side.model):
            weight.data = grown.data
        with refused("embed.weight", "another shape", "noria.unwrap"):
            loss_of(side.model, 50)
        side.optimizer.zero_grad()

    undisturbed(misuse)


def test_replacing_the_data_of_a_parameter():
    def misuse(side):
        side.model.head.weight.data = torch.zeros_like(side.model.head.weight, device=DEVICE)
        with refused("where noria.wrap put it", "materialize"):
            loss_of(side.model, 50)
        side.optimizer.zero_grad()

    undisturbed(misuse)


@pytest.mark.cpu_only("numpy has no device memory")
@pytest.mark.parametrize("num_looks", [0, 2, 5])
def test_writing_by_an_address_after_looks_that_were_harmless(num_looks):
    """No callback hears such writes. The bytes are compared at each visit, also after harmless looks."""

    def misuse(side):
        block = side.model.blocks[1]
        for number in range(num_looks + 1):

            def look(module, args, number=number):
                values = module.expand.weight.detach().numpy()
                if number == num_looks:
                    values[0] = 7.0

            handle = block.register_forward_pre_hook(look)
            is_found = refused("blocks.1", "materialize") if number == num_looks else contextlib.nullcontext()
            with is_found, torch.no_grad():
                loss_of(side.model, 50)
            handle.remove()

    undisturbed(misuse)


def test_moving_the_model_where_it_is_changes_nothing():
    def misuse(side):
        side.model.to(DEVICE)
        side.model.float()
        nn.Sequential(side.model).to(DEVICE, torch.float32)
        side.model.cuda() if DEVICE == "cuda" else side.model.cpu()

    undisturbed(misuse)


def test_a_move_to_the_cpu_leaves_the_model_as_it_is():
    """As frameworks make it when they are done."""

    class Buffered(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

    def misuse(side):
        assert nn.Sequential(side.model).cpu()[0] is side.model
        assert {each.device.type for each in side.model.buffers()} == {DEVICE}

    undisturbed(misuse, model=Buffered)


def test_buffers_and_what_was_added_after_the_wrap_follow_a_change():
    model = noria.wrap(Net(), device=DEVICE)
    model.register_buffer("count", torch.zeros(3))
    model.extra = nn.Parameter(torch.zeros(3))
    model.to(DEVICE)
    assert model.count.device.type == model.extra.device.type == DEVICE
    copied = copy.deepcopy(noria.unwrap(model)).double()
    assert {each.dtype for each in copied.state_dict().values()} == {torch.float64}
    assert "_apply" not in vars(model)


def test_copies_of_a_wrapped_model_move_by_themselves():
    model = noria.wrap(Net(), device=DEVICE)
    with noria.materialize(model):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert not noria.is_wrapped(other)
        other.double().half()
        assert {each.dtype for each in other.parameters()} == {torch.float16}
    with refused("no change of dtype"):
        model.half()
    noria.wrap(copied.float(), device=DEVICE)
    with refused("no change of dtype"):
        copied.half()


def test_another_memory_format():
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = noria.wrap(Images(), device=DEVICE)
    with refused("memory format", "before noria.wrap"):
        model.to(memory_format=torch.channels_last)
    model.to(DEVICE, torch.float32)
    model(torch.ones(1, 3, 4, 4)).sum().backward()


def test_load_state_dict_that_assigns():
    def misuse(side):
        with refused("assign=True"):
            side.model.load_state_dict(copy.deepcopy(side.model.state_dict()), assign=True)

    undisturbed(misuse)


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p + 1,
        lambda p: p.sum().item(),
        pytest.param(lambda p: p.detach().numpy(), marks=pytest.mark.cpu_only("numpy has no device memory")),
        lambda p: p.tolist(),
        lambda p: print(p),
        lambda p: p.data.clone(),
        lambda p: p.data.mul_(2),
        lambda p: nn.init.zeros_(p),
        lambda p: p.data_ptr(),
        lambda p: copy.deepcopy(p),
        lambda p: p.to(torch.float64),
        lambda p: p.view(-1)[0].item(),
        lambda p: torch.save(p, os.devnull),
    ],
    ids=range(13),
)
def test_using_an_evicted_parameter(read):
    def misuse(side):
        parameter = side.model.blocks[2].expand.weight
        with refused("blocks.2", "is evicted: use noria.materialize", error=RuntimeError):
            read(parameter)
        assert parameter.shape == (32, 16) and parameter.dtype is torch.float32
        assert "blocks.2" in dict(side.model.named_modules())

    undisturbed(misuse)


@pytest.mark.parametrize("compiled", ["inside", "in place", "around"])
def test_cuda_graphs_that_are_asked_for_after_the_wrap(compiled):
    def misuse(side):
        model = side.model.blocks[1] if compiled == "inside" else side.model
        around = torch.compile(model, mode="reduce-overhead") if compiled == "around" else side.model
        if compiled != "around":
            model.compile(mode="reduce-overhead")
        for _ in range(2):
            with refused("reduce-overhead", "bake the addresses"):
                loss_of(around, 50)
        model._compiled_call_impl = None

    undisturbed(misuse)


def test_gradients_by_autograd_grad():
    def misuse(side):
        with refused("loss.backward()", "torch.autograd.grad", "blocks.1.norm.weight"):
            torch.autograd.grad(loss_of(side.model, 50), [side.model.blocks[1].norm.weight])
        with refused("torch.autograd.grad"):
            torch.autograd.grad(loss_of(side.model, 50), list(side.model.parameters()), allow_unused=True)
        side.optimizer.zero_grad()

    undisturbed(misuse)


def test_a_backward_that_makes_a_graph():
    def misuse(side):
        with refused("create_graph=True"):
            loss_of(side.model, 50).backward(create_graph=True)
        side.optimizer.zero_grad()

    undisturbed(misuse)


def test_a_transform_of_torch_func_around_a_pass():
    """Such a backward always makes a graph; and torch forbids hooks on saved tensors there, also noria's own."""

    def misuse(side):
        def logits(weights):
            return torch.func.functional_call(side.model, weights, (tokens(50),)).sum()

        side.model.eval()
        with torch.no_grad():
            loss_of(side.model, 50)  # torch updates nothing inside of a transform
        with refused("create_graph=True"):
            torch.func.grad(logits)(dict(side.model.named_parameters()))
        side.model.train()

    undisturbed(misuse)


def test_materialize_inside_a_pass_and_a_forward_inside_materialize():
    def misuse(side):
        def look(*_):
            with noria.materialize(side.model):
                pass

        for register in (
            side.model.blocks[2].register_forward_pre_hook,
            side.model.register_forward_pre_hook,
            side.model.blocks[2].expand.weight.register_hook,
        ):
            handle = register(look)
            with refused("materialize", "inside a forward or backward pass"):
                loss_of(side.model, 50).backward()
            handle.remove()
            side.optimizer.zero_grad()
        with noria.materialize(side.model), refused("inside `with noria.materialize"):
            loss_of(side.model, 50)
        with noria.materialize(side.model.blocks[1]), refused("inside `with noria.materialize"):
            side.model.blocks[1](torch.ones(1, 16))
        with refused("a wrapped model", "NoneType"), noria.materialize(None):
            pass
        with refused("a wrapped model"), noria.materialize(Net()):
            pass

    undisturbed(misuse)


def test_a_write_under_read_only_is_kept_and_complained_of():
    def journey(side):
        side.train(0, 2)
        if side.is_wrapped:
            with (
                refused("no writes", "read_only=True", "blocks.1.norm.weight"),
                noria.materialize(side.model, read_only=True),
                torch.no_grad(),
            ):
                side.model.blocks[1].norm.weight.mul_(2)
        else:
            with torch.no_grad():
                side.model.blocks[1].norm.weight.mul_(2)
        side.train(2, 4)

    both(journey)


def test_unfreezing_for_a_pass_without_gradients():
    """As peft does to compare adapters: it makes those of the other one trainable, and back."""

    def make():
        model = Net()
        model.blocks[1].requires_grad_(False)
        return model

    def journey(side):
        side.train(0, 2)
        side.model.blocks[1].requires_grad_(True)
        with torch.no_grad():
            side.keep("loss without gradients", loss_of(side.model, 50))
        side.model.blocks[1].requires_grad_(False)
        side.train(2, 4)

    both(journey, model=make)


def test_unfreezing_inside_of_a_forward():
    def make():
        model = Net()
        model.blocks[1].requires_grad_(False)
        return model

    def misuse(side):
        unfreezes = side.model.blocks[0].register_forward_hook(
            lambda *_: side.model.blocks[1].requires_grad_() and None
        )
        with refused("frozen, as it was when the model was wrapped", "blocks.1", "unfreeze"):
            loss_of(side.model, 50)
        unfreezes.remove()
        side.model.blocks[1].requires_grad_(False)
        side.optimizer.zero_grad()

    undisturbed(misuse, model=make)


@NEEDS_SPARSE
def test_sparse_gradients():
    def make():
        model = Net()
        model.embed = nn.Embedding(23, 16, sparse=True)
        return model

    def misuse(side):
        with refused("a dense gradient", "a sparse one", "sparse=False"):
            loss_of(side.model, 50).backward()
        side.optimizer.zero_grad()

    model = make()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="torch")
    misuse(Side(model, optimizer, True))


@NEEDS_SPARSE
@pytest.mark.parametrize(
    "policy", [{"kernel": "torch"}, {"kernel": "fused"}, {"kernel": "fused", "max_grad_norm": 1.0}]
)
def test_a_sparse_gradient_of_the_users_own(policy):
    def misuse(side):
        loss_of(side.model, 50).backward()
        side.model.embed.weight.grad = torch.zeros(side.model.embed.weight.shape).to_sparse()
        with refused("a dense gradient", "embed.weight", "to_dense"):
            side.optimizer.step()
        side.optimizer.zero_grad()

    undisturbed(misuse, **policy)


def test_an_in_place_write_to_a_parameter_inside_forward():
    def misuse(side):
        def write(module, args):
            with torch.no_grad():
                module.norm.weight.mul_(2)

        handle = side.model.blocks[2].register_forward_pre_hook(write)
        with refused("an in-place write", "blocks.2.norm.weight", "materialize"):
            loss_of(side.model, 50).backward()
        handle.remove()
        side.optimizer.zero_grad()

    undisturbed(misuse)


def test_a_parameter_group_of_strangers():
    def misuse(side):
        with refused("belong to the wrapped models"):
            side.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
        side.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
        loss_of(side.model, 50).backward()
        with refused("belong to the wrapped models"):
            side.optimizer.step()
        side.optimizer.param_groups[0]["params"].pop()
        side.optimizer.zero_grad()

    undisturbed(misuse)


@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_a_parameter_group_that_is_none_raises_as_in_torch(kernel):
    def what_comes_of(optimizer, group):
        with pytest.raises((TypeError, KeyError)) as caught:
            optimizer.add_param_group(group)
        return type(caught.value), str(caught.value)

    groups = [
        None,
        3,
        {},
        {"params": None},
        {"params": "x"},
        {"params": [3]},
        {"params": {nn.Parameter(torch.ones(1))}},
    ]
    plain = adamw(Net().parameters())
    wanted = [what_comes_of(plain, group) for group in copy.deepcopy(groups)]

    def misuse(side):
        assert [what_comes_of(side.optimizer, group) for group in groups] == wanted

    undisturbed(misuse, kernel=kernel)


def test_step_and_zero_grad_inside_of_a_backward():
    def misuse(side):
        for call in (side.optimizer.step, side.optimizer.zero_grad):
            handle = side.model.blocks[2].norm.weight.register_post_accumulate_grad_hook(lambda p, call=call: call())
            with refused("after backward()", "in a hook"):
                loss_of(side.model, 50).backward()
            handle.remove()
            side.optimizer.zero_grad()

    undisturbed(misuse)


def test_another_optimizer_that_steps_a_wrapped_parameter():
    stranger = []

    def misuse(side):
        other = torch.optim.SGD([side.model.head.weight], lr=1.0)
        loss_of(side.model, 50).backward()
        with refused("is evicted", error=RuntimeError):
            other.step()
        side.optimizer.zero_grad()

    undisturbed(misuse)
    assert not stranger


def test_a_gradient_on_a_parameter_that_was_frozen():
    def make():
        model = Net()
        model.embed.requires_grad_(False)
        return model

    def misuse(side):
        loss_of(side.model, 50).backward()
        side.model.embed.weight.grad = torch.ones(23, 16)
        with refused("no gradient on", "embed.weight"):
            side.optimizer.step()
        side.optimizer.zero_grad()

    undisturbed(misuse, model=make)


def test_hyperparameters_that_the_kernel_does_not_cover():
    def misuse(side):
        side.optimizer.param_groups[0]["amsgrad"] = True
        loss_of(side.model, 50).backward()
        with refused("amsgrad", 'kernel="torch"'):
            side.optimizer.step()
        side.optimizer.param_groups[0]["amsgrad"] = False
        side.optimizer.zero_grad()

    undisturbed(misuse, kernel="fused")


def in_two_groups(parameters):
    parameters = list(parameters)
    return adamw([{"params": parameters[::2]}, {"params": parameters[1::2]}])


NO_NUMBERS = {
    "lr": [None, "0.1", 1j, torch.ones(2)],
    "betas": [None, 0.9, (0.9, 0.9, 0.9), (0.9, "x")],
    "eps": ["missing"],
    "weight_decay": ["x"],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", [{"draft_memory": 0}, {"draft_memory": "64MiB"}, {"update": "blocking"}])
@pytest.mark.parametrize("before_forward", [False, True])
@pytest.mark.parametrize(("key", "values"), NO_NUMBERS.items())
def test_hyperparameters_that_are_no_numbers_are_found_before_anything_is_updated(key, values, before_forward, policy):
    def misuse(side):
        group = side.optimizer.param_groups[1]
        good = group[key]
        for value in values:
            if not before_forward:
                loss_of(side.model, 50).backward()
            if value == "missing":
                del group[key]
            else:
                group[key] = value
            if before_forward:
                loss_of(side.model, 50).backward()
            with refused(f'under "{key}"', "in group 1"):
                side.optimizer.step()
            group[key] = good
            side.optimizer.zero_grad()

    undisturbed(misuse, optimizer=in_two_groups, kernel="fused", moved=False, **policy)


@pytest.mark.parametrize("step", [torch.tensor(float("nan")), "5", None, torch.tensor(-3.0)])
def test_a_count_of_steps_that_is_none_is_found_before_anything_is_updated(step):
    def misuse(side):
        state = side.optimizer.state[side.model.head.bias]
        good, state["step"] = state["step"], step
        loss_of(side.model, 50).backward()
        with refused("head.bias", '"step"'):
            side.optimizer.step()
        state["step"] = good
        side.optimizer.zero_grad()

    undisturbed(misuse, kernel="fused")


def test_deepcopy_of_a_wrapped_optimizer():
    def misuse(side):
        with refused(error=RuntimeError):
            copy.deepcopy(side.optimizer)

    undisturbed(misuse)


def test_saving_a_wrapped_module_as_a_whole():
    def misuse(side):
        with refused(error=RuntimeError):
            torch.save(side.model, os.devnull)

    undisturbed(misuse)


def test_loading_what_is_no_checkpoint(tmp_path):
    model = Net()
    noria.wrap(model, device=DEVICE)
    before = copy.deepcopy(dict(model.state_dict()))
    (tmp_path / "text").write_text("weights of the second run")
    (tmp_path / "nothing").touch()
    (tmp_path / "folder").mkdir()
    torch.save(3, tmp_path / "number")
    torch.save({"model": 3}, tmp_path / "number inside")
    for name, words in {
        "text": ["a checkpoint of one file"],
        "nothing": ["a checkpoint of one file"],
        "number": ["a checkpoint of one file", "one int"],
        "number inside": ["'model' in", "found int"],
        "folder": ["torch.distributed.checkpoint.save", ".metadata"],
    }.items():
        with refused(str(tmp_path / name), *words):
            noria.load(tmp_path / name, model)
    with pytest.raises(FileNotFoundError):
        noria.load(tmp_path / "not there", model)
    noria.testing.assert_same_bits(dict(model.state_dict()), before)


def test_unwrapping_what_was_not_wrapped_or_not_all_of_it():
    first, second, third = Net(), Net(), Net()
    with refused("a wrapped model"):
        noria.unwrap(first)
    noria.wrap([first, second], device=DEVICE)
    with refused("all models of the wrap call"):
        noria.unwrap(first)
    for call in (noria.unwrap, noria.report, lambda given: noria.materialize(given).__enter__()):
        with refused("a wrapped model", "found Net"):
            call([first, third])
    noria.wrap(third, device=DEVICE)
    for call in (noria.unwrap, noria.report, lambda given: noria.materialize(given).__enter__()):
        with refused("models of one noria.wrap call"):
            call([first, second, third])
    noria.unwrap([first, second])
    with refused("a wrapped model"):
        noria.report(first)
    with refused("a wrapped model"), noria.materialize(first):
        pass


def test_unwrap_without_the_optimizer_leaves_no_dead_optimizer():
    model = Net()
    optimizer = adamw(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, optimizer, device=DEVICE, window=2)
    side = Side(model, optimizer, True)
    side.train(0, 2)
    assert_moved(model)
    noria.unwrap(model)
    go_on_here(model, optimizer)
    side.train(2, 4)
    assert type(optimizer) is torch.optim.AdamW


def test_a_data_loader_worker_that_leaves_the_model_alone_works():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.full((3,), index, device="cpu")

    def journey(side):
        loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        loss_of(side.model, 0).backward()
        side.optimizer.step()
        for number, batch in enumerate(loader):
            side.keep(f"batch {number}", batch)
            side.optimizer.zero_grad()
            loss_of(side.model, number).backward()
            side.optimizer.step()

    both(journey, kernel="fused")


def test_a_write_that_no_version_counter_sees_is_refused_and_dropped():
    def misuse(side):
        def clamp(module, args):
            module.expand.weight.data.clamp_(-0.01, 0.01)

        handle = side.model.blocks[2].register_forward_pre_hook(clamp)
        with refused("an in-place write"):
            loss_of(side.model, 50)
        handle.remove()
        side.optimizer.zero_grad()

    undisturbed(misuse)


def test_new_data_inside_materialize_is_taken_home():
    def journey(side):
        side.train(0, 2)
        new = torch.full((VOCAB,), 0.5)
        if side.is_wrapped:
            with noria.materialize(side.model):
                side.model.head.bias.data = new
        else:
            side.model.head.bias.data = new
        side.train(2, 4)

    both(journey)


class SquareNet(Net):
    """With a weight that is a matrix of the same shape when it is transposed."""

    def __init__(self):
        super().__init__()
        self.square = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.square(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@not_on_a_gpu("products with a matrix that lies otherwise have other bits there")
def test_weights_that_are_exchanged_or_transposed_inside_materialize_are_so_at_home():
    def journey(side):
        side.train(0, 2)
        with noria.materialize(side.model) if side.is_wrapped else contextlib.nullcontext():
            for each in zip(*(block.parameters() for block in side.model.blocks), strict=True):
                for parameter, data in zip(each, [other.data for other in each[1:] + each[:1]], strict=True):
                    parameter.data = data
            norm = side.model.blocks[0].norm
            norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data
            side.model.square.weight.data = side.model.square.weight.data.t()
        side.train(2, 4)

    both(journey, model=SquareNet)


def test_weights_are_exchanged_across_nested_blocks_of_materialize():
    def journey(side):
        side.train(0, 2)
        first, second = (block.norm.weight for block in side.model.blocks[:2])
        with contextlib.ExitStack() as stack:
            if side.is_wrapped:
                stack.enter_context(noria.materialize(side.model))
                stack.enter_context(noria.materialize(side.model.blocks[0]))
            first.data, second.data = second.data, first.data
        side.train(2, 4)

    both(journey)


class NetWithNothing(Net):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, tokens):
        return super().forward(tokens) + self.nothing.sum()


def test_a_weight_without_elements_may_be_given_new_data_inside_materialize():
    def journey(side):
        side.train(0, 2)
        with noria.materialize(side.model) if side.is_wrapped else contextlib.nullcontext():
            for parameter in side.model.parameters():
                parameter.data = parameter.data.clone()
        side.train(2, 4)

    both(journey, model=NetWithNothing)


def test_weights_that_are_exchanged_between_passes_are_refused():
    def misuse(side):
        norm = side.model.blocks[0].norm
        norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data
        with refused("its data replaced", "blocks.0.norm.weight"):
            loss_of(side.model, 9)
        with refused("its data replaced", "blocks.0.norm.bias"):
            loss_of(side.model, 9)

    undisturbed(misuse)


def test_weights_that_are_given_the_same_memory_inside_materialize_are_refused():
    def journey(side):
        side.train(0, 2)
        first, second = (block.norm.weight for block in side.model.blocks[:2])
        if side.is_wrapped:
            with (
                refused("share no memory", "blocks.0.norm.weight", "blocks.1.norm.weight"),
                noria.materialize(side.model),
            ):
                second.data = first.data
        else:
            second.data = first.data.clone()
        side.train(2, 4)

    both(journey)


def test_a_hidden_write_under_read_only_makes_device_copies_stale():
    def journey(side):
        side.train(0, 2)
        loss_of(side.model, 3)
        context = noria.materialize(side.model, read_only=True) if side.is_wrapped else contextlib.nullcontext()
        with context:
            side.model.head.weight.data.mul_(3.0)
        side.keep("loss", loss_of(side.model, 4))

    both(journey, window=None, moved=False)


@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_a_hidden_write_under_read_only_reaches_the_master(kernel):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # writes what the master is
    noria.wrap(model, optimizer, device=DEVICE, window=2, dtype=torch.bfloat16, kernel=kernel)

    def step():
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with noria.materialize(model, read_only=True):
        model.head.weight.data.fill_(0.75)
    step()
    with noria.materialize(model, read_only=True):
        assert (model.head.weight == 0.75).all()
    noria.unwrap(model, optimizer)


def test_every_hidden_write_inside_of_a_forward_is_found():
    """However often something has asked for the address before, as compiled code does at each visit."""

    def misuse(side):
        def ask(module, args):
            module.expand.weight.data_ptr()

        def write(module, args):
            module.expand.weight.data.add_(1)

        handle = side.model.blocks[1].register_forward_pre_hook(ask)
        for _ in range(20):
            loss_of(side.model, 50)
        handle.remove()
        handle = side.model.blocks[1].register_forward_pre_hook(write)
        for _ in range(20):
            with refused("an in-place write to a parameter of blocks.1"):
                loss_of(side.model, 50)
        handle.remove()

    undisturbed(misuse)


def test_training_goes_on_only_after_materialize():
    def misuse(side):
        loss = loss_of(side.model, 50)
        with noria.materialize(side.model):
            with refused("inside `with noria.materialize"):
                loss.backward()
            with refused("inside `with noria.materialize"):
                side.optimizer.step()
        side.optimizer.zero_grad()

    undisturbed(misuse)


def test_unwrapping_in_the_middle_of_something():
    def misuse(side):
        def unwrap(*_):
            with refused("between passes"):
                noria.unwrap(side.model, side.optimizer)

        handle = side.model.blocks[1].register_forward_pre_hook(unwrap)
        loss_of(side.model, 50)
        handle.remove()
        with noria.materialize(side.model):
            unwrap()

    undisturbed(misuse)


@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_larger_data_in_a_parameters_place_reach_nothing_that_lies_behind_it(kernel):
    def misuse(side):
        bias = side.model.blocks[1].expand.bias
        before = {name: value.clone() for name, value in side.model.state_dict().items()}
        wrong = {**before, "blocks.1.expand.bias": torch.full((4 * len(bias),), 7.0)}
        own = bias.data
        bias.data = torch.zeros(4 * len(bias))
        noria.testing.assert_same_bits(side.model.state_dict(), before)
        side.model.load_state_dict(wrong)  # torch's own copy, into what lies outside
        noria.testing.assert_same_bits(side.model.state_dict(), before)
        with refused("blocks.1.expand.bias", "its data replaced"):
            loss_of(side.model, 50)
        bias.data = own

    undisturbed(misuse, kernel=kernel)


def test_an_update_of_a_parameter_with_larger_data_ends_where_it_was_planned_to():
    def journey(side):
        side.train(0, 2)
        loss_of(side.model, 2).backward()
        bias = side.model.blocks[1].expand.bias
        own = bias.data
        if side.is_wrapped:
            bias.data = torch.zeros(4 * len(bias))
        side.optimizer.step()
        side.keep("planned", side.model.state_dict()["blocks.1.expand.bias"])
        bias.data = own
        side.optimizer.zero_grad()

    both(journey, kernel="fused")
