"""Makes stand-ins for tensors that lie in files. `torch.save` reads one of them at a time, when it writes it.

Note [Late bytes]. `torch.save` first pickles all objects, and names each storage. Then it writes one storage after the
other, and asks each one that is not on the CPU for its `cpu()`. A stand-in's storage is on the meta device. So it needs
no memory until it is asked, and the file has the bytes that it would have if all tensors were in memory.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch

from noria import _C
from noria._errors import usage_error
from noria._progress import Bar

__all__ = ["UnreadTensors"]


class UnreadTensors:
    """Makes the stand-ins of one save. Tensors that share a storage share it in the file, too.

    Stand-ins can be written inside of `with` this object.
    """

    def __init__(self) -> None:
        self._storages: dict[tuple[int, torch.dtype], _UnreadStorage] = {}
        self._tell: Callable[[int], None] = lambda num_bytes: None
        self._ends: set[Callable[[], None]] = set()

    def stand_in(
        self, tensor: torch.Tensor, read: Callable[[], torch.UntypedStorage], end: Callable[[], None]
    ) -> torch.Tensor:
        """Returns what `torch.save` writes as it would write `tensor`. No operator works on it.

        `read` returns the tensor's storage, with its bytes. They are written before the next `read`. `end` is called
        when nothing more will be.
        """
        self._ends.add(end)
        key = (_C.storage_of(tensor), tensor.dtype)
        if key not in self._storages:
            num_bytes = tensor.untyped_storage().nbytes()
            made = self._storages[key] = _UnreadStorage(num_bytes, device="meta")  # type: ignore[no-untyped-call]
            made._read, made._owner = read, self
        return _UnreadTensor.of(tensor, self._storages[key])

    def __enter__(self) -> UnreadTensors:
        return self

    def __exit__(self, *raised: object) -> None:
        for end in self._ends:
            end()

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[None]:
        """Shows a bar while the block writes these tensors."""
        done = 0

        def tell(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            bar.tell(done, 0)

        with Bar(what, sum(each.nbytes() for each in self._storages.values())) as bar:
            self._tell = tell
            yield

    def note_read(self, num_bytes: int) -> None:
        self._tell(num_bytes)


class _UnreadStorage(torch.UntypedStorage):
    """See Note [Late bytes]."""

    _read: Callable[[], torch.UntypedStorage]
    _owner: UnreadTensors

    def cpu(self) -> torch.UntypedStorage:
        found = self._read()
        self._owner.note_read(self.nbytes())
        return found


class _UnreadTensor(torch.Tensor):
    """Has the shape, strides and dtype of a tensor, and a storage without bytes."""

    _source: _UnreadStorage

    @staticmethod
    def of(tensor: torch.Tensor, source: _UnreadStorage) -> _UnreadTensor:
        made: _UnreadTensor = torch.Tensor._make_wrapper_subclass(
            _UnreadTensor,
            tensor.shape,
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=torch.device("cpu"),
        )
        made._source = source
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Returns what a tensor on the CPU returns."""
        storage = torch.storage.TypedStorage(wrap_storage=self._source, dtype=self.dtype, _internal=True)
        storage._fake_device = "cpu"  # type: ignore[assignment]  # torch.save writes this down in place of "meta"
        layout = (self.storage_offset(), tuple(self.shape), self.stride())
        no_hooks: OrderedDict[object, object] = OrderedDict()
        return torch._utils._rebuild_tensor_v2, (storage, *layout, False, no_hooks)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        raise usage_error(
            "noria.save to write the optimizer's state as it is",
            f"{func} on a tensor that lies in a file",
            "take the state from optimizer.state_dict()",
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"UnreadTensor({tuple(self.shape)}, {self.dtype})"
