"""Storages of device memory by name: what torch's C++ side has compiled out of a CPU build.

Needed by deepcopy, `torch.load`, and code that frees and takes a storage's memory, as FSDP does.
"""

from __future__ import annotations

from typing import Any

import _pretend_gpu


def patch(torch: Any) -> None:
    cls = torch.UntypedStorage
    make, resize = cls.__new__, cls.resize_

    def is_on_device(device: Any) -> bool:
        return device is not None and torch.device(device).type == "cuda"

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        if not is_on_device(kwargs.get("device")) or "allocator" in kwargs:
            return make(kind, *args, **kwargs)
        size = args[0] if args else kwargs.get("size", 0)
        if isinstance(size, int):
            return torch.empty(size, dtype=torch.uint8, device=kwargs["device"]).untyped_storage()
        return torch.tensor(size, dtype=torch.uint8, device=kwargs["device"]).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        _pretend_gpu.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    cls.__new__ = staticmethod(new)
    cls.resize_ = resize_
