"""A stand-in for the python3 of a bare GPU machine, for `gpu_all.sh --rehearse`: a virtual environment with torch.

    python benchmarks/_bare_machine.py FOLDER

Made from the Python that runs this, which has torch. What makes such machines hard to install on is there: `python3` is
a virtual environment's; the Python under it was never given `ensurepip`, as Ubuntu's without python3-venv; and beside
torch with what torch requires there is only pip. FOLDER/bin is the first of the PATH there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

HAS = ["torch", "pip", *(each.name for each in metadata.distributions() if each.name.startswith("nvidia-"))]
TOOLS = ["cmake", "ninja"]


def link_all(entries: Iterable[Path], folder: Path, without: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        if entry.name not in without:
            (folder / entry.name).symlink_to(entry)


def python_without_ensurepip(folder: Path) -> Path:
    """The Python under this one, by links, but for ensurepip and its packages; its interpreter."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = Path(sysconfig.get_path("stdlib"))
    link_all(stdlib.iterdir(), folder / "lib" / version, without=("ensurepip", "site-packages", "dist-packages"))
    (folder / "lib" / version / "site-packages").mkdir()
    link_all(Path(sys.base_prefix, "lib").glob("libpython*"), folder / "lib")
    headers = Path(sysconfig.get_path("include", vars={"installed_base": sys.base_prefix}))
    link_all([headers], folder / "include")
    interpreter = folder / "bin" / version
    interpreter.parent.mkdir()
    shutil.copy(Path(sys.executable).resolve(), interpreter)  # a copy: a link would lead it to its own library again
    return interpreter


def required(names: list[str]) -> list[metadata.Distribution]:
    """They, and all that they require here."""
    found: dict[str, metadata.Distribution] = {}
    names = [*names]
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform, or an extra
        names += [re.split(r"[^\w.-]", each)[0] for each in found[name].requires or [] if "extra ==" not in each]
    return list(found.values())


def packages_of(distribution: metadata.Distribution) -> set[Path]:
    """What of it lies in site-packages itself."""
    places = (Path(str(distribution.locate_file(file.parts[0]))) for file in distribution.files or [])
    return {place for place in places if place.name != ".." and place.exists()}


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    base = python_without_ensurepip(folder / "python_under_it")
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    entries = set().union(*(packages_of(each) for each in required(HAS)))
    link_all(sorted(entries), site, without=("__pycache__",))
    tools = [Path(sys.executable).with_name(tool) for tool in TOOLS]
    found = [shutil.which(tool if tool.exists() else tool.name) for tool in tools]
    link_all([Path(tool).absolute() for tool in found if tool], folder / "bin")
    has = subprocess.run([folder / "bin" / "python3", "-c", "import torch, pip"], capture_output=True)
    lacks = subprocess.run([folder / "bin" / "python3", "-c", "import ensurepip"], capture_output=True)
    assert has.returncode == 0, has.stderr.decode()
    assert lacks.returncode != 0, "ensurepip is still there"
    return 0


if __name__ == "__main__":
    sys.exit(main())
