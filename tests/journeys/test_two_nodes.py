"""Two "nodes": network namespaces of this machine, joined by a pair of virtual devices, over which the ranks on them
meet."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import noria
import pytest
import torch
import torch.distributed as dist
from noria.testing import assert_same_bits, on_machine
from torch.nn.parallel import DistributedDataParallel

from tests.device import DEVICE, use_device
from tests.journeys.pairs import HOSTILE, Net, loss_of, sgd

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TIMEOUT_S = 15.0
PATIENCE_S = 100.0  # beyond the group's timeout; only a rank that never ends comes to it


class Node:
    """A network namespace, held open by a process that sleeps in it."""

    def __init__(self) -> None:
        command = ["unshare", "--net", "--", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.holder.stdout.readline() != "up\n":
            raise OSError(self.holder.stderr.read().strip())

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--", *words]

    def ip(self, *words: str) -> None:
        done = subprocess.run(self.command("ip", *words), capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")

    def close(self) -> None:
        self.holder.kill()
        self.holder.communicate()


@contextlib.contextmanager
def two_nodes() -> Iterator[list[Node]]:
    with contextlib.ExitStack() as stack:
        nodes = []
        for _ in ADDRESSES:
            nodes.append(Node())
            stack.callback(nodes[-1].close)
        nodes[0].ip("link", "add", "link0", "type", "veth", "peer", "name", "link1")
        nodes[0].ip("link", "set", "link1", "netns", str(nodes[1].holder.pid))
        for number, (node, address) in enumerate(zip(nodes, ADDRESSES, strict=True)):
            node.ip("address", "add", f"{address}/24", "dev", f"link{number}")
            node.ip("link", "set", f"link{number}", "up")
        yield nodes


@pytest.fixture
def nodes():
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(two_nodes())
        except OSError as error:
            pytest.skip(f"this machine does not allow network namespaces: {error}")
        yield made


def start(nodes: list[Node], act: str, *, by_torchrun: bool) -> list[subprocess.Popen[str]]:
    """One rank on each node; they meet at the first one's address."""
    found = filter(None, [os.environ.get("PYTHONPATH")])  # the pretend GPU's
    paths = os.pathsep.join([str(ROOT), str(Path(noria.__file__).parents[1]), *found])
    ranks = []
    for number, node in enumerate(nodes):
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"link{number}"}
        command = [sys.executable]
        if by_torchrun:
            command += ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            command += ["--node-rank", str(number), "--master-addr", ADDRESSES[0], "--master-port", "29511"]
        else:
            environment |= {"RANK": str(number), "WORLD_SIZE": "2"}
            environment |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
        ranks.append(
            subprocess.Popen(
                node.command(*command, __file__, act),
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return ranks


@pytest.mark.long
def test_ranks_on_two_nodes_have_the_bits_of_ddp(nodes):
    ranks = start(nodes, "like ddp", by_torchrun=True)
    for rank, each in enumerate(ranks):
        out, _ = each.communicate(timeout=TIMEOUT_S + PATIENCE_S)
        assert each.returncode == 0 and f"rank {rank} of 2 at {ADDRESSES[rank]}, {DEVICE}: same bits" in out, out


@pytest.mark.long
@pytest.mark.cpu_only("a collective breaks off on its stream there, so the next call of any library raises")
def test_ranks_raise_when_the_link_between_their_nodes_goes_down(nodes):
    ranks = start(nodes, "for ever", by_torchrun=False)
    try:
        for each in ranks:
            for line in each.stdout:
                if "in the middle" in line:
                    break
            else:
                pytest.fail(f"a rank ended with {each.wait()} before the link was taken down")
        nodes[0].ip("link", "set", "link0", "down")
        for rank, each in enumerate(ranks):
            out, _ = each.communicate(timeout=TIMEOUT_S + PATIENCE_S)
            named = rf"noria\.MachineError: rank {rank} of 2: an? .+ failed; a rank has died, raised, or hung"
            assert each.returncode != 0 and re.search(named, out), out
    finally:
        for each in ranks:
            each.kill()


# ---- what each rank runs ------------------------------------------------------------------------------------------


def like_ddp(rank: int) -> None:
    torch.manual_seed(rank)  # rank 0's values are everybody's
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain)
    theirs, ours = sgd(plain.parameters()), sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device=DEVICE, window=2)
    begun = {name: value.clone() for name, value in plain.state_dict().items()}
    for number in range(3):
        for side, optimizer in ((ddp, theirs), (model, ours)):
            loss_of(side, 100 * rank + number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(model.state_dict(), plain.state_dict())
    assert any(not torch.equal(plain.state_dict()[name], value) for name, value in begun.items())
    print(f"rank {rank} of {dist.get_world_size()} at {ADDRESSES[rank]}, {DEVICE}: same bits", flush=True)


def train_for_ever(rank: int) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    number = 0
    while True:
        loss_of(model, 100 * rank + number).backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if number == 3:
            print("in the middle", flush=True)


def main() -> None:
    if DEVICE == "cuda":  # the pretend GPU's collectives are those of a gloo that takes the default interface
        gloo = dist.ProcessGroupGloo
        linked = functools.partial(gloo.create_device, interface=os.environ["GLOO_SOCKET_IFNAME"])
        gloo.create_default_device = staticmethod(linked)
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT_S))
    torch.set_num_threads(1)
    use_device()  # each node has devices of its own
    {"like ddp": like_ddp, "for ever": train_for_ever}[sys.argv[1]](dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
