"""Refuses to load an engine that was built against another torch.

LibTorch's binary interface changes between minor versions: members are inserted mid-vtable, and structures change their
size. An engine built against another version crashes, at best. So this check reads the version that the build recorded.

Order: it runs before `noria._C` is imported.
"""

import json
from pathlib import Path

_REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall . (in noria's source tree)"


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def check_build(package: Path, torch_version: str) -> None:
    """Raises ImportError unless the engine in `package` was built against `torch_version`'s minor version."""
    record = package / "_built_with.json"
    if not record.exists():
        raise ImportError(
            f"noria expected its engine, built against torch {torch_version}, but found none in {package}. "
            f"Remedy: {_REBUILD}"
        )
    built_with = json.loads(record.read_text())["torch"]
    if _minor(built_with) != _minor(torch_version):
        raise ImportError(
            f"noria expected torch {'.'.join(_minor(built_with))}.*, against which it was built, "
            f"but found torch {torch_version}. Remedy: {_REBUILD}"
        )
