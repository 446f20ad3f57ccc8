"""Lists the files with text that noria's authors have written."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FOLDERS = ("benchmarks", "csrc", "docs", "examples", "kernels", "python", "tests", "tools")
_SUFFIXES = (".cpp", ".cu", ".h", ".inc", ".md", ".py", ".pyi", ".sh", ".supp", ".toml")
_OTHERS = (
    ".ci/run",
    "CHANGELOG.md",
    "CMakeLists.txt",
    "CONTRIBUTING.md",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "setup.py",
)

TEXTS = [
    *(ROOT / name for name in _OTHERS),
    *(path for folder in _FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in _SUFFIXES),
]

PAGES = [path for path in TEXTS if path.suffix == ".md" and path.parent.name != "results"]
