"""Releases the input and the output that a pipeline stage keeps for each micro-batch in flight.

After that, only autograd decides which of these tensors stay in memory.

Note [What stays of a micro-batch]. torch keeps a stage's outputs to start backward from their graph. It keeps the
inputs to read the gradients that arrive at them. It does not read the values of either again.

Outputs: when an output has been handed to its send, another tensor replaces it in `fwd_cache`. That tensor is a node of
the same graph, with the same shape and dtype, but without memory.

Inputs: the module gets a view of the buffer in which its input was received. After forward that buffer loses its
memory, and keeps its shape and strides, because a gradient follows the strides. The buffer gets memory again before its
next receive. The buffers of received gradients are handled in the same way.

Operators that save an input or output hold it through tensors of their own. Such memory is counted and moved like all
other saved tensors of blocks. References that the user holds, for example from hooks, keep their memory.

Order: memory that a send still reads belongs to the send. GPipe and 1F1B have waited for all their sends when a
backward begins. Other schedules wait at the end of the step. There, the sent tensors of a micro-batch are released in
that micro-batch's backward: the gradient that came back shows that the send has arrived. In an evaluation no gradient
comes back, so the memory stays until the next step begins.

On CUDA, torch's allocator orders all this by the compute stream, on which the memory is allocated and freed. By then
this stream has waited for the receive. Before a send's memory is freed, the stream has waited for the send itself, or
for the gradient that the other side computed from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = ["MicrobatchBuffers"]


class _Handle(torch.autograd.Function):
    """Makes a tensor without memory at the place of `output` in the graph."""

    @staticmethod
    def forward(ctx: object, output: torch.Tensor, hollow: Hollow) -> torch.Tensor:
        return hollow.like(output)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Hollow:
    """Makes tensors without memory, one for each shape, strides, dtype and device."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in self._made:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            made.untyped_storage().resize_(0)
            self._made[key] = made
        return self._made[key].detach()


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and not value.is_meta


def _is_hollow(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a buffer with memory, as torch makes its receive buffers."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class MicrobatchBuffers:
    """Releases the inputs and outputs that one stage keeps for micro-batches in flight."""

    def __init__(self, stage: _PipelineStageBase) -> None:
        self.stage = stage
        self._hollow = Hollow()
        self._sent: dict[int, list[torch.Tensor]] = {}

    def clear(self) -> None:
        """Drops tensors that an earlier step has left. Called when a step begins."""
        self._sent.clear()

    def prepared(self) -> None:
        """Removes the memory of all buffers. Called after torch has made, or remade, them for all micro-batches."""
        for infos in self._all_received():
            for info in _received(infos):
                _put(info, self._hollow.like(info.buffer))

    def fill(self, infos: Iterable[object]) -> None:
        """Gives these buffers memory before they receive."""
        for info in _received(infos):
            if _is_hollow(info.buffer):
                _put(info, _filled(info.buffer))

    def refill(self) -> None:
        """Gives all buffers memory again, as in plain torch."""
        for infos in self._all_received():
            self.fill(infos)

    def views(self, chunk: int, args: tuple[object, ...]) -> tuple[object, ...]:
        """Returns the arguments of the module, with a view in place of each buffer."""
        buffers = {id(info.buffer) for info in _received(self.stage.args_recv_info.get(chunk, ()))}
        return tuple(each.view_as(each) if is_plain(each) and id(each) in buffers else each for each in args)

    def forwarded(self, chunk: int, *, is_next_here: bool) -> None:
        """Releases the input buffers after a forward.

        If `is_next_here`, it releases the outputs too: the next stage gets them in memory, without a send.
        """
        kept = {id(each) for each in self.stage.fwd_cache[chunk][1]}
        for info in _received(self.stage.args_recv_info.get(chunk, ())):
            if id(info.buffer) in kept:  # false for the buffer of a DTensor
                info.buffer.data = self._hollow.like(info.buffer)
        if is_next_here:
            self._let_outputs_go(chunk)

    def instead_of(self, output: object) -> object:
        """Returns an output without memory, for a schedule that keeps outputs and does not read them."""
        if isinstance(output, list | tuple):
            return type(output)(self.instead_of(each) for each in output)
        return self._hollow.like(output) if is_plain(output) else output

    def sends(self, chunk: int, ops: list[dist.P2POp]) -> None:
        """Releases the outputs: from now on their memory belongs to the sends in `ops`."""
        if self.stage.is_last:
            return
        if all(len(targets) == 1 for targets in self.stage.act_send_info.values()):
            plain = [op for op in ops if is_plain(op.tensor)]
            for op in plain:
                op.tensor = op.tensor.detach()  # torch 2.11 sends the output itself, which the user may hold
            self._sent[chunk] = [op.tensor for op in plain]
        self._let_outputs_go(chunk)

    def let_sent_go(self, chunk: int | None = None) -> None:
        """Releases the sent tensors of a micro-batch, after they have arrived. `chunk` None means all micro-batches."""
        for each in list(self._sent) if chunk is None else [chunk]:
            for tensor in self._sent.pop(each, ()):
                tensor.data = self._hollow.like(tensor)

    def end_backward(self, chunk: int) -> None:
        """Releases the buffers in which the micro-batch's gradients were received."""
        for info in _received(getattr(self.stage, "grad_recv_info", {}).get(chunk, ())):
            _put(info, self._hollow.like(info.buffer))

    def _all_received(self) -> list[Iterable[object]]:
        """Returns the receive infos of all micro-batches, of inputs and of gradients."""
        return [*self.stage.args_recv_info.values(), *getattr(self.stage, "grad_recv_info", {}).values()]

    def _let_outputs_go(self, chunk: int) -> None:
        outputs, inputs = self.stage.fwd_cache[chunk]
        if len({id(each) for each in outputs}) == len(outputs):  # else the order of sums would change
            self.stage.fwd_cache[chunk] = (tuple(self._handle(each) for each in outputs), inputs)

    def _handle(self, output: object) -> object:
        if not is_plain(output) or (output.is_leaf and output.requires_grad):
            return output
        if output.grad_fn is None:
            return self._hollow.like(output)
        with torch.enable_grad():
            return _Handle.apply(output, self._hollow)  # type: ignore[no-untyped-call]


class _Received(Protocol):
    """Tells where a stage receives an input or a gradient, as torch's `_RecvInfo` does."""

    buffer: torch.Tensor


def _has_plain(info: object) -> TypeGuard[_Received]:
    return is_plain(getattr(info, "buffer", None))


def _put(info: _Received, buffer: torch.Tensor) -> None:
    """Replaces a receive buffer and keeps its `requires_grad`, which not every torch version sets again."""
    info.buffer = buffer.requires_grad_(info.buffer.requires_grad and info.buffer.is_leaf)


def _received(infos: Iterable[object]) -> list[_Received]:
    return [info for info in infos if _has_plain(info)]
