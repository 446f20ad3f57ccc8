"""What a pipeline stage keeps for each micro-batch in flight, its input and its output, is let go as soon as autograd
alone decides what of it lives.

Note [What stays of a micro-batch]. torch keeps a stage's outputs as handles of their graph, and its inputs for the
gradients that come to them; of neither does it read a value again. So once an output is on its way, another tensor
takes its place in `fwd_cache`: a node of the same graph, with shape and dtype and without memory. The module is given a
view of the buffer in which its input was received. After forward that buffer is left without memory, shape and strides
as they were (a gradient follows its strides), and gets some again before it next receives; likewise the gradients'.
What operators have saved of input and output, they have by tensors of their own: so it is counted, and moved, as all
that blocks save. What the user has of them, by hooks say, is the user's.

Memory that a send still reads belongs to the send. GPipe and 1F1B have waited for all of theirs when a backward
begins. Others wait at the end of the step; what such a one has sent of a micro-batch is let go with that micro-batch's
backward, for the gradient that has come for it tells that it has arrived; in an evaluation none comes, and it is kept
until the next step begins. On CUDA torch's allocator orders all this by the stream that computes, on which the memory
is taken and given back: it has by then waited for the receive, and before a send's memory is given back for the send
itself, or for the receive of a gradient that the other side made of it.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["InFlight"]


class _Handle(torch.autograd.Function):
    """In the graph where `output` is, without memory."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, hollow: Hollow) -> torch.Tensor:
        return hollow.like(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Hollow:
    """Tensors that have everything but memory, by what they are like."""

    def __init__(self) -> None:
        self._made: dict[Any, torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in self._made:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            made.untyped_storage().resize_(0)
            self._made[key] = made
        return self._made[key].detach()


def is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta


def _is_hollow(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """As torch makes the buffers in which it receives."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class InFlight:
    """Of one stage."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self._hollow = Hollow()
        self._sent: dict[int, list[torch.Tensor]] = {}

    def clear(self) -> None:
        """A step begins; whatever of another one is left is given up."""
        self._sent.clear()

    def prepared(self) -> None:
        """torch has made buffers for all micro-batches, or made them anew."""
        for infos in self._all_received():
            for info in _received(infos):
                _put(info, self._hollow.like(info.buffer))

    def fill(self, infos: Any) -> None:
        """Before something is received there."""
        for info in _received(infos):
            if _is_hollow(info.buffer):
                _put(info, _filled(info.buffer))

    def refill(self) -> None:
        """All buffers, as torch has them."""
        for infos in self._all_received():
            self.fill(infos)

    def views(self, chunk: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the module is given in the place of buffers."""
        buffers = {id(info.buffer) for info in _received(self.stage.args_recv_info.get(chunk, ()))}
        return tuple(each.view_as(each) if id(each) in buffers else each for each in args)

    def forwarded(self, chunk: int, *, is_next_here: bool) -> None:
        """`is_next_here`: the next stage has its output from memory."""
        kept = {id(each) for each in self.stage.fwd_cache[chunk][1]}
        for info in _received(self.stage.args_recv_info.get(chunk, ())):
            if id(info.buffer) in kept:  # not of a DTensor
                info.buffer.data = self._hollow.like(info.buffer)
        if is_next_here:
            self._let_outputs_go(chunk)

    def instead_of(self, output: Any) -> Any:
        """For whoever keeps an output that nobody looks at."""
        if isinstance(output, list | tuple):
            return type(output)(self.instead_of(each) for each in output)
        return self._hollow.like(output) if is_plain(output) else output

    def sends(self, chunk: int, ops: list[Any]) -> None:
        if self.stage.is_last:
            return
        if all(len(targets) == 1 for targets in self.stage.act_send_info.values()):
            plain = [op for op in ops if is_plain(op.tensor)]
            for op in plain:
                op.tensor = op.tensor.detach()  # by torch 2.11 it is the output itself, which the user may have
            self._sent[chunk] = [op.tensor for op in plain]
        self._let_outputs_go(chunk)

    def let_sent_go(self, chunk: int | None = None) -> None:
        """Of this micro-batch, which has arrived; None: all has."""
        for each in list(self._sent) if chunk is None else [chunk]:
            for tensor in self._sent.pop(each, ()):
                tensor.data = self._hollow.like(tensor)

    def end_backward(self, chunk: int) -> None:
        for info in _received(getattr(self.stage, "grad_recv_info", {}).get(chunk, ())):
            _put(info, self._hollow.like(info.buffer))

    def _all_received(self) -> list[Any]:
        """By micro-batch, inputs and gradients of outputs."""
        return [*self.stage.args_recv_info.values(), *getattr(self.stage, "grad_recv_info", {}).values()]

    def _let_outputs_go(self, chunk: int) -> None:
        outputs, inputs = self.stage.fwd_cache[chunk]
        if len({id(each) for each in outputs}) == len(outputs):  # else gradients would be summed in another order
            self.stage.fwd_cache[chunk] = (tuple(self._handle(each) for each in outputs), inputs)

    def _handle(self, output: Any) -> Any:
        if not is_plain(output) or (output.is_leaf and output.requires_grad):
            return output
        if output.grad_fn is None:
            return self._hollow.like(output)
        with torch.enable_grad():
            return _Handle.apply(output, self._hollow)


def _put(info: Any, buffer: torch.Tensor) -> None:
    """Not every torch says once more, before it hands the buffer on, whether gradients come to it."""
    info.buffer = buffer.requires_grad_(info.buffer.requires_grad and info.buffer.is_leaf)


def _received(infos: Any) -> list[Any]:
    return [info for info in infos if is_plain(getattr(info, "buffer", None))]
