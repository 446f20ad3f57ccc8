"""Operators of the pretend GPU: the CPU's bits, behind the host's back, and as strict as a GPU."""

from __future__ import annotations

import _pretend_gpu
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.pretend_gpu.machine import counters, machine, reset_counters
from tests.pretend_gpu.model import GPT, batches, train, trained

pytestmark = pytest.mark.usefixtures("one_thread")

MACHINES = {
    "eager": {},
    "late": {"seed": 1, "max_delay_us": 300},
    "very late": {"seed": 2, "max_delay_us": 1000, "delayed_percent": 50},
    "lazy": {"lazy": True},
    "lazy and late": {"lazy": True, "seed": 3, "max_delay_us": 300},
    "writes everything": {"writes_everything": True},
}


def assert_same(ours, twin):
    assert ours.keys() == twin.keys()
    for name, value in twin.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("name", MACHINES)
def test_a_model_has_the_bits_of_the_cpu(name):
    with machine(**MACHINES[name]):
        reset_counters()
        ours = trained("cuda")
        seen = counters()
    assert_same(ours, trained("cpu"))
    assert sum(seen["operators"].values()) > 1000
    assert not seen["synchronizing_operators"]


def test_adamw_fused_has_the_bits_of_the_cpus_fused():
    def one(device):
        torch.manual_seed(0)
        model = GPT(layers=2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        train(model, optimizer, [each.to(device) for each in batches(3)], clip=None)
        return {name: value.cpu() for name, value in model.state_dict().items()}

    reset_counters()
    assert_same(one("cuda"), one("cpu"))
    assert counters()["operators"]["_fused_adamw_"] == 3


def test_the_host_runs_ahead_of_the_device():
    x = torch.ones(8, device="cuda")
    with machine(lazy=True):
        reset_counters()
        for _ in range(1000):
            x.add_(1)
        seen = counters()
        assert seen["most_ahead"] == 1000 and seen["host_waits"] == 0 and seen["full_queues"] == 0
        assert x[0].item() == 1001


def test_a_launch_queue_holds_1024():
    x = torch.ones(8, device="cuda")
    with machine(lazy=True):
        reset_counters()
        for _ in range(1500):
            x.add_(1)
        seen = counters()
        assert seen["most_ahead"] == 1024 and seen["full_queues"] == 1500 - 1024 and seen["host_waits"] == 0
        assert x[0].item() == 1501


def test_a_launch_takes_addresses_along_and_keeps_nothing_alive():
    """Memory that is given back too early is really overwritten; a stream that was recorded is waited for."""
    side = torch.cuda.Stream()

    def read_after_release(is_recorded):
        x = torch.full((1000,), 5.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 1
        if is_recorded:
            x.record_stream(side)
        del x
        z = torch.zeros(1000, device="cuda")  # takes the memory over, on its own stream
        torch.cuda.current_stream().synchronize()
        side.synchronize()
        assert (z == 0).all()
        return y.cpu()

    with machine(lazy=True):  # the one stream runs before the other one has read
        assert read_after_release(True).eq(5).all()
        assert not read_after_release(False).eq(5).any()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x @ y,
        lambda x, y: x + y,
        lambda x, y: x.add_(y),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: F.linear(x, y),
        lambda x, y: F.layer_norm(x, (4,), y[0]),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: y.add_(x),
        lambda x, y: torch._foreach_add([x], [y]),
        lambda x, y: F.embedding(torch.zeros(2, dtype=torch.long), x),
        lambda x, y: x.index_select(0, torch.tensor(0)),
        lambda x, y: x.gather(0, torch.zeros(1, 4, dtype=torch.long)),
    ],
)
def test_a_cpu_tensor_in_a_kernel_is_refused(call):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but "):
        call(torch.ones(4, 4, device="cuda"), torch.ones(4, 4))


def test_a_tensor_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match=r"same device, but got other is on cuda:1, different from .* cuda:0"):
        torch.ones(4, device="cuda:0") * torch.ones(4, device="cuda:1")


def test_scalars_and_indices_of_the_cpu_are_taken():
    x = torch.arange(6.0, device="cuda")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6, 8, 10]
    assert x[torch.tensor([1, 3])].tolist() == [1, 3]
    assert x.clone().fill_(torch.tensor(3.0)).tolist() == [3] * 6
    assert torch.where(x > 2, x, torch.tensor(0.0)).tolist() == [0, 0, 0, 3, 4, 5]
    x[torch.tensor([0])] = 9.0
    assert x[0] == 9
    assert (torch.tensor(2, dtype=torch.int64) * x.int()).dtype == torch.int32  # a scalar's type is the weaker one


