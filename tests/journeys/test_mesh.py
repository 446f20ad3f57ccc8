"""Meshes: which ranks share a model, in how many replicas. All of it in the same four processes, one journey after the
other."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import noria
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from noria.host.limits import Limit
from noria.testing import assert_same_bits, on_machine
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, Net, adamw, loss_of, sgd, state_tensors
from tests.ranks import alone, asked_for, in_turn_on_ranks

STEPS = 3
SIZE = 4


def trained(model: Any, optimizer: Any, rank: int, share: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    """Losses, and what has become of model and optimizer."""
    losses = {}
    for number in range(STEPS):
        loss = loss_of(model, 100 * rank + number)
        loss.backward()
        share()
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {number}"] = loss.detach()
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    return {**losses, **plain.state_dict(), **state_tensors(optimizer)}


def made(optimizer: Callable[[Any], Any] = sgd, **sizes: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net(**sizes)
    return model, optimizer(model.parameters())


def in_replicas(shape: tuple[int, int] = (2, 2)) -> DeviceMesh:
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("replicas", "shards"))


# ---- bits ---------------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "a replica each": ((2, 2, 1), ("replicas", "shards"), {}),
    "a replica each, a window": ((2, 2, 1), ("replicas", "shards"), {"window": 2}),
    "a replica each, drafts": ((2, 2, 1), ("replicas", "shards"), {"draft_memory": "64MiB"}),
    "one replica": ((2, 1, 2), ("replicas", "shards"), {"window": 2}),
    "one dimension": ((2, 1, 2), ("shards",), {"window": 2}),
}


def like_ddp(rank: int, size: int, name: str) -> None:
    """Two pairs of ranks, each with a model of its own, as pipelines have it."""
    shape, names, policy = PAIRS[name]
    world = init_device_mesh(DEVICE, shape, mesh_dim_names=("pipelines", "replicas", "shards"))
    mesh = world[names]
    pair = mesh.mesh.flatten().tolist()
    assert rank in pair and len(pair) == 2
    groups = [dist.new_group(each) for each in ([0, 1], [2, 3])]
    width = 16 + rank // 2  # the pairs' models are not alike
    plain, theirs = made(width=width)
    expected = trained(DistributedDataParallel(plain, process_group=groups[rank // 2]), theirs, rank)
    model, ours = made(width=width)
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, mesh=mesh, device=DEVICE, **policy)
    assert_same_bits(trained(model, ours, rank), expected)
    report = noria.report(model)
    assert report.num_fetches > 0 and report.ledger_agrees, str(report)
    if "draft_memory" in policy:
        assert report.drafts["kept"] > 0
    noria.unwrap(model, ours)


TWINS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "all resident": (sgd, {}),
    "a window": (adamw, {"window": 2}),
    "drafts": (adamw, {"draft_memory": "64MiB"}),
    "blocking": (adamw, {"window": 2, "update": "blocking"}),
    "bfloat16": (adamw, {"window": 2, "dtype": torch.bfloat16}),
    "bfloat16, summed in fp32": (adamw, {"window": 2, "dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
}


def like_twin(rank: int, size: int, name: str) -> None:
    """A process alone is given the sum that the mesh makes: first inside of replicas, then across them."""
    optimizer, policy = TWINS[name]
    mesh = in_replicas()
    within, across = (mesh.get_group(each) for each in ("shards", "replicas"))
    twin, its = made(optimizer, blocks=2, width=29)
    with alone():
        noria.wrap(twin, its, device=DEVICE, **policy)

    def share() -> None:
        with torch.no_grad():
            for parameter in twin.parameters():
                gradient = (parameter.grad.float() if "reduce_dtype" in policy else parameter.grad) * (1 / size)
                dist.all_reduce(gradient, group=within)
                dist.all_reduce(gradient, group=across)
                parameter.grad.copy_(gradient)

    expected = trained(twin, its, rank, share)
    model, ours = made(optimizer, blocks=2, width=29)
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, mesh=mesh, device=DEVICE, **policy)
    found = trained(model, ours, rank)
    assert_same_bits(found, expected)
    for key in ("embed.weight", "head.weight"):
        gathered = [torch.empty_like(found[key]) for _ in range(size)]
        dist.all_gather(gathered, found[key])
        for each in gathered:
            assert_same_bits({key: each}, {key: found[key]})
    assert noria.report(model).ledger_agrees


def norms(rank: int, size: int, shape: tuple[int, int]) -> None:
    """Each part counts once, however many replicas there are."""
    found = []
    for mesh in (in_replicas(shape), None):
        model, optimizer = made()
        noria.wrap(model, optimizer, mesh=mesh, device=DEVICE, window=2, max_grad_norm=1e6)
        loss_of(model, rank).backward()
        called = optimizer.clip_grad_norm_(1e6)
        optimizer.step()
        assert_same_bits({"norm": optimizer.grad_norm}, {"norm": called})
        found.append(called.item())
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, found[0])
    assert gathered == [found[0]] * size
    assert math.isclose(*found, rel_tol=1e-6)


def accumulates(rank: int, size: int) -> None:
    """Sums of sums, and one sum with no_sync(): the same gradients as those of all batches."""
    mesh = in_replicas()
    found = []
    for synced in (True, False):
        model, optimizer = made()
        noria.wrap(model, optimizer, mesh=mesh, device=DEVICE, window=2)
        with contextlib.nullcontext() if synced else model.no_sync():
            loss_of(model, rank).backward()
        loss_of(model, 10 + rank).backward()
        optimizer.step()
        found.append(model.state_dict())
    plain, theirs = made()
    for number in (0, 10):
        for each in range(size):
            (loss_of(plain, number + each) / size).backward()
    theirs.step()
    for each in found:
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(each[key], value.cpu())


# ---- who takes part -----------------------------------------------------------------------------------------------


def leaves_others_alone(rank: int, size: int) -> None:
    """Three ranks of four share; the fourth trains something by itself, and then wraps alone."""
    three, one = DeviceMesh(DEVICE, [0, 1, 3]), DeviceMesh("cpu", [2])
    if rank == 2:
        plain, theirs = made()
        expected = trained(plain, theirs, rank)
        model, ours = made()
        noria.wrap(model, ours, mesh=one, device=DEVICE, window=2)
        assert_same_bits(trained(model, ours, rank), expected)
        with noria.materialize(model):  # a process alone
            pass
        message = message_of(lambda: noria.wrap(*made(), mesh=three, device=DEVICE))
        assert "rank 2" in message and "[0, 1, 3]" in message
        return
    model, ours = made()
    noria.wrap(model, ours, mesh=three, device=DEVICE, window=2)
    found = trained(model, ours, rank)
    plain, theirs = made()
    for number in range(STEPS):
        for each in (0, 1, 3):
            (loss_of(plain, 100 * each + number) / 3).backward()
        theirs.step()
        theirs.zero_grad()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value.cpu())
    noria.unwrap(model, ours)


def goes_by_rows_of_any_order(rank: int, size: int) -> None:
    mesh = DeviceMesh(DEVICE, [[3, 1], [0, 2]])
    model, optimizer = made(width=64)
    noria.wrap(model, optimizer, mesh=mesh, device=DEVICE, window=2)
    plain, _ = made(width=64)
    assert_same_bits(model.state_dict(), plain.state_dict())
    trained(model, optimizer, rank)


def divides_by_the_shards(rank: int, size: int) -> None:
    found = {}
    for shape in ((4, 1), (2, 2), (1, 4)):
        mesh = in_replicas(shape)
        model, optimizer = made(adamw, width=64)
        planned = noria.plan(model, optimizer, mesh=mesh, device=DEVICE, window=2)
        noria.wrap(model, optimizer, mesh=mesh, device=DEVICE, window=2)
        trained(model, optimizer, rank)
        report = noria.report(model)
        assert report.ledger_agrees, str(report)
        home = {row.purpose: row.taken for row in report.ledger if row.place == "host"}
        assert {**home, **{purpose: size for place, purpose, size in planned.rows() if place == "host"}} == home
        found[shape[1]] = sum(home.values())
    padding = 4 * 5 * 1024 * 4  # four arrays of five units and what aligns them
    for shards in (2, 4):
        assert abs(found[shards] - found[1] / shards) < padding
        assert found[shards] < 0.6 * found[shards // 2]


def num_sockets() -> int:
    folder = "/proc/self/fd"
    links = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # of the listing itself
            links.append(os.readlink(f"{folder}/{name}"))
    return sum(link.startswith("socket:") for link in links)


def gives_its_groups_back(rank: int, size: int) -> None:
    counts = []
    mesh = in_replicas()
    gc.collect()  # what others have left does not go meanwhile
    for _ in range(3):
        model, optimizer = made()
        noria.wrap(model, optimizer, mesh=mesh, device=DEVICE)
        during = num_sockets()
        noria.unwrap(model, optimizer)
        counts.append(num_sockets())
        assert counts[-1] < during
    assert len(set(counts)) == 1, counts


# ---- refusals -----------------------------------------------------------------------------------------------------


def message_of(act: Callable[[], Any]) -> str:
    with pytest.raises(noria.UsageError) as caught:
        act()
    return str(caught.value)


def refuses(rank: int, size: int) -> None:
    def wrap(mesh: Any, of: Any = None, **policy: Any) -> str:
        model, optimizer = of or made()
        before = {name: p.data_ptr() for name, p in model.named_parameters()}
        message = message_of(lambda: noria.wrap(model, optimizer, mesh=mesh, device=DEVICE, **policy))
        assert of or {name: p.data_ptr() for name, p in model.named_parameters()} == before
        return message

    mesh = in_replicas()
    assert "2 dims" not in wrap(init_device_mesh(DEVICE, (2, 2, 1))) and "of 3" in wrap(
        init_device_mesh(DEVICE, (1, 2, 2))
    )
    assert "DeviceMesh" in wrap([0, 1])
    other = init_device_mesh(DEVICE, (1, 4))
    message = wrap(other if rank == 3 else mesh)
    assert "2 x 2 ranks" in message and "1 x 4 ranks" in message and "rank 3" in message
    # What one rank alone finds wrong, before it plans or after.
    for policy in ({"window": 1}, {"kernel": "none"}, {"device_memory": 1}):  # the last one in planning
        message = wrap(mesh, **(policy if rank == 2 else {}))
        assert rank == 2 or ("on rank 2" in message and next(iter(policy)) in message), message
    model, optimizer = made()
    optimizer = optimizer if rank != 1 else "none"
    message = wrap(mesh, (model, optimizer))
    assert rank == 1 or "on rank 1" in message
    with mock.patch("noria.wrap.Home", side_effect=noria.UsageError("no memory")) if rank == 1 else mock.MagicMock():
        message = wrap(mesh)
    assert "no memory" in message and (rank == 1 or "on rank 1" in message)
    model, optimizer = made()
    noria.wrap(model, optimizer, mesh=mesh, device=DEVICE)
    trained(model, optimizer, rank)


def goes_by_the_least(rank: int, size: int) -> None:
    """If one rank finds too little, all refuse; "auto" counts what is free to each of the four."""
    mesh = in_replicas()
    ring = noria._C.STAGING_BYTES if DEVICE == "cuda" else 0
    free = 4 * (ring + (257 << 20)) if rank == 1 else 64 << 30  # a quarter, less ring and margin, is 1 MiB
    model, optimizer = made(adamw)
    with mock.patch("noria.host.limits.host_limits", return_value=[Limit("what is left", "the test", free)]):
        noria.wrap(model, optimizer, mesh=mesh, device=DEVICE)
        found = message_of(lambda: noria.wrap(*made(adamw, width=256), mesh=mesh, device=DEVICE))
        noria.wrap(*made(adamw, width=256), mesh=mesh, device=DEVICE, host_memory="200MiB")
    assert "what is left on rank 1, divided by the 4 processes there" in found
    trained(model, optimizer, rank)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def loads_into_other_meshes(rank: int, size: int) -> None:
    folder: list[Any] = [os.environ["NORIA_TEST_FOLDER"]]
    path = os.path.join(folder[0], "saved")
    model, optimizer = made(adamw)
    noria.wrap(model, optimizer, mesh=in_replicas(), device=DEVICE, window=2)
    trained(model, optimizer, rank)
    noria.save(path, model, optimizer, step=STEPS)
    in_parts = os.path.join(folder[0], "in parts")
    dcp.save({**noria.sharded_state(model, optimizer), "step": STEPS}, checkpoint_id=in_parts)
    expected = {key: value.clone() for key, value in {**model.state_dict(), **state_tensors(optimizer)}.items()}
    gone_on = trained(model, optimizer, 7 + rank)
    meshes = [in_replicas((1, 4)), in_replicas((4, 1)), in_replicas(), None]
    some = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicas", "shards"))["shards"]  # of the four, two
    for saved, mesh in [
        *((path, mesh) for mesh in meshes),
        (in_parts, meshes[0]),
        (in_parts, meshes[2]),
        (in_parts, some),
    ]:
        if mesh is some and rank >= 2:
            continue
        torch.manual_seed(9)
        other = Net()
        its = adamw(other.parameters())
        noria.wrap(other, its, mesh=mesh, device=DEVICE, window=2)
        assert noria.load(saved, other, its) == {"step": STEPS}
        assert_same_bits({**other.state_dict(), **state_tensors(its)}, expected)
        if mesh is not None and mesh.shape == (2, 2):
            assert_same_bits(trained(other, its, 7 + rank), gone_on)
    plain, theirs = made(adamw)
    noria.load(path, plain, theirs)
    assert_same_bits({**plain.state_dict(), **state_tensors(theirs)}, expected)


# ---- tests --------------------------------------------------------------------------------------------------------

ACTS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{f"pairs: {name}": (like_ddp, (name,)) for name in PAIRS},
    **{f"twin: {name}": (like_twin, (name,)) for name in TWINS},
    "norms": (norms, ((2, 2),)),
    "norms of replicas": (norms, ((4, 1),)),
    "accumulates": (accumulates, ()),
    "three of four": (leaves_others_alone, ()),
    "any order": (goes_by_rows_of_any_order, ()),
    "home": (divides_by_the_shards, ()),
    **({"groups": (gives_its_groups_back, ())} if DEVICE == "cpu" else {}),
    "refuses": (refuses, ()),
    "least": (goes_by_the_least, ()),
    "checkpoints": (loads_into_other_meshes, ()),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    with mock.patch.dict(os.environ, {"NORIA_TEST_FOLDER": str(tmp_path_factory.mktemp("meshes"))}):
        return in_turn_on_ranks(SIZE, asked_for(request, ACTS))


def assert_fine(failure: str) -> None:
    assert not failure, failure


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PAIRS)
def test_a_slice_of_two_ranks_has_the_bits_of_ddp(found, name):
    assert_fine(found[f"pairs: {name}"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TWINS)
def test_replicas_have_the_bits_of_one_process_that_is_given_the_same_sums(found, name):
    assert_fine(found[f"twin: {name}"])


@pytest.mark.parametrize("name", ["norms", "norms of replicas"])
def test_a_norm_counts_each_part_once_and_is_the_same_on_all_ranks(found, name):
    assert_fine(found[name])


def test_replicas_accumulate_with_and_without_no_sync(found):
    assert_fine(found["accumulates"])


def test_ranks_outside_of_a_mesh_do_as_they_like(found):
    assert_fine(found["three of four"])


def test_ranks_of_a_mesh_may_come_in_any_order(found):
    assert_fine(found["any order"])


def test_the_home_is_divided_by_the_shards_of_a_replica_and_planned_so(found):
    assert_fine(found["home"])


@pytest.mark.cpu_only("the pretend NCCL leaves a group that is aborted to itself, with its sockets")
def test_unwrap_closes_what_the_groups_had_open(found):
    assert_fine(found["groups"])


def test_what_is_no_mesh_of_these_ranks_is_refused_and_what_one_rank_refuses_all_do(found):
    assert_fine(found["refuses"])


def test_ranks_plan_by_the_least_that_one_of_them_finds(found):
    assert_fine(found["least"])


def test_a_checkpoint_of_one_mesh_goes_into_any_other_and_into_plain_torch(found):
    assert_fine(found["checkpoints"])


def test_a_mesh_needs_a_process_group():
    with pytest.raises(noria.UsageError, match="init_process_group"):
        noria.wrap(nn.Linear(2, 2), mesh=object(), device=DEVICE)
    with pytest.raises(noria.UsageError, match="init_process_group"):
        noria.plan(nn.Linear(2, 2), mesh=object(), device=DEVICE)
