"""torch.cuda as programs use it, on the pretend GPU."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.pretend_gpu import vehicle


def test_there_are_two_devices():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    properties = torch.cuda.get_device_properties("cuda:1")
    assert properties.total_memory == torch.cuda.mem_get_info(1)[1] == 1 << 30
    assert torch.cuda.get_device_name() == "a pretend GPU" and torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.is_bf16_supported() and torch.cuda.can_device_access_peer(0, 1)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.backends.cuda.is_built()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(1, device="cuda:2")
    with pytest.raises(RuntimeError, match=r"invalid device ordinal|cudaErrorInvalidDevice"):
        torch.cuda.set_device(7)


def test_a_device_is_set():
    torch.cuda.set_device(1)
    try:
        assert torch.empty(1, device="cuda").device == torch.device("cuda:1")
        assert torch.ones(2, device="cuda").sum().item() == 2
    finally:
        torch.cuda.set_device(0)
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda


def test_numpy_of_a_device_tensor_is_refused():
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.ones(1, device="cuda").numpy()


def test_tensors_are_printed_and_listed():
    x = torch.tensor([[1.5, 2.0]], device="cuda")
    assert repr(x) == "tensor([[1.5000, 2.0000]], device='cuda:0')"
    assert x.tolist() == [[1.5, 2.0]] and float(x[0, 0]) == 1.5 and bool(x.any())


@pytest.mark.parametrize("how", ["pickle", "save", "deepcopy"])
def test_tensors_and_modules_go_through(how):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).cuda()
    weight = model[0].weight
    things = {"model": model, "view": weight.detach()[1:], "whole": weight.detach()}
    if how == "deepcopy":
        got = copy.deepcopy(things)
    elif how == "pickle":
        got = pickle.loads(pickle.dumps(things))
    else:
        buffer = io.BytesIO()
        torch.save(things, buffer)
        buffer.seek(0)
        got = torch.load(buffer, weights_only=False)
    assert got["view"].is_cuda and torch.equal(got["view"], things["view"])
    if how != "pickle":  # torch's own way to pickle a tensor knows of no others
        assert got["view"].untyped_storage().data_ptr() == got["whole"].untyped_storage().data_ptr()
    assert torch.equal(got["model"][0].weight, weight) and got["model"][0].weight.data_ptr() != weight.data_ptr()


def test_saved_tensors_are_loaded_where_they_are_wanted():
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(4.0, device="cuda:1")}, buffer)
    for where, device in ((None, "cuda:1"), ("cpu", "cpu"), ("cuda:0", "cuda:0"), ({"cuda:1": "cuda:0"}, "cuda:0")):
        buffer.seek(0)
        x = torch.load(buffer, map_location=where)["x"]
        assert x.device == torch.device(device) and x.tolist() == [0, 1, 2, 3]


def test_storages_are_made_freed_and_taken_again():
    storage = torch.UntypedStorage(16, device="cuda")
    assert storage.device == torch.device("cuda:0") and storage.nbytes() == 16
    x = torch.empty(0, device="cuda").set_(storage)
    x.fill_(2)
    copied = storage.clone()
    storage.resize_(0)
    assert storage.nbytes() == 0 and copied.nbytes() == 16
    storage.resize_(16)
    storage.copy_(copied)
    assert x.tolist() == [2] * 4
    with pytest.raises(RuntimeError, match="not resizable"):
        torch.frombuffer(bytearray(4), dtype=torch.uint8).untyped_storage().resize_(8)


def test_random_states_are_kept_and_set():
    torch.cuda.manual_seed_all(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert not torch.equal(first, torch.rand(3, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    assert torch.cuda.initial_seed() == 3 and len(torch.cuda.get_rng_state_all()) == 2
    with torch.random.fork_rng(devices=[0]):
        torch.rand(3, device="cuda")
    generator = torch.Generator("cuda:1").manual_seed(1)
    assert generator.device == torch.device("cuda:1") and generator.initial_seed() == 1


def test_parameters_keep_their_identity_when_a_module_moves():
    model = nn.Linear(2, 2)
    weight = model.weight
    model.cuda()
    assert model.weight is weight and weight.is_cuda
    assert model.to("cpu").weight is weight and weight.is_cpu


def test_autograd_reaches_over_devices():
    x = torch.ones(3, requires_grad=True)
    (x.to("cuda:0") * 2).to("cuda:1").mul(3).cpu().sum().backward()
    assert x.grad.tolist() == [6, 6, 6]


def test_hooks_and_functions_of_python_run_in_backward():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
            return gradient * 2

    x = torch.ones(3, device="cuda", requires_grad=True)
    seen = []
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    Double.apply(x).sum().backward()
    assert seen == [6]


def test_a_forked_process_is_refused_the_device():
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def act():
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            queue.put(str(error))
        else:
            queue.put("")

    torch.cuda.init()
    process = context.Process(target=act)
    process.start()
    told = queue.get()
    process.join()
    assert "Cannot re-initialize CUDA in forked subprocess" in told


def test_noria_finds_the_runtime_by_its_ordinary_door():
    from noria import _C

    assert _C.cuda_absent_reason() == ""
    assert (vehicle.BUILD / "pretend_gpu" / "libcudart.so.13").exists()
    backend = _C.make_cuda_backend(1, 1 << 20)
    assert backend.name == "cuda:1"
    backend.close()
