"""A virtual environment that sees every package of this Python, and has more of its own.

    python3 -m benchmarks.systems.beside FOLDER [--wheels FOLDER] PACKAGE... [-r FILE]

`python3 -m venv --system-site-packages` is not that: made from a virtual environment it shows the packages of the
Python under it, and not of the environment; and without `ensurepip` (Ubuntu's python3 without python3-venv) it fails.
Here what this Python sees is shown by a .pth file, its pip among it. Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path


def make(root: Path) -> Path:
    """Makes it anew; its interpreter. It has no packages of its own."""
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(root)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)}))
    # addsitedir, and not the plain path: the .pth files that lie there are read too, such as those of this function.
    lines = [f"import site; site.addsitedir({folder!r})" for folder in package_folders()]
    (own / "beside.pth").write_text("\n".join(lines) + "\n")
    return root / "bin" / "python"


def package_folders() -> list[str]:
    """Where this Python finds packages."""
    found = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return [folder for folder in found if os.path.isdir(folder)]


def install(python: Path, words: Sequence[str], wheels: Path | None = None) -> str | None:
    """Installs into an environment of `make`'s; what pip said where it could not. `words`: as for `pip install`.
    `wheels`: a folder, on a machine without an index."""
    if not words:
        return None
    if reason := _bring_pip(python, wheels):
        return reason
    offline = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
    command = [str(python), "-m", "pip", "install", "-q", *words, *offline]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or done.stderr.splitlines() or ["pip failed"])[-1]


def _bring_pip(python: Path, wheels: Path | None) -> str | None:
    """That of this Python, seen from there; else ensurepip's; else a wheel, which runs as it is and installs itself."""
    tries = [["-c", "import pip"], ["-m", "ensurepip"]]
    if carried := sorted(wheels.glob("pip-*.whl")) if wheels else []:
        tries.append([f"{carried[-1]}/pip", "install", "-q", "--no-index", str(carried[-1])])
    for words in tries:
        if subprocess.run([str(python), *words], capture_output=True).returncode == 0:
            return None
    return f"expected pip, ensurepip or a wheel of pip; {sys.executable} has none; remedy: apt-get install python3-pip"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="a folder to install from, on a machine without an index")
    parser.add_argument("-r", dest="files", action="append", default=[], help="a file of packages")
    parser.add_argument("packages", nargs="*")
    args = parser.parse_args()
    words = [*args.packages, *(word for file in args.files for word in ("-r", file))]
    if reason := install(make(args.folder), words, args.wheels):
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
