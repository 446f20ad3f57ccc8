"""CMake does the building; this file says where the result goes, and what it needs. See pyproject.toml for the rest."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FROM_SOURCE = {"torch": ">=2.11", "tbb": ">=2021.13", "numpy": "", "rich": ""}


def requirements():
    """The sources need what they say. What is built loads with one minor version of torch, and with no older TBB."""
    needs = dict(FROM_SOURCE)
    if "sdist" not in sys.argv:
        for package, specifier in (("torch", "=={}.*"), ("tbb", ">={}")):
            if found := installed(package):
                needs[package] = specifier.format(".".join(found.split("+")[0].split(".")[:2]))
    return [package + specifier for package, specifier in needs.items()]


def installed(package):  # its version, or None: a build that pip isolates sees no torch
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tool(name):  # the environment's cmake and ninja, even when it is not activated
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path)


class CMakeBuild(build_ext):
    def run(self):
        self.in_place = bool(self.inplace)  # `-e .` too; setuptools clears it while the extensions are built
        super().run()

    def build_extension(self, ext):
        torch_version = installed("torch")
        if torch_version is None:
            raise SystemExit(
                "noria expected an installed torch, against which it is built, but found none in this environment. "
                "Remedy: pip install --no-build-isolation ."
            )
        cmake, ninja = tool("cmake"), tool("ninja")
        if cmake is None:
            raise SystemExit(
                "noria expected cmake >= 3.25, but found none. Remedy: pip install 'cmake>=3.25' ninja tbb-devel"
            )

        # One persistent tree per (python, torch, environment): incremental, and never a stale TBB or torch.
        key = hashlib.sha1(sys.prefix.encode()).hexdigest()[:6]
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{torch_version}-{key}"
        build.mkdir(parents=True, exist_ok=True)
        if self.in_place:
            current = ROOT / "build" / "current"  # for ctest, clang-tidy, editors and the tests
            current.unlink(missing_ok=True)
            current.symlink_to(build.name)

        config = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DNORIA_ABSOLUTE_RPATHS={'ON' if self.in_place else 'OFF'}",
            *os.environ.get("NORIA_CMAKE_ARGS", "").split(),
        ]
        if ninja:
            config += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        prefix = ROOT / "python" if self.in_place else Path(self.get_ext_fullpath(ext.name)).resolve().parent.parent
        install = [cmake, "--install", build, "--component", "python", "--prefix", prefix, "--strip"]
        subprocess.run([cmake, "-S", ROOT, "-B", build, *config], check=True)
        subprocess.run([cmake, "--build", build, "--parallel", jobs], check=True)
        subprocess.run(install, check=True)

    def copy_extensions_to_source(self):
        pass  # an editable build is installed into python/ already, with the record of what it was built with


setup(
    install_requires=requirements(),
    ext_modules=[Extension("noria._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
