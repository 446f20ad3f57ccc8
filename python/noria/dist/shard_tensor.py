"""Gives this process's parts of tensors to `torch.distributed.checkpoint`, which writes and reads them.

A part is a range of a tensor's elements in storage order. It is given as boxes of the whole tensor, so the files have
the whole tensor in pieces. Any number of ranks can read it, and so can any other reader.

Note [Landing]. A load collects a part in a buffer. Once all of the part has arrived, `write` gets the buffer's values
and the buffer is freed. So a load holds few buffers at a time, and `write` always gets a complete part. It needs this:
a master is made from a whole value, and codes are made from whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from noria._errors import usage_error

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["Box", "ShardTensor", "boxes"]


class Box(NamedTuple):
    """Describes a box of a tensor. Its elements are consecutive in the part, from the part's element `begin` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int


def boxes(shape: Sequence[int], strides: Sequence[int], first: int, count: int) -> list[Box]:
    """Returns the boxes of `count` elements from `first` on in storage order, at most two for each dimension.

    `strides`: those of a dense tensor.
    """
    if math.prod(shape) == 0:
        return [Box((0,) * len(shape), tuple(shape), 0)]
    if not count:
        return []
    order = _order(shape, strides)
    inverse = [order.index(dim) for dim in range(len(order))]
    found, begin = [], 0
    for offsets, sizes in _rows([shape[dim] for dim in order], first, first + count):
        found.append(Box(tuple(offsets[at] for at in inverse), tuple(sizes[at] for at in inverse), begin))
        begin += math.prod(sizes)
    return found


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Returns the dimensions, those of the largest strides first."""
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))


def _rows(shape: Sequence[int], first: int, end: int) -> list[tuple[list[int], list[int]]]:
    """Returns offsets and sizes of boxes: the rest of the first row, the whole rows, the begin of the last row."""
    if not shape:
        return [([], [])]
    if len(shape) == 1:
        return [([first], [end - first])]
    inner, found = math.prod(shape[1:]), []
    top, bottom = -(-first // inner), end // inner  # whole rows
    if top > bottom:  # all in one row
        return [([bottom, *offsets], [1, *sizes]) for offsets, sizes in _rows(shape[1:], first % inner, end % inner)]
    if first % inner:
        found += [([top - 1, *offsets], [1, *sizes]) for offsets, sizes in _rows(shape[1:], first % inner, inner)]
    if bottom > top:
        found.append(([top, *[0] * (len(shape) - 1)], [bottom - top, *shape[1:]]))
    if end % inner:
        found += [([bottom, *offsets], [1, *sizes]) for offsets, sizes in _rows(shape[1:], 0, end % inner)]
    return found


class ShardTensor(torch.Tensor):
    """Stands for a whole tensor. This process has a part of it at home. No operator works on it.

    Its shape and dtype are those of the whole tensor.

    - `read` returns the part in one dimension.
    - `write` takes the part in one dimension, in `landing_dtype`.
    - `before_read` raises if the part must not be read now. It is called when a save is planned.
    - `is_saved` is False if other ranks save the part, or if it has no values yet.
    """

    _boxes: list[Box]
    _strides: tuple[int, ...]
    _count: int
    _read: Callable[[], torch.Tensor]
    _write: Callable[[torch.Tensor], None]
    _before_read: Callable[[], None]
    _is_saved: bool
    _landing_dtype: torch.dtype
    _buffer: torch.Tensor | None
    _num_awaited: int | None

    @staticmethod
    def of(
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        *,
        first: int = 0,
        count: int | None = None,
        read: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
        before_read: Callable[[], None] = lambda: None,
        is_saved: bool = True,
        landing_dtype: torch.dtype | None = None,
    ) -> ShardTensor:
        made: ShardTensor = torch.Tensor._make_wrapper_subclass(
            ShardTensor, shape, strides=strides, dtype=dtype, device=torch.device("cpu")
        )
        made._count = math.prod(shape) if count is None else count
        made._boxes = boxes(shape, strides, first, made._count)
        made._strides = tuple(strides)
        made._read, made._write, made._before_read = read, write, before_read
        made._is_saved = is_saved
        made._landing_dtype = dtype if landing_dtype is None else landing_dtype
        made._buffer = None
        made._num_awaited = None  # no load has begun
        return made

    def finish(self, name: str) -> None:
        """Ends a load. Raises UsageError if some of this part is missing. Order: after no rank has failed."""
        if self._num_awaited != 0:
            raise usage_error(
                "a checkpoint that holds all that is loaded", f'some of "{name}" missing', "load another one"
            )
        if not self._count:
            self._write(torch.empty(0, dtype=self._landing_dtype, device="cpu"))

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self._is_saved:
            return []
        self._before_read()
        self._num_awaited = None
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box in self._boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._num_awaited = self._count
        return [_chunk(box) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = next(box for box in self._boxes if index.offset is None or torch.Size(box.offsets) == index.offset)
        if self._num_awaited is None:
            return self._view(self._read(), box)
        if self._buffer is None:
            self._buffer = torch.empty(self._count, dtype=self._landing_dtype, device="cpu")
        return _Landing.of(self._view(self._buffer, box), self)

    def _view(self, flat: torch.Tensor, box: Box) -> torch.Tensor:
        order = _order(self.shape, self._strides)
        view = flat[box.begin : box.begin + math.prod(box.sizes)].view([box.sizes[dim] for dim in order])
        return view.permute([order.index(dim) for dim in range(len(order))])

    def arrived(self, num_elements: int) -> None:
        assert self._num_awaited is not None and self._buffer is not None
        self._num_awaited -= num_elements
        if self._num_awaited <= 0:
            self._num_awaited, whole, self._buffer = 0, self._buffer, None
            self._write(whole)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise usage_error(
            "tensors of noria.sharded_state in torch.distributed.checkpoint.save and load",
            f"{func} on one of them",
            "load the checkpoint into plain tensors, or take model.state_dict()",
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardTensor({self._count} of {tuple(self.shape)}, {self.dtype})"


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


class _Landing(torch.Tensor):
    """Views a landing buffer, and tells the part of each copy into it. See Note [Landing]."""

    _part: ShardTensor

    @staticmethod
    def of(view: torch.Tensor, part: ShardTensor) -> _Landing:
        made = view.as_subclass(_Landing)
        made._part = part
        return made

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: object = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, _Landing):
            result._part = args[0]._part
        if func is torch.Tensor.copy_:
            args[0]._part.arrived(args[0].numel())
        return result
