"""Waits of ops that move state between files and host memory matter: left out, with its giver late, a kind of wait
changes a run, or ends it. Kept, it does not.

State that has not been read yet may have no memory. An op that comes too early then ends its process, or fails.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from tests.journeys.file_runs import FREEZES, Runs, differ, runs_in
from tests.killed_run import SAVE_EVERY

KINDS = {
    "read_state -> update on state_slot (WAW)": 0,
    "update -> write_state on state_slot (RAW)": 0,
    "write_state -> read_state on state_slot (WAR)": 0,
    "read_state -> load on state_slot (WAW)": 0,
    "read_weights -> fetch on weights_slot (RAW)": FREEZES,
    "fetch -> read_weights on weights_slot (WAR)": FREEZES,
}
"""With the policy of the runs that show it."""
ENDED_BY_ACCESS = (-signal.SIGSEGV, -signal.SIGBUS)
REFUSED = re.compile(r"^noria\..* a file in ", re.MULTILINE)  # a checksum differs, or a write has failed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_in(tmp_path_factory.mktemp("waits")) as runs:
        yield runs


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_wrong_without_this_kind_of_wait_and_right_with_it(runs, kind):
    folder = runs.new_folder()
    policy = KINDS[kind]
    prompt = runs.train(folder / "prompt.pt", policy, until=SAVE_EVERY)
    assert kind in json.loads(prompt.out.splitlines()[-2])
    for hold_us in (2_000, 10_000, 50_000):  # later and later, should the machine be busy
        orders = {"until": SAVE_EVERY, "hold_us": {kind.split()[0]: hold_us}}
        runs.train(folder / f"kept {hold_us}", policy, **orders)
        assert not differ(folder / f"kept {hold_us}", folder / "prompt.pt")
        omitted = runs.run(folder / f"omitted {hold_us}", policy, omit=kind, **orders)
        if omitted.status in ENDED_BY_ACCESS or REFUSED.search(omitted.error):
            return
        assert omitted.status == 0, f"{omitted.status}: {omitted.out}{omitted.error}"
        if differ(folder / f"omitted {hold_us}", folder / "prompt.pt"):
            return
    pytest.fail("nothing went wrong without it: the wait is not needed, or this run does not show why")
