"""One word per concept: names that gave way to others do not come back.

Not listed is an old name that is rightly in use for something else, such as the C++ classes `Updates` and `PeerCopies`.
"""

from __future__ import annotations

import io
import re
import tokenize

import pytest

from tests.architecture.texts import ROOT, TEXTS

# Old name: the one that is used now.
STEMS = {
    "custodian": "EngineCallbacks",
    "custody": "TorchBridge",
    "everybodys": "gathered",
    "saver": "ActivationStore",
    "urgency": "priority_of",
}
"""No longer name contains one of these, either."""

NAMES = {
    "ByTorch": "TorchStep",
    "DraftJudge": "DraftPolicy",
    "GradientParts": "ShardedNorms",
    "InsideBackward": "BackwardStep",
    "LaterGradients": "Accumulation",
    "LaterMemory": "LateAllocations",
    "StateDicts": "ModuleStateDicts",
    "StateParts": "OptimizerShards",
    "add_summed": "add_reduced",
    "early_": "eager_",
    "end_sums": "end_reductions",
    "forget_summed": "forget_reduced",
    "hold_unsummed": "hold_unreduced",
    "holds_unsummed": "holds_unreduced",
    "inside_backward": "backward_step",
    "is_cut": "is_sharded",
    "is_summed": "is_reduced",
    "is_uneven": "has_diverged",
    "is_unsummed": "is_unreduced",
    "kUnsummedRegion": "kUnreducedRegion",
    "left_unsummed": "left_unreduced",
    "mend": "clear_torn",
    "note_came": "note_arrived",
    "part_scratch": "shard_scratch",
    "refuse_other_sums": "refuse_other_reductions",
    "refuse_unsummed": "refuse_unreduced",
    "set_sums_rest": "set_reduces_rest",
    "settle_all": "run_all_deferred",
    "shares_": "unit_shards_",
    "sum_rest": "reduce_rest",
    "sums_rest": "reduces_rest",
    "tear": "mark_torn",
    "unsummed_buffer": "unreduced_buffer",
    "unsummed_gradient": "unreduced_gradient",
    "was_uneven": "has_diverged",
}

WORDS = {
    "Beside": "DeviceBuffers",
    "Fused": "HostKernels",
    "Giving": "ShardSend",
    "Leaving": "PendingOffload",
    "Load": "TransferBatch",
    "Meeting": "SyncPoint",
    "Members": "ParamGroups",
    "Norms": "GradNorm",
    "Passes": "ModuleHooks",
    "Share": "UnitShard",
    "Shares": "UnitShards",
    "Shown": "GatheredWeights",
    "Stages": "StageGroup",
    "Standing": "RankPosition",
    "Stretch": "Extent",
    "Stretches": "Extents",
    "Taking": "ShardReceive",
    "Together": "RankSync",
}
"""Names that are words, so they are looked for in code alone: "Shares the backend." may begin a sentence."""

FILES = {
    "noria/beside": "host/device_buffers",
    "noria/contents": "dist/load_fingerprint",
    "noria/folders": "checkpoint/dcp_load",
    "noria/kernels": "model/update_rules",
    "noria/lending": "pipeline/peer_memory",
    "noria/links": "pipeline/peer_links",
    "noria/modes": "torch_state",
    "noria/moments": "model/moment_formats",
    "noria/parts": "dist/shard_tensor",
    "noria/record": "forward/operator_watch",
    "noria/sharded": "checkpoint/dcp_state",
    "noria/stages": "pipeline/pipelining_compat",
    "noria/stand_ins": "step/parameter_swap",
    "updates/by_torch": "step/torch_step",
    "updates/fused": "step/host_kernels",
    "updates/gradient_parts": "step/sharded_norms",
    "updates/gradients": "step/collect_grads",
    "updates/home_state": "step/optimizer_state",
    "updates/inside_backward": "step/backward_step",
    "updates/members": "step/param_groups",
    "updates/norms": "step/grad_norm",
    "updates/parts": "step/sharded_state",
    "updates/state": "step/state_view",
    "updates/step": "step/driver",
    "updates/steps": "step/step_counts",
    "updates/whole": "step/whole_step",
    "updates/worker": "model/shadow_optimizer",
}
"""Modules in python/noria. A text may name one with slashes or with dots."""

