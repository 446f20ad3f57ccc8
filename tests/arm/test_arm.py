"""The host's updates on ARM, compiled by Debian's cross compiler and run by qemu: the bits of those on x86.

Products that round up to 2^-126 were shown to matter one by one: if any `product` or `fused` of optim/update_rules.inc
or optim/state_formats.inc is made plain, the comparison fails."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOST = ROOT / "build" / "current"
CROSS = ROOT / "build" / "arm"
NEEDED = {
    "aarch64-linux-gnu-g++": "apt-get install g++-aarch64-linux-gnu",
    "qemu-aarch64": "apt-get install qemu-user",
}
MISSING = [f"{tool} is missing ({how})" for tool, how in NEEDED.items() if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING)),
    pytest.mark.skipif(not HOST.exists(), reason=f"there is no {HOST}: noria was built elsewhere"),
]


def sve2(*times):
    """Processors that qemu knows, with SVE registers of so many times 128 bits. Wide ones take it a minute or more."""
    return {f"max,sve-max-vq={each}": "sve2" for each in times}


# `make test-all` leaves out cases of a test that has several (--share). So one case goes through these.
EACH_DAY = {"cortex-a72": "neon", **sve2(1, 4)}
OTHERS = sve2(2, 3, 8, 16)


def cmake_cache(name):
    lines = (HOST / "CMakeCache.txt").read_text().splitlines()
    return next(line.split("=", 1)[1] for line in lines if line.startswith(f"{name}:"))


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cross():
    cmake = cmake_cache("CMAKE_COMMAND")
    run(
        *(cmake, "-S", ROOT, "-B", CROSS, f"-G{cmake_cache('CMAKE_GENERATOR')}", "-DNORIA_PYTHON=OFF"),
        f"-DCMAKE_MAKE_PROGRAM={cmake_cache('CMAKE_MAKE_PROGRAM')}",
        f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'tests' / 'arm' / 'toolchain.cmake'}",
        f"-DTBB_DIR={cmake_cache('TBB_DIR')}",  # its headers serve every architecture
    )
    return lambda target: run(cmake, "--build", CROSS, "--target", target, "--parallel", "2")


@pytest.fixture(scope="module")
def vectors(cross, tmp_path_factory):
    """What the host's widest kernels make of the samples, in a file; the ARM program is built, too."""
    run(cmake_cache("CMAKE_COMMAND"), "--build", HOST, "--target", "update_vectors")
    cross("update_vectors")
    path = tmp_path_factory.mktemp("arm") / "vectors"
    run(HOST / "update_vectors", "write", path)
    return path


def by_qemu(processor, *arguments):
    command = ["qemu-aarch64", "-cpu", processor, CROSS / "update_vectors", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def assert_same_updates(vectors, processors):
    for processor, instruction_set in processors.items():
        failed, said = by_qemu(processor, "compare", vectors, instruction_set)
        assert not failed, said
        assert "compared 68 cases" in said


def assert_same_adafactor(processors):
    of_host = subprocess.run([HOST / "update_vectors", "adafactor"], capture_output=True, text=True, check=True)
    assert len({line.split()[-1] for line in of_host.stdout.splitlines()}) == 16
    for processor, instruction_set in processors.items():
        assert by_qemu(processor, "adafactor", instruction_set) == (0, of_host.stdout)


def test_updates_on_arm_have_the_bits_of_the_host(vectors):
    assert_same_updates(vectors, EACH_DAY)


@pytest.mark.parametrize("processor", OTHERS)
def test_updates_in_sve_registers_of_other_widths_have_the_bits_of_the_host(vectors, processor):
    assert_same_updates(vectors, {processor: OTHERS[processor]})


@pytest.mark.usefixtures("vectors")  # which builds the programs
def test_adafactor_on_arm_has_the_bits_of_the_host():
    assert_same_adafactor(EACH_DAY)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("processor", OTHERS)
def test_adafactor_in_sve_registers_of_other_widths_has_the_bits_of_the_host(processor):
    assert_same_adafactor({processor: OTHERS[processor]})


def test_a_bit_that_differs_is_found(vectors, tmp_path):
    content = bytearray(vectors.read_bytes())
    content[-9] ^= 1  # the last code that must come out; behind it, the size of the second moments, which are missing
    other = tmp_path / "vectors"
    other.write_bytes(content)
    failed, said = by_qemu("cortex-a72", "compare", other, "neon")
    assert failed and said.count("differ") == 1, said


def test_the_core_compiles_for_arm(cross):
    cross("noria_core")
