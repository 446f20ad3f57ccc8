"""Makes torch believe that it has CUDA: `install()` before torch is imported, or PRETEND_GPU=1 for all of tests/.

torch looks for CUDA once, while it is imported; so that import is watched. Before it, the fake CUDA runtime is loaded,
under the name by which noria finds the real one, and `_pretend_gpu`, which registers a device, its memory and its
kernels. When torch comes to its own `torch.cuda`, what that is made of is there (torch_cuda.py). After it, what a CPU
build of torch has compiled out is put in (storages.py, nccl.py). test_versions.py tries the whole.

Processes that this one starts have the device too: PRETEND_GPU is in their environment, and on PYTHONPATH a
sitecustomize that calls `install()`.

PRETEND_GPU is 1, or what the machine does from the beginning: PRETEND_GPU=lazy,seed=3,max_delay_us=300.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "current"
VARIABLE = "PRETEND_GPU"
CHILD = Path(__file__).parent / "child"
TRIED_WITH = tuple((Path(__file__).parent / "torch_versions.txt").read_text().split())
"""Versions of torch."""

FALLBACK = (
    "The pretend GPU leans on what torch does not promise. Should a torch release close this way, torch's own "
    "PrivateUse1 is the fallback: the same sources under another device type, which noria would have to be told of "
    "(README.md)."
)


class UnsuitableError(ImportError):
    """This torch cannot be made to believe in the pretend GPU."""


def asked_for() -> bool:
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def is_installed() -> bool:
    return any(isinstance(each, _Watch) for each in sys.meta_path)


def unsuitable(torch_version: str, cuda: str | None) -> str:
    """Why this torch is not one that the pretend GPU is for; empty if it is."""
    release = torch_version.partition("+")[0]
    if cuda is not None:
        return f"torch {torch_version} has CUDA {cuda} itself, which the pretend GPU never touches: use a CPU build"
    if release not in TRIED_WITH:
        return f"the pretend GPU was tried with torch {', '.join(TRIED_WITH)}, and not with {torch_version}. {FALLBACK}"
    return ""


def absent() -> str:
    """Why it cannot be installed here; empty if it can."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "there is no torch"
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = {name: re.search(rf"^{name}\b[^=\n]*= *'([^']+)'", text, re.MULTILINE) for name in ("__version__", "cuda")}
    version, cuda = (match and match.group(1) for match in (found["__version__"], found["cuda"]))
    if reason := unsuitable(version or "unknown", cuda):
        return reason
    if not list(BUILD.glob("_pretend_gpu*.so")) or not (BUILD / "pretend_gpu" / "libcudart.so.13").exists():
        return f"_pretend_gpu is not built in {BUILD}: make test-modules"
    return ""


def install() -> None:
    """Does nothing if it is installed already."""
    from tests.pretend_gpu import machine

    if is_installed():
        return
    if "torch" in sys.modules:
        raise UnsuitableError(
            "the pretend GPU must be installed before torch is imported: torch looks for CUDA only once"
        )
    if reason := absent():
        raise UnsuitableError(reason)
    machine.Machine.from_text(os.environ.get(VARIABLE, "1"))  # raises if it is no machine
    sys.meta_path.insert(0, _Watch())
    os.environ.setdefault(VARIABLE, "1")
    paths = [str(CHILD), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


class _Watch:
    """Waits for torch, and for torch.cuda, to be imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name == "torch.cuda":
            from tests.pretend_gpu import torch_cuda

            torch_cuda.fill(sys.modules["torch._C"])
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        spec.loader = _Torch(spec.loader.name, spec.loader.path)
        return spec


class _Torch(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        try:
            _load()
        except ImportError as error:
            raise UnsuitableError(f"_pretend_gpu does not fit this torch ({error}). {FALLBACK}") from error
        super().exec_module(module)
        try:
            _finish()
        except Exception as error:
            raise UnsuitableError(f"this torch does not take the pretend GPU ({error!r}). {FALLBACK}") from error


def _load() -> None:
    # First: what links to it by its other name finds it loaded.
    ctypes.CDLL(str(BUILD / "pretend_gpu" / "libcudart.so.13"))
    (library,) = BUILD.glob("_pretend_gpu*.so")
    spec = importlib.util.spec_from_file_location("_pretend_gpu", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_pretend_gpu"] = module
    spec.loader.exec_module(module)


def _finish() -> None:
    import _pretend_gpu
    import torch

    from tests.pretend_gpu import machine, storages

    storages.patch(torch)
    atexit.register(_pretend_gpu.stop)  # what ends later than this, ends without a device
    machine.apply(machine.Machine.from_text(os.environ.get(VARIABLE, "1")))
    # What is seen here at once, a torch that has changed would fail at far away. Nothing that initialises CUDA.
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    _pretend_gpu.report_faults()


if __name__ == "__main__":
    if reason := absent():
        print(reason)
        sys.exit(1)