CONTENTS = {str(path.relative_to(ROOT)): path.read_text() for path in TEXTS if path.name != "test_old_names.py"}


def names_in_code(file: str, text: str) -> set[str]:
    """Returns the names in a file's code: without comments and strings. A page's code is what backticks mark."""
    if file.endswith((".py", ".pyi")):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return {token.string for token in tokens if token.type == tokenize.NAME}
    if file.endswith((".cpp", ".h", ".inc")):
        return set(re.findall(r"\w+", re.sub(r'"(?:\\.|[^"\\\n])*"|//.*', "", text)))
    return {name for code in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"\w+", code)}


def old_names(file: str, text: str) -> set[str]:
    """Returns the old names that a file uses."""
    small = text.lower()
    found = {each for each in STEMS if each in small}
    found |= {each for each in NAMES if each in text and re.search(rf"(?<!\w)_?{each}_?(?!\w)", text)}
    for each in FILES:
        folder, _, module = each.partition("/")
        if module in text and re.search(rf"\b{folder}[./]{module}\b(?!\()", text):
            found.add(each)
    if words := {each for each in WORDS if each in text}:
        found |= words & names_in_code(file, text)
    return found


def test_no_old_name_is_used():
    now = STEMS | NAMES | WORDS | FILES
    used = {file: old_names(file, text) for file, text in CONTENTS.items()}
    assert [(file, f"{old} is called {now[old]} now") for file, names in used.items() for old in sorted(names)] == []


def test_no_file_has_an_old_name():
    files = {file.removeprefix("python/").partition(".")[0] for file in CONTENTS}
    assert not files & ({*FILES} | {f"noria/{old}" for old in FILES})
    assert not [file for file in files for stem in STEMS if stem in file]


@pytest.mark.parametrize("new", sorted({*STEMS.values(), *NAMES.values(), *WORDS.values()}))
def test_the_name_that_is_used_now_is_used(new):
    assert any(re.search(rf"\b{new}\b", text) for file, text in CONTENTS.items() if file.startswith(("csrc", "python")))


@pytest.mark.parametrize("new", FILES.values())
def test_the_file_that_is_there_now_is_there(new):
    assert f"python/noria/{new}.py" in CONTENTS


@pytest.mark.parametrize(
    ("file", "text", "old"),
    [
        ("a.py", "wrapped.custody", "custody"),
        ("a.py", "getattr(wrapped, 'custody')", "custody"),
        ("a.h", "struct CustodyUnit {};", "custody"),
        ("a.h", "std::shared_ptr<Kept> saver_;", "saver"),
        ("a.cpp", "owners_.drainer.is_summed(unit)", "is_summed"),
        ("a.cpp", "early_[unit]", "early_"),
        ("a.md", "`engine.mend()` ends it", "mend"),
        ("a.cpp", "Stretch stretch;", "Stretch"),
        ("a.py", "self.beside = Beside(plan)", "Beside"),
        ("a.md", "An `Saved::Stretch` is", "Stretch"),
        ("a.py", "from noria.updates.members import found", "updates/members"),
        ("CHANGELOG.md", "- `noria/stand_ins.py` is new", "noria/stand_ins"),
    ],
)
def test_an_old_name_would_be_seen(file, text, old):
    assert old_names(file, text) == {old}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.py", '"""Shares the backend."""  # Taking turns'),
        ("a.h", '/// Passes on what it throws.\nconst char* text = "Together";'),
        ("a.md", "Stages meet. Members of `a group` do."),
        ("a.cpp", "TEST(Watched, what_is_moved_to) {}"),
        ("a.py", "updates.step()"),
    ],
)
def test_a_word_of_a_sentence_is_no_old_name(file, text):
    assert old_names(file, text) == set()
