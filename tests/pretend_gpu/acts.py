"""What ranks do in test_collectives.py; each rank is a process."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.pretend_gpu.machine import counters, machine, reset_counters
from tests.pretend_gpu.model import GPT, batches, train

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def own_device(rank: int) -> torch.device:
    torch.cuda.set_device(rank % 2)
    return torch.device("cuda", rank % 2)


@contextmanager
def nccl() -> Iterator[Any]:
    group = dist.new_group(backend="nccl")
    yield group
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group(group)


def fail_unheard(device: torch.device) -> None:
    """Launches a kernel that fails, and does not wait for it."""
    F.embedding(torch.tensor([9], device=device), torch.ones(4, 2, device=device))


def embeds_out_of_range(rank: int, size: int) -> str:
    fail_unheard(own_device(rank))
    return "fine"


def embeds_in_range(rank: int, size: int) -> None:
    F.embedding(torch.tensor([3], device=own_device(rank)), torch.ones(4, 2, device=own_device(rank)))


def noise(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10).to(dtype)


def reductions_have_the_bits_of_gloo(rank: int, size: int) -> None:
    device = own_device(rank)
    with nccl() as group:
        for dtype in DTYPES:
            for op in ("SUM", "AVG", "MAX", "MIN"):
                if op == "AVG" and not dtype.is_floating_point:
                    continue
                reduce_op = getattr(dist.ReduceOp, op)
                twin = noise(rank, 1001, dtype)
                ours = twin.to(device)
                dist.all_reduce(ours, reduce_op, group=group)
                dist.all_reduce(twin, reduce_op)
                assert torch.equal(ours.cpu(), twin), (dtype, op)
                whole = noise(rank, 12 * size, dtype)
                part, part_twin = torch.zeros(12, dtype=dtype, device=device), torch.zeros(12, dtype=dtype)
                dist.reduce_scatter_single(part, whole.to(device), reduce_op, group=group)
                dist.reduce_scatter_single(part_twin, whole.clone(), reduce_op)
                assert torch.equal(part.cpu(), part_twin), (dtype, op)
        flags = torch.tensor([rank == 0, True, False], device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        assert flags.tolist() == [True, True, False]


def tensors_reach_whom_they_are_for(rank: int, size: int) -> None:
    device = own_device(rank)

    def filled(value: float, count: int = 3) -> torch.Tensor:
        return torch.full((count,), float(value), device=device)

    with nccl() as group:
        gathered = [torch.zeros(r + 1, device=device) for r in range(size)]  # of different sizes
        dist.all_gather(gathered, filled(rank, rank + 1), group=group)
        assert [each.tolist() for each in gathered] == [[r] * (r + 1) for r in range(size)]
        whole = torch.zeros(2 * size, device=device)
        whole[2 * rank : 2 * rank + 2] = rank + 1
        dist.all_gather_single(whole, whole[2 * rank : 2 * rank + 2], group=group)  # in place
        assert whole.tolist() == [r + 1 for r in range(size) for _ in range(2)]
        part = filled(0)
        dist.reduce_scatter(part, [filled(10 * r + rank) for r in range(size)], group=group)
        assert part.tolist() == [10 * rank * size + sum(range(size))] * 3
        gathered = [filled(-1) for _ in range(size)] if rank == 1 else None
        dist.gather(filled(rank), gathered, dst=1, group=group)
        assert gathered is None or [each[0].item() for each in gathered] == list(range(size))
        scattered = filled(-1)
        dist.scatter(scattered, [filled(r) for r in range(size)] if rank == 1 else None, src=1, group=group)
        assert scattered.tolist() == [rank] * 3
        reduced = filled(rank + 1)
        dist.reduce(reduced, 0, group=group)
        assert reduced[0].item() == (sum(range(1, size + 1)) if rank == 0 else rank + 1), "the others' stay as they are"
        told = filled(rank)
        dist.broadcast(told, 1, group=group)
        assert told[0].item() == 1
        got = [torch.zeros(r + 1, device=device) for r in range(size)]
        dist.all_to_all(got, [filled(10 * rank + r, rank + 1) for r in range(size)], group=group)
        assert [each.tolist() for each in got] == [[10 * r + rank] * (r + 1) for r in range(size)]
        swapped = torch.zeros(size, device=device)
        dist.all_to_all_single(swapped, torch.arange(float(size), device=device) + 100 * rank, group=group)
        assert swapped.tolist() == [100 * r + rank for r in range(size)]
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": r} for r in range(size)]
        with dist._coalescing_manager(group=group, device=device, async_ops=True) as coalesced:
            sums = [filled(k) for k in range(3)]
            for each in sums:
                dist.all_reduce(each, group=group)
        coalesced.wait()
        assert [each[0].item() for each in sums] == [k * size for k in range(3)]


def neighbours_send_to_each_other(rank: int, size: int) -> None:
    device = own_device(rank)
    with nccl() as group:
        down, up = (rank + 1) % size, (rank - 1) % size
        got = [torch.zeros(5, device=device) for _ in range(4)]
        ops = [dist.P2POp(dist.isend, torch.full((5,), 10.0 * rank + k, device=device), down, group) for k in range(2)]
        ops += [dist.P2POp(dist.irecv, got[k], up, group) for k in range(2)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert [each[0].item() for each in got[:2]] == [10 * up, 10 * up + 1], "in order, with any tag"
        # One after the other, and both begin by sending: neither direction holds up the other one.
        sent = dist.isend(torch.full((5,), float(rank), device=device), down, group=group)
        dist.irecv(got[2], up, group=group).wait()
        sent.wait()
        assert got[2].tolist() == [up] * 5
        if rank < 2:  # a pair; the other ranks know nothing of it
            (dist.send if rank == 0 else dist.recv)(got[3].fill_(7 if rank == 0 else 0), 1 - rank, group=group)
            assert got[3].tolist() == [7] * 5


def the_host_waits_for_no_collective(rank: int, size: int) -> None:
    device = own_device(rank)
    with nccl() as group:
        x = torch.ones(10, device=device)
        dist.all_reduce(x, group=group)  # they have met
        torch.cuda.synchronize()
        reset_counters()
        with machine(seed=rank, max_delay_us=3000, delayed_percent=100):
            reset_counters()
            for _ in range(20):
                x.mul_(0.5)
                work = dist.all_reduce(x, group=group, async_op=True)
                y = x.new_zeros(3)  # of its own stream
                work.wait()
                x.add_(y.sum())
            assert counters()["host_waits"] == 0
            assert counters()["operators"]["nccl ALLREDUCE"] == 20
            wanted = torch.tensor(float(size))
            for _ in range(20):
                wanted = wanted * 0.5 * size
            assert x[0].item() == wanted.item()
        if rank == 0:
            torch.cuda._sleep(400_000_000)
        dist.barrier(group=group)
        assert torch.cuda.current_stream().query(), "but for a barrier"


def a_call_keeps_its_tensors_until_it_is_waited_for(rank: int, size: int) -> None:
    """By any stream: as with NCCL, others that use them must be recorded."""
    device = own_device(rank)
    with nccl() as group:
        dist.all_reduce(torch.ones(3, device=device), group=group)  # they have met
        torch.cuda.synchronize()
        for waits in (False, True):
            dist.barrier()
            before = torch.cuda.memory_allocated()
            x = torch.ones(1000, device=device)
            if rank > 0:
                dist.barrier()  # until then the call of rank 0 is under way
            work = dist.all_reduce(x, group=group, async_op=True)
            if waits:
                with torch.cuda.stream(torch.cuda.Stream()):
                    work.wait()
            del x, work
            if rank == 0:
                kept = torch.cuda.memory_allocated() - before
                dist.barrier()
                assert kept == (0 if waits else 4096), (waits, kept)
            torch.cuda.synchronize()
            dist.all_reduce(torch.ones(3, device=device), group=group)  # the next call lets go what is over
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() <= before + 512


def ddp_trains_as_over_gloo(rank: int, size: int) -> None:
    device = own_device(rank)

    def trained(where: Any, group: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = GPT(layers=2).to(where)
        parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        losses = train(parallel, optimizer, [each.to(where) for each in batches(3, seed=rank)])
        return [losses.cpu(), *(each.detach().cpu() for each in model.parameters())]

    with nccl() as group:
        ours, twin = trained(device, group), trained("cpu", dist.group.WORLD)
        assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


def fsdp_trains_as_a_whole_model(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def sgd(model: nn.Module) -> torch.optim.Optimizer:  # Adam would make a step of a gradient that is but rounding
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

    own_device(rank)
    torch.manual_seed(0)
    whole = GPT(layers=2)
    sharded = copy.deepcopy(whole).cuda()
    data = batches(2)
    with nccl() as group:
        mesh = DeviceMesh.from_group(group, "cuda")
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        ours = train(sharded, sgd(sharded), [each.cuda() for each in data], clip=None)
        got = {name: parameter.full_tensor().cpu() for name, parameter in sharded.named_parameters()}
    twin = train(whole, sgd(whole), data, clip=None)
    assert size != 2 or torch.equal(ours.cpu(), twin)  # at two ranks halves of sums are exact
    for name, parameter in whole.named_parameters():
        assert torch.allclose(got[name], parameter, atol=1e-4), name


def pipelines_hand_device_tensors_on(rank: int, size: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    device = own_device(rank)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))

    def stage_of(number: int) -> nn.Module:
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def gradients(schedule: Callable[..., Any], where: Any, group: Any) -> list[torch.Tensor]:
        module = stage_of(rank).to(where)
        stage = PipelineStage(module, rank, size, torch.device(where), group=group)
        run = schedule(stage, 4, loss_fn=F.mse_loss)
        if rank == 0:
            run.step(x.to(where))
        elif rank == size - 1:
            run.step(target=torch.zeros(8, 16).to(where))
        else:
            run.step()
        return [each.grad.cpu() for each in module.parameters()]

    with nccl() as group:
        for schedule in (ScheduleGPipe, Schedule1F1B):
            ours, twin = gradients(schedule, device, group), gradients(schedule, "cpu", dist.group.WORLD)
            assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


def a_group_can_be_left(rank: int, size: int) -> None:
    """Aborted while a call waits for ranks that do not come: who waits for that hears of it, and the device goes on."""
    device = own_device(rank)
    group = dist.new_group(backend="nccl")
    x = torch.ones(3, device=device)
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        backend = group._get_backend(torch.device("cuda"))
        backend.abort()
        torch.cuda.synchronize()
        assert not work.is_success() and x.add(1).shape == (3,)
        try:
            work.wait()
        except dist.DistBackendError:
            pass
        else:
            raise AssertionError("the failure was not reported")
        try:
            dist.all_reduce(x, group=group)
        except dist.DistBackendError as error:
            assert "aborted" in str(error)
        else:
            raise AssertionError("it could still be used")
    dist.barrier()


def tensors_of_the_cpu_are_refused(rank: int, size: int) -> None:
    device = own_device(rank)
    with nccl() as group:
        for wrong, text in ((torch.ones(3), "No backend type"), (torch.ones(4, 4, device=device).t(), "contiguous")):
            try:
                dist.all_reduce(wrong, group=group)
            except (RuntimeError, ValueError) as error:
                assert text in str(error), error
            else:
                raise AssertionError("it was taken")
        dist.barrier(group=group)


def everything_at_once(rank: int, size: int, meeting: str, backend: str) -> str:
    """A world of NCCL, made as programs make it."""
    dist.destroy_process_group()
    device = own_device(rank)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size, device_id=device)
    x = torch.ones(3, device=device)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 3
    if "gloo" in backend:
        y = torch.ones(3)
        dist.all_reduce(y)
        assert y.tolist() == [size] * 3
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [2 * size] * 3
    torch.cuda.synchronize()
    dist.barrier()
    told = dist.get_backend()
    dist.destroy_process_group()
    return told


def a_rank_that_does_not_come_is_missed(rank: int, size: int, meeting: str) -> str:
    dist.destroy_process_group()
    own_device(rank)
    limit = datetime.timedelta(seconds=1)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=limit)
    x = torch.ones(3, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    over = dist.distributed_c10d._get_default_store()
    if rank > 0:
        over.get("over")  # until then it is there, but does not come
        return "stayed away"
    dist.all_reduce(x)
    told = []
    for call in (torch.cuda.synchronize, lambda: dist.all_reduce(x)):
        try:
            call()
        except RuntimeError as error:
            told.append(str(error))
    over.set("over", "")
    assert len(told) == 2 and all("collective operation timeout" in each for each in told), told
    return "missed it"
