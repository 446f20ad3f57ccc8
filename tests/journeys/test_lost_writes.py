"""Writes to weights on the device that only a comparison of bytes finds: on ranks that share them, in a home that is
not pinned, and by addresses. All are told of."""

from __future__ import annotations

from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from torch import nn

from tests.device import DEVICE, IS_PRETEND, at_address
from tests.journeys.pairs import Block, Net, both, loss_of, sgd
from tests.journeys.test_written_unheard import shrinking
from tests.ranks import assert_fine, in_turn_on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
ON_A_DEVICE = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU, or the pretend one: PRETEND_GPU=1")
ON_PRETEND_GPU = pytest.mark.skipif(not IS_PRETEND, reason="a driver refuses when it is asked: PRETEND_GPU=1")


def writes_on_ranks(rank: int, size: int, way: str, write: str) -> None:
    torch.manual_seed(0)
    model = shrinking(way, write)()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    before = model.state_dict()
    with pytest.raises(noria.UsageError, match=r"in-place write to .*blocks\.\d.*materialize"):
        for number in range(2):
            loss_of(model, number).backward()
            optimizer.step()
    assert_same_bits(model.state_dict(), before)


ON_RANKS = [("data", "one by one"), ("data", "mul"), ("itself", "copy")]
if DEVICE == "cpu":  # on a device a rank finds a write by an address when it may, and the others hear of that rank
    ON_RANKS += [("storage", "one by one"), ("itself", "numpy")]


@pytest.fixture(scope="module")
def on_ranks(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, {f"{way}, {write}": (writes_on_ranks, (way, write)) for way, write in ON_RANKS})


@pytest.mark.parametrize(("way", "write"), ON_RANKS)
def test_ranks_that_share_the_weights_are_told_too(on_ranks, way, write):
    """No rank has the whole weights at home, and can compare with them."""
    assert_fine(on_ranks, f"{way}, {write}")


class Parametrized(Block):
    """Sets a weight to itself in each forward, as torch.nn.utils.parametrize does: a new version, the same bytes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.expand.weight.set_(self.expand.weight)
        return super().forward(x)


def test_what_a_version_counts_and_no_byte_shows_is_no_write():
    def make() -> nn.Module:
        model = Net()
        model.blocks[1] = Parametrized()
        return model

    both(lambda side: side.train(0, 4), model=make, window=3)


@ON_PRETEND_GPU
@pytest.mark.parametrize("way", ["data", "storage"])
def test_weights_that_are_not_pinned_are_compared_on_the_host(way):
    import _pretend_gpu

    model = shrinking(way, "mul")().requires_grad_(False)
    _pretend_gpu.fail_next("cudaHostRegister", 1, 2)
    noria.wrap(model, device=DEVICE, window=2)
    assert any("not pinned" in note for note in noria.report(model).notes)
    with torch.no_grad(), pytest.raises(noria.UsageError, match=r"in-place write to .*blocks\.\d.*materialize"):
        for number in range(2):
            loss_of(model, number)


class WrittenByAddress(nn.Module):
    """A kernel of the user's own, which torch knows nothing of, writes the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.writes = Block(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.expand.weight
        values = at_address(weight.data_ptr(), weight.numel(), weight.device.index)
        if self.writes:
            values.mul_(0.99)
        return self.inner(x)


def written_by_address() -> Any:
    net = Net(blocks=0)
    net.blocks = nn.ModuleList(WrittenByAddress() for _ in range(4))
    return net


@ON_A_DEVICE
@pytest.mark.parametrize("num_looks", [0, 1, 5])
@pytest.mark.parametrize("pinned", [True, pytest.param(False, marks=ON_PRETEND_GPU)])
def test_a_write_by_an_address_is_told_however_many_looks_were_harmless(num_looks, pinned):
    """The calling thread does not wait to find out, so it may be told later."""
    net = written_by_address().requires_grad_(False)
    if not pinned:
        import _pretend_gpu

        _pretend_gpu.fail_next("cudaHostRegister", 1, 2)
    noria.wrap(net, device=DEVICE, window=2)
    before = {name: value.cpu() for name, value in net.state_dict().items()}
    with torch.no_grad():
        for number in range(num_looks):
            loss_of(net, number)
        clean = loss_of(net, 100)
        net.blocks[2].writes = True
        with pytest.raises(noria.UsageError, match=r"in-place write to a parameter of .*blocks\.2.*materialize"):
            loss_of(net, 100)
            net.state_dict()
        net.blocks[2].writes = False
        assert_same_bits({"loss": loss_of(net, 100)}, {"loss": clean})
    assert_same_bits({name: value.cpu() for name, value in net.state_dict().items()}, before)


@ON_A_DEVICE
@pytest.mark.parametrize("way", ["unwrap", "state_dict", "loop"])
@pytest.mark.parametrize("update", ["auto", "backward"])
def test_a_loop_hears_of_a_write_by_an_address_and_goes_on(update, way):
    """Also under update="backward", where an error inside of backward would leave the weights torn."""
    torch.manual_seed(0)
    net = written_by_address()
    optimizer = sgd(net.parameters())
    noria.wrap(net, optimizer, device=DEVICE, window=2, update=update, kernel="fused")

    def step(number: int) -> None:
        loss_of(net, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        step(number)
    net.blocks[1].writes = True
    with pytest.raises(noria.UsageError, match=r"in-place write to a parameter of .*blocks\.1"):
        loss_of(net, 3).backward()
        net.blocks[1].writes = False
        optimizer.step()
        if way == "unwrap":
            noria.unwrap(net, optimizer)
        elif way == "state_dict":
            net.state_dict()
        torch.cuda.synchronize()
        step(4)
    net.blocks[1].writes = False
    optimizer.zero_grad()
    step(5)
    noria.unwrap(net, optimizer)
    assert all(value.isfinite().all() for value in net.state_dict().values())
