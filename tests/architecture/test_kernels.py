"""The device code of noria's kernels: no contraction that the formula does not write, and denormals as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.texts import ROOT

BUILD = ROOT / "build" / "current"
ARITHMETIC = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?((?:add|sub|mul|div|fma|mad|sqrt|rcp|rsqrt|ex2|lg2)\.[\w.]*f(?:32|64))\s", re.M
)


def ptx(image: str) -> tuple[list[str], list[str]]:
    """The arithmetic of an image in floats: what the compiler chose, and what the source has written in PTX."""
    path: Path = BUILD / f"kernels_{image}.ptx"
    if not path.exists():
        pytest.skip(f"this build has no {path.name}: there was no nvcc")
    text = path.read_text()
    written = re.findall(r"// begin inline asm(.*?)// end inline asm", text, re.S)
    chosen = re.sub(r"// begin inline asm.*?// end inline asm", "", text, flags=re.S)
    return ARITHMETIC.findall(chosen), [each for part in written for each in ARITHMETIC.findall(part)]


@pytest.mark.parametrize("image", ["flushing", "keeping"])
def test_every_operation_says_how_it_rounds_so_none_is_contracted_later(image):
    chosen, written = ptx(image)
    assert len(chosen) > 20 and len(written) > 5
    strange = [each for each in (*chosen, *written) if ".rn" not in each]
    assert not strange
    assert not [each for each in (*chosen, *written) if each.startswith(("mad", "rcp", "rsqrt", "ex2", "lg2"))]


def test_rules_flush_denormals_and_what_multiplies_a_gradient_does_not():
    chosen, written = ptx("flushing")
    assert all(".ftz" in each for each in chosen)
    assert not any(".ftz" in each for each in written)


def test_lion_and_sums_keep_denormals():
    chosen, written = ptx("keeping")
    assert not any(".ftz" in each for each in (*chosen, *written))
