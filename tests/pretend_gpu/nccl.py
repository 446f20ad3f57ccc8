"""torch.distributed's NCCL: what a CUDA build of torch has beside gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import _pretend_gpu

VERSION = (2, 28, 0)


def promise(torch_c: Any) -> None:
    """Before torch.distributed is imported, whose C++ side comes to life only then."""
    init = torch_c._c10d_init
    torch_c._nccl_version = lambda: VERSION[0] << 32 | VERSION[1] << 16 | VERSION[2]
    torch_c._nccl_version_suffix = lambda: b""

    def init_with_nccl() -> Any:
        made = init()
        c10d = torch_c._distributed_c10d
        if not hasattr(c10d, "ProcessGroupNCCL"):
            _pretend_gpu.bind_nccl()
            c10d.ProcessGroupNCCL = _pretend_gpu.ProcessGroupNCCL
            c10d._DEFAULT_PG_NCCL_TIMEOUT = timedelta(minutes=10)
        return made

    torch_c._c10d_init = init_with_nccl