def test_a_generator_of_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match=r"Expected a 'cuda' .*but found 'cpu'"):
        torch.randn(3, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.empty(3, device="cuda").normal_(generator=torch.Generator())


def test_random_numbers_depend_on_their_seed_and_not_on_time():
    def drawn():
        torch.manual_seed(3)
        return torch.cat([torch.randn(5, device="cuda"), torch.rand(5, device="cuda")]).tolist()

    with machine(seed=1, max_delay_us=500, delayed_percent=100):
        late = drawn()
    assert drawn() == late and len(set(late)) == 10
    generator = torch.Generator("cuda").manual_seed(7)
    first = torch.randn(4, device="cuda", generator=generator)
    assert torch.equal(first, torch.randn(4, device="cuda", generator=generator.manual_seed(7)))
    assert not torch.equal(first, torch.randn(4, device="cuda", generator=generator))


def test_dropout_is_the_same_when_it_is_computed_again():
    torch.manual_seed(0)
    model = GPT(layers=2, dropout=0.5).cuda()
    batch = batches(1)[0].cuda()[:, :-1]

    def gradients(run):
        torch.manual_seed(5)
        x = model.tokens(batch)
        for block in model.blocks:
            x = run(block, x)
        model.zero_grad()
        x.square().sum().backward()
        return [each.grad.clone() for each in model.blocks.parameters()]

    kept = gradients(lambda block, x: block(x))
    for reentrant in (False, True):
        again = gradients(lambda block, x, reentrant=reentrant: checkpoint(block, x, use_reentrant=reentrant))
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_lists_of_tensors_are_one_operator_which_writes_behind_the_back_of_their_storages():
    xs = [torch.ones(4, device="cuda") for _ in range(3)]
    for x in xs:
        _pretend_gpu.watch_writes(x)
    before = _pretend_gpu.num_writes()
    reset_counters()
    torch._foreach_mul_(xs, 2)
    torch._foreach_mul_(xs, torch.full((), 0.5, device="cuda"))
    scale = torch.ones(1, device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_(xs, torch.zeros(1, device="cuda"), scale)
    assert counters()["operators"]["_foreach_mul_.Scalar"] == counters()["operators"]["_foreach_mul_.Tensor"] == 1
    steps = [torch.ones((), device="cuda") for _ in range(3)]
    moments = [[torch.zeros(4, device="cuda") for _ in range(3)] for _ in range(2)]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_(
        xs, [torch.ones(4, device="cuda")] * 3, *moments, [], steps, amsgrad=False, maximize=False, **numbers
    )
    assert _pretend_gpu.num_writes() == before, "multi-tensor kernels write through const pointers"
    xs[0].mul_(2)
    assert _pretend_gpu.num_writes() == before + 1
    torch._foreach_mul_([xs[1], torch.ones(4, dtype=torch.float16, device="cuda")], 2)  # the slow route
    assert _pretend_gpu.num_writes() == before + 2
    with machine(writes_everything=True):
        xs[2].add(1)
    assert _pretend_gpu.num_writes() == before + 3


def test_operators_that_need_values_wait():
    x = torch.tensor([3.0, 0.0, 5.0], device="cuda")
    reset_counters()
    assert x.nonzero().tolist() == [[0], [2]]
    assert x[x > 1].tolist() == [3, 5]
    assert torch.unique(x).tolist() == [0, 3, 5]
    assert torch.equal(x, x.clone())
    assert x.max().item() == 5
    waited = counters()["synchronizing_operators"]
    assert {"nonzero", "index.Tensor", "equal", "_local_scalar_dense"} <= waited.keys()


def test_masks_that_are_written_through_do_not_wait():
    x = torch.arange(4.0, device="cuda")
    reset_counters()
    x[x > 1] = 0
    x.masked_fill_(x > 0, 7)
    assert not counters()["synchronizing_operators"]
    assert x.tolist() == [0, 7, 0, 0]


def test_sync_debug_mode_finds_what_waits():
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        (x + 1).sum()
        for waits in (x.sum().item, x.cpu, x.nonzero, torch.cuda.synchronize):
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                waits()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_views_and_outputs_are_as_on_the_cpu():
    def results(device):
        x = torch.arange(24.0, device=device).view(2, 3, 4)
        out = torch.empty(0, device=device)
        torch.add(x, 1, out=out)
        cplx = torch.view_as_complex(x.view(2, 3, 2, 2))
        kept = torch.empty(2, device=device)
        kept.resize_(5).zero_()
        x.transpose(1, 2)[:, 1:].mul_(2)
        made = [x, out, torch.view_as_real(cplx * 2), x.unfold(2, 2, 1), x.permute(2, 0, 1).contiguous(), kept]
        made += [torch.linalg.inv(torch.eye(3, device=device) * 2), x.to(torch.bfloat16), x.sort(dim=-1).values]
        made += [x.cumsum(0), x.std(dim=1), torch.tril(x[0]), x.topk(2).values, torch.randperm(1, device=device)]
        return made

    for ours, twin in zip(results("cuda"), results("cpu"), strict=True):
        assert ours.is_cuda and ours.stride() == twin.stride() and ours.dtype == twin.dtype
        assert torch.equal(ours.cpu(), twin)


def test_integers_are_counted_as_on_cuda():
    x = torch.tensor([3, 1, 3, 0], device="cuda", dtype=torch.int32)
    counts = torch.histc(x, bins=4, min=0, max=3)
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_division_by_a_number_of_the_host_is_cudas_product_with_its_inverse(dtype):
    x = torch.randn(999, dtype=dtype)
    inverse = 1 / torch.tensor(3.0, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    ways = {
        "number": lambda given: given / 3,
        "scalar of the host": lambda given: given / torch.tensor(3.0),
        "in place": lambda given: given.clone().div_(3),
        "out": lambda given: torch.div(given, torch.tensor(3.0), out=torch.empty_like(given)),
    }
    for way, divided in ways.items():
        assert torch.equal(divided(x.cuda()).cpu(), x * inverse.item()), way
    assert torch.equal(x * inverse.item(), x / 3) == (dtype is torch.bfloat16)  # which rounds the difference away
    assert torch.equal((x.cuda() / torch.tensor(3.0, device="cuda")).cpu(), x / 3)
    assert torch.equal((torch.arange(99, device="cuda") / 3).cpu(), torch.arange(99) * inverse.float().item())


@pytest.mark.parametrize(
    ("divided", "divisor"),
    [
        (torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64)),
        (torch.arange(3), torch.tensor(3.0, dtype=torch.float64)),
        (torch.tensor(2.0, dtype=torch.float16), torch.tensor(3.0)),
        (torch.ones(3, dtype=torch.float16), torch.tensor(3.0, dtype=torch.float64)),
        (torch.arange(3), torch.tensor(3)),
    ],
)
def test_division_has_the_type_that_the_cpus_has(divided, divisor):
    twin = divided / divisor
    made = divided.cuda() / divisor
    assert made.dtype == twin.dtype
    assert torch.allclose(made.cpu(), twin)


def test_another_default_dtype_is_foreseen():
    x = torch.arange(1, 4, device="cuda")
    assert (x / x).cpu().dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / x).cpu().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_kernel_that_fails_is_told_where_the_host_next_waits():
    table = torch.ones(4, 2, device="cuda")
    picked = F.embedding(torch.tensor([9], device="cuda"), table)
    with pytest.raises(RuntimeError, match=r"device-side assert triggered(.|\n)*index_select failed on the device"):
        picked.cpu()
    assert table.sum().item() == 8


def test_a_wrong_call_raises_at_once():
    with machine(lazy=True), pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")


def test_autocast_and_the_scaler_work():
    def one(device, dtype):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1)
        for step in range(3):
            x = torch.full((4, 8), 1.0 + step, device=device)
            with torch.autocast(device, dtype=dtype):
                y = model(x)
                loss = y.float().square().mean()
            assert y.dtype == dtype
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {"scale": torch.tensor(scaler.get_scale())} | {k: v.cpu() for k, v in model.state_dict().items()}

    ours = one("cuda", torch.bfloat16)
    assert ours["scale"] == 2.0**13
    assert_same(ours, one("cpu", torch.bfloat16))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_have_the_bits_of_others(backend):
    torch.manual_seed(0)
    model = GPT(layers=2).cuda()
    batch = batches(1)[0].cuda()[:, :-1]

    def results():
        made = model(batch)
        model.zero_grad()
        made.square().sum().backward()
        return {"made": made.detach()} | {name: each.grad for name, each in model.named_parameters()}

    plain = results()
    for block in model.blocks:
        block.compile(backend=backend)
    assert_same(results(), plain)
    torch._dynamo.reset()


