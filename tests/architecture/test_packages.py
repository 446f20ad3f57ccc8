"""The sdist is the tree as git knows it. What is built from it asks for the torch and TBB that it was built with."""

import re
import subprocess
import sys
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|python/noria\.egg-info/.*")
LEFT_BY_A_BUILD = ["python/noria/_C.cpython-300.so", "python/noria/_built_with.json", "tests/__pycache__/conftest.pyc"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what git knows, and of what is not committed yet."""
    pytest.importorskip("setuptools")
    if not (ROOT / ".git").exists():
        pytest.skip(f"only git knows what belongs to the tree, and {ROOT} is not a repository")
    folder = tmp_path_factory.mktemp("packages") / "tree"
    subprocess.run(["bash", "tools/copy_tree.sh", folder], cwd=ROOT, check=True)
    return folder


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ask_setuptools(tree, hook):
    """What pip asks it; the name of what it wrote into dist/."""
    code = f"import setuptools.build_meta as backend; print(backend.{hook}('dist'), end='')"
    (tree / "dist").mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return tree / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def known(tree):
    return files_in(tree)


@pytest.fixture(scope="module")
def sdist(tree, known, tmp_path_factory):
    """Unpacked. Its tree held what an earlier build leaves there."""
    for name in LEFT_BY_A_BUILD:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("of an earlier build")
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run(["tar", "-xf", ask_setuptools(tree, "build_sdist"), "-C", folder], check=True)
    for name in LEFT_BY_A_BUILD:
        (tree / name).unlink()
    [unpacked] = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def built_metadata(tree, known):  # after `known`: setuptools writes beside the sources
    return Parser().parsestr((ask_setuptools(tree, "prepare_metadata_for_build_wheel") / "METADATA").read_text())


def test_the_sdist_is_what_git_knows_and_nothing_that_was_built(sdist, known):
    found = {name: content for name, content in files_in(sdist).items() if not OF_SETUPTOOLS.fullmatch(name)}
    assert "tests/architecture/test_packages.py" in known
    assert found.keys() == known.keys()
    assert [name for name in known if found[name] != known[name]] == []


def requirements(metadata, package):
    return [each for each in metadata.get_all("Requires-Dist") if re.fullmatch(rf"{package}\b[^;]*", each)]


def test_sources_ask_for_any_torch_that_they_can_be_built_against(sdist):
    metadata = Parser().parsestr((sdist / "PKG-INFO").read_text())
    assert requirements(metadata, "torch") == ["torch>=2.11"]
    assert "requires-dist" in metadata.get_all("Dynamic"), "a resolver must not take this for the wheel's"


def test_what_is_built_asks_for_the_minor_version_of_torch_that_it_loads_with(built_metadata):
    major, minor = version("torch").split(".")[:2]
    assert requirements(built_metadata, "torch") == [f"torch=={major}.{minor}.*"]


def test_what_is_built_asks_for_no_older_tbb(built_metadata):
    major, minor = version("tbb").split(".")[:2]
    assert requirements(built_metadata, "tbb") == [f"tbb>={major}.{minor}"]


def test_wheel_and_sources_ask_for_the_same_packages(sdist, built_metadata):
    names = [
        [re.match(r"[\w-]+", each).group() for each in metadata.get_all("Requires-Dist")]
        for metadata in (Parser().parsestr((sdist / "PKG-INFO").read_text()), built_metadata)
    ]
    assert names[0] == names[1] and "numpy" in names[0]
