"""Reads files of weights, as `save_pretrained` and safetensors write them: one tensor at a time, a few pages mapped.

What the files hold is known from their headers. So misfits are found before a model is wrapped or memory is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from noria._errors import usage_error

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Entry", "WeightFiles", "first_few"]

_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files in a folder, in the order in which transformers looks for them."""

_PATTERNS = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the name in a header of safetensors."""

_MAPPED_BYTES = 64 << 20
"""A file of safetensors is mapped anew after so many bytes: pages that were read count as memory of the process."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Says where a tensor is, and its form."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def first_few(names: Sequence[str], count: int = 3) -> str:
    """Returns the first names as an error shows them, and how many more there are."""
    shown = ", ".join(f'"{name}"' for name in names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"


class WeightFiles:
    """Knows the tensors of one file, or of the shards that an index lists, by name.

    Raises UsageError if there are no such files, or one of them cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        found = _found(self.path)
        self.entries: dict[str, Entry] = {}
        if not found.endswith(".json"):
            self.entries = _headers(found)
            return
        index = _index(found)
        for file in sorted(set(index.values())):
            headers = _headers(file)
            wanted = {name for name, its in index.items() if its == file}
            if lost := sorted(wanted - headers.keys()):
                raise usage_error(
                    f"{first_few(lost)} in {file}, as {found} says",
                    "a file without",
                    "copy or download the shard again",
                )
            self.entries |= {name: each for name, each in headers.items() if name in wanted}

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor that views its mapped file. Drop it before the next one is read."""
        [(_, tensor)] = self._read(self.entries[name].file, [name])
        return tensor

    def items(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields these names and their tensors, file by file, in the files' order.

        A tensor views its mapped file: drop it before the next one is read.
        """
        by_file: dict[str, list[str]] = {}
        wanted = set(names)
        for name, each in self.entries.items():
            if name in wanted:
                by_file.setdefault(each.file, []).append(name)
        for file, its in by_file.items():
            yield from self._read(file, its)

    def _read(self, file: str, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        if not _is_safe(file):
            contents = _unpickled(file)
            while names:
                name = names.pop(0)
                yield name, contents.pop(name)
            return
        library = _safetensors()
        while names:
            room = _MAPPED_BYTES
            with library.safe_open(file, framework="pt", device="cpu") as opened:
                while names and room > 0:
                    name = names.pop(0)
                    room -= self.entries[name].bytes
                    yield name, opened.get_tensor(name)


def _is_safe(file: str) -> bool:
    return file.endswith(".safetensors")


def _found(path: str) -> str:
    """Returns the file or index to read for a path that the user gave."""
    if os.path.isfile(path):
        return path
    expected = "a file of weights, an index of shards, or a folder with one"
    if not os.path.isdir(path):
        raise usage_error(
            expected,
            f"no file or folder {path}",
            "give a path on this machine; huggingface_hub.snapshot_download(name) returns that of a model of the Hub",
        )
    for name in _NAMES:
        if os.path.isfile(os.path.join(path, name)):
            return os.path.join(path, name)
    for pattern in _PATTERNS:
        found = sorted(glob.glob(os.path.join(glob.escape(path), pattern)))
        if len(found) == 1:
            return found[0]
        if found:
            names = first_few([os.path.basename(each) for each in found])
            raise usage_error(expected, f"{names} in {path}", "give the path of the one to load")
    raise usage_error(
        expected,
        f"none of {', '.join(_NAMES)} in {path}",
        "give the folder that save_pretrained has written; noria.load reads what noria.save and "
        "torch.distributed.checkpoint have",
    )


def _index(path: str) -> dict[str, str]:
    """Returns the file of each tensor."""
    try:
        with open(path, encoding="utf-8") as file:
            contents = json.load(file)
        names = dict(contents["weight_map"])
        folder = os.path.dirname(path)
        index = {str(name): os.path.join(folder, its) for name, its in names.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise usage_error(
            f"an index of shards with a weight_map in {path}",
            f"{type(error).__name__}: {error}",
            "give the index that save_pretrained has written",
        ) from error
    if lost := sorted({os.path.basename(file) for file in index.values() if not os.path.isfile(file)}):
        raise usage_error(
            f"all shards of {path} beside it", f"none named {first_few(lost)}", "copy or download them too"
        )
    return index


def _headers(file: str) -> dict[str, Entry]:
    if not _is_safe(file):
        return {name: Entry(file, tuple(each.shape), each.dtype) for name, each in _unpickled(file).items()}
    library = _safetensors()
    entries = {}
    try:
        with library.safe_open(file, framework="pt", device="cpu") as opened:
            in_order = getattr(opened, "offset_keys", opened.keys)  # offset_keys: in the order of the file
            for name in in_order():
                header = opened.get_slice(name)
                dtype = _DTYPES.get(header.get_dtype())
                if dtype is None:
                    raise usage_error(
                        "weights in a dtype of torch",
                        f'"{name}" in {header.get_dtype()} in {file}',
                        "convert the file first",
                    )
                entries[name] = Entry(file, tuple(header.get_shape()), dtype)
    except library.SafetensorError as error:
        raise usage_error(f"a file of safetensors in {file}", str(error), "copy or download it again") from error
    return entries


def _safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError:
        raise usage_error(
            "the package safetensors, which reads these files", "no such package", "pip install safetensors"
        ) from None
    return safetensors


def _unpickled(file: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file that `torch.save` has written. They view the mapped file, if it can be mapped."""
    expected = f"a state_dict() of tensors in {file}"
    give = "give the file of a model's weights; noria.load reads what noria.save has written"
    contents: Any = None
    with _refusing(expected, give):
        try:
            contents = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # files from before torch 1.6 cannot be mapped
            contents = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(contents, dict):
        raise usage_error(expected, f"one {type(contents).__qualname__}", give)
    if others := [str(name) for name, each in contents.items() if not isinstance(each, torch.Tensor)]:
        raise usage_error(expected, f"{first_few(others)}, no tensor", give)
    return dict(contents)


@contextlib.contextmanager
def _refusing(expected: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of garbage, the unpickler raises many kinds
        found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise usage_error(expected, found, remedy) from error