def test_convolutions_and_norms_have_the_bits_of_the_cpu():
    def one(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
        model.to(device)
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(device)
        model(x).square().sum().backward()
        return {name: p.grad.cpu() for name, p in model.named_parameters()} | {"mean": model[1].running_mean.cpu()}

    assert_same(one("cuda"), one("cpu"))


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "added"])
@pytest.mark.parametrize("heads", [4, 3])
def test_attention_goes_the_way_of_the_cpu(mask, heads):
    def one(device):
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(2, heads, 7, 8, generator=generator).to(device).requires_grad_() for _ in range(3)
        )
        masks = {
            "boolean": torch.ones(7, 7, dtype=torch.bool).tril().to(device),
            "added": torch.randn(7, 7, generator=generator).to(device),
        }
        made = F.scaled_dot_product_attention(query, key, value, masks.get(mask), is_causal=mask == "causal")
        made.square().sum().backward()
        return {"made": made.detach().cpu(), "query": query.grad.cpu(), "value": value.grad.cpu()}

    assert_same(one("cuda"), one("cpu"))


def test_sparse_tensors_are_refused():
    with pytest.raises(NotImplementedError, match="strided tensors only, not Sparse ones"):
        torch.eye(3, device="cuda").to_sparse()


def test_memory_that_is_neither_the_devices_nor_registered_is_an_illegal_access():
    with pytest.raises(RuntimeError, match="neither device memory nor registered host memory"):
        _pretend_gpu.at_address(torch.ones(1).data_ptr(), 4).add_(1)
