"""One word per concept: names that gave way to others do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Old name: the one that is used now.
RENAMED = {
    "Custodian": "EngineCallbacks",
    "Custody": "TorchBridge",
    "custody": "bridge, or the room's own name",
    "Beside": "DeviceBuffers",
    "ByTorch": "TorchStep",
    "DraftJudge": "DraftPolicy",
    "GradientParts": "ShardedNorms",
    "InsideBackward": "BackwardStep",
    "LaterGradients": "Accumulation",
    "LaterMemory": "LateAllocations",
    "StateParts": "OptimizerShards",
    "Saver": "ActivationStore",
    "Shares": "UnitShards",
    "Standing": "RankPosition",
    "Stretch": "Extent",
    "Taking": "ShardReceive",
    "change_places": "swap_with_spare",
    "everybodys": "gathered",
    "is_moved": "is_swapped",
    "is_unsummed": "is_unreduced",
    "settle_all": "run_all_deferred",
    "unsummed_buffer": "unreduced_buffer",
    "urgency_of": "priority_of",
}

WORDS = {"Beside", "Shares", "Standing", "Stretch", "Taking"}
"""Old names that are words: "Shares the backend." may begin a sentence."""

SOURCES = [
    path
    for folder in ("csrc", "python", "docs", "benchmarks", "examples", "tools")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".pyi", ".h", ".cpp", ".inc", ".md", ".sh")
]


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_is_not_used(name):
    pattern = re.compile(rf'(?<![\w."]){name}(?![\w"])')
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and not (name in WORDS and re.search(rf"\b{name} [a-z]", line))
    ]
    assert not found, f"it is called {RENAMED[name]} now"


def test_there_are_sources_to_look_at():
    assert len(SOURCES) > 200
