"""The benchmark of files: all ways move the bytes that they say, and bounds are those of its page."""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import noria
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import files
from _disk import DIRECTIONS, MIB, Door, Fio, Memory, Traffic, jobs_in
from overlap import Chain

from benchmarks.systems.by_noria import NoriaFiles, least_host_memory
from benchmarks.systems.catalogue import chosen
from benchmarks.systems.task import Task


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a real file system, for this user alone."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as found:
        yield Path(found)


def run(monkeypatch: pytest.MonkeyPatch, *words: Any) -> dict[str, Any]:
    """The result of a part."""
    out = Path(words[-1])
    monkeypatch.setattr(sys, "argv", ["benchmarks/files.py", "--quick", *map(str, words[:-1]), "--out", str(out)])
    threads = torch.get_num_threads()
    try:
        assert files.main() == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads(out.read_text())


def test_the_door_reads_what_it_has_written_and_moves_all_bytes(folder):
    traffic = Traffic(file_bytes=5 * MIB, record=2 * MIB, depth=4, part=MIB // 2)
    way = Door(folder, traffic, Memory(traffic.record), "threads")
    assert way.name == "threads" and way._store.file_bytes == 2 * traffic.file_bytes
    for direction in DIRECTIONS:
        assert way.seconds(direction) > 0  # reads compare checksums
    assert traffic.bytes_of("both") == 2 * traffic.bytes_of("read") == 2 * traffic.bytes_of("write")
    assert not list(folder.iterdir())


def test_a_write_that_fails_beside_reads_is_raised(folder, monkeypatch):
    traffic = Traffic(file_bytes=2 * MIB, record=2 * MIB)
    way = Door(folder, traffic, Memory(traffic.record), "threads")

    def fail() -> None:
        raise OSError("the disk is worn out")

    monkeypatch.setattr(way, "_write", fail)
    with pytest.raises(OSError, match="worn out"):
        way.seconds("both")


@pytest.mark.skipif(bool(Fio.why_missing()), reason=str(Fio.why_missing()))
def test_fio_moves_the_same_bytes_of_the_same_file(folder):
    traffic = Traffic(file_bytes=4 * MIB, record=2 * MIB)
    way = Door(folder, traffic, Memory(traffic.record), "threads")
    fio = Fio(way.path, traffic)
    for direction in DIRECTIONS:
        assert fio.seconds(direction) > 0
    way._read()  # fio has not written to this half, so its checksums hold
    with pytest.raises(noria.MachineError, match="checksum differs"):
        way._store.read(way._to_write[0], way._memory.to_read)
    assert not list(folder.iterdir())


def test_notes_of_fio_before_its_json_are_skipped():
    assert jobs_in('fio: a note\n{"jobs": [{"error": 0}]}') == [{"error": 0}]
    assert jobs_in("fio: nothing but a note") == []


def test_the_door_is_measured_without_fio_too_and_says_so(folder, monkeypatch):
    monkeypatch.setattr(Fio, "why_missing", staticmethod(lambda: "there is no fio: apt-get install fio"))
    result = run(monkeypatch, "door", "--file-bytes", "4MiB", "--folder", folder, folder / "result.json")
    assert "there is no fio: apt-get install fio" in result["settings"]["notes"]
    assert all(result["summary"][direction]["of_fio"] == {} for direction in DIRECTIONS)
    assert all(len(taken) == 2 for ways in result["samples"].values() for taken in ways.values())


def test_the_sweep_has_all_depths_and_sizes(folder, monkeypatch):
    result = run(monkeypatch, "sweep", "--file-bytes", "16MiB", "--folder", folder, folder / "result.json")
    assert len(result["summary"]) == 9
    assert all(found[direction]["median"] > 0 for found in result["summary"].values() for direction in DIRECTIONS)


def test_checksums_are_measured_beside_a_read_and_memcpy(folder, monkeypatch):
    result = run(monkeypatch, "checksums", "--file-bytes", "16MiB", "--folder", folder, folder / "result.json")
    found = result["summary"]["gib_s"]
    kinds = itertools.product(("in the first cache", "over memory"), ("checksum", "read", "memcpy"))
    assert list(found) == [*(f"{kind} {where}" for where, kind in kinds), "disk"]
    assert all(len(taken) == 2 and min(taken) > 0 for taken in result["samples"].values())
    samples = result["samples"]
    shares = [disk / each for disk, each in zip(samples["disk"], samples["checksum over memory"], strict=True)]
    assert result["summary"]["share of a core"]["high"] == pytest.approx(max(shares))


def test_what_is_measured_is_a_checksum_of_all_bytes():
    loops = files.checksum_loops()
    memory = bytearray(range(256)) * 16
    begin = (ctypes.c_char * len(memory)).from_buffer(memory)
    loops.checksums.restype = loops.copies.restype = ctypes.c_uint64
    sizes = [ctypes.c_size_t(each) for each in (1024, 4, 1024)]
    found = set()
    for at in (None, 0, 1023, 1024, 4095):
        if at is not None:
            memory[at] ^= 1
        found.add(loops.checksums(begin, None, *sizes))
    assert len(found) == 5
    to = ctypes.create_string_buffer(len(memory))
    loops.copies(begin, to, *sizes)
    assert to.raw == bytes(memory)


@pytest.mark.rest
def test_steps_keep_their_losses_at_every_speed_of_the_disk(folder, monkeypatch):
    words = ("step", "--blocks", 6, "--width", 64, "--folder", folder)
    result = run(monkeypatch, *words, folder / "result.json")
    summary = result["summary"]
    assert summary.pop("same_losses")
    names = [f"{mode}, {name}" for mode, name in itertools.product(files.MODES, ("full", "1/2", "1/4"))]
    assert list(summary) == names
    assert result["settings"]["file_bytes"] >= 6 * 8 * 64 * 65
    for name in names:
        assert summary[name]["write_times"] == pytest.approx(1) and summary[name]["read_times"] >= 0.9
        speed = result["settings"]["speed_gib_s"]
        share = {"full": None, "1/2": 0.5, "1/4": 0.25}[name.rpartition(", ")[2]]
        if share is not None:
            assert summary[name]["read_gib_s"] <= 1.01 * share * speed["read"]
            assert summary[name]["write_gib_s"] <= 1.01 * share * speed["write"]


def test_bounds_are_those_of_the_page():
    alone = {"step_s": 10.0, "forward_s": 4.0, "backward_s": 6.0}
    fast = {"read_s": 3.0, "write_s": 3.0, "last": 0.25}
    assert files.bound_s("backward", fast, alone) == files.bound_s("auto", fast, alone) == 10
    equal = {"read_s": 10.0, "write_s": 8.0, "last": 0.25}
    assert files.bound_s("backward", equal, alone) == 10
    assert files.bound_s("auto", equal, alone) == 16  # forward alone hides reads
    slow = {"read_s": 10.0, "write_s": 40.0, "last": 0.25}
    assert files.bound_s("backward", slow, alone) == 40
    assert files.bound_s("auto", slow, alone) == 40  # the last writes are behind backward: 30 + 6 is less
    assert files.bound_s("auto", slow | {"last": 0.0}, alone) == 46


def test_unknown_parts_and_a_result_for_several_are_refused(monkeypatch, capsys):
    for words in (["doors"], ["door", "step", "--out", "x.json"]):
        monkeypatch.setattr(sys, "argv", ["benchmarks/files.py", *words])
        with pytest.raises(SystemExit):
            files.main()
    said = capsys.readouterr().err
    assert "found doors" in said and "choose a part" in said


def test_the_largest_model_is_searched_by_the_program_for_it(tmp_path, monkeypatch):
    commands: list[list[str]] = []

    def run_instead(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(files.subprocess, "run", run_instead)
    words = ["largest", "--folder", str(tmp_path), "--out", str(tmp_path / "largest.json")]
    monkeypatch.setattr(sys, "argv", ["benchmarks/files.py", *words])
    assert files.main() == 0
    [command] = commands
    assert command[1:4] == ["-m", "benchmarks.largest", "--systems"]
    assert command[command.index("--host-memory") + 1] == "2GiB"
    assert chosen(command[4])[1:] == ["noria backward", "noria files"]


def test_least_host_memory_is_the_least(folder):
    model = Chain(6, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    policy = {"device": "cpu", "kernel": "fused", "draft_memory": 0, "files": folder}
    least = least_host_memory(model, optimizer, **policy)
    assert len(noria.plan(model, optimizer, **policy, host_memory=least).files.sizes) == 6
    with pytest.raises(noria.UsageError, match=f"\\({least} bytes\\)"):
        noria.plan(model, optimizer, **policy, host_memory=least - 1)


@pytest.mark.parametrize("absent", [True, False])
def test_the_rival_takes_turns_or_is_named_with_its_reason(folder, monkeypatch, capsys, absent):
    """Here noria without files stands in for the rival, which has an environment of its own."""
    monkeypatch.setattr(files, "RIVAL", "noria backward")
    monkeypatch.setattr(files, "reasons", lambda names: {"noria backward": "no libaio"} if absent else {})
    result = run(monkeypatch, "rival", "--rounds", "2", "--folder", folder / "files", folder / "result.json")
    found = result["summary"]
    assert len(result["samples"]["noria files"]) == 2 and found["noria files"]["host_bytes_per_parameter"] > 4
    assert ("rival / noria" in found) == ("noria backward" in found) == (not absent)
    assert ("no libaio" in capsys.readouterr().out) == absent
    if not absent:
        ours, theirs = (
            [turn["losses"] for turn in result["samples"][name]] for name in ("noria files", "noria backward")
        )
        assert ours == theirs


def test_the_system_with_files_keeps_all_moments_there(folder):
    system = NoriaFiles(Task("family-6x64", "", dtype="bf16", clip=0.0, host_memory=1 << 30, files=str(folder)))
    rows = noria.report(system.model, write_trace=False).ledger
    elements = sum(each.numel() for each in system.model.parameters())
    assert sum(row.taken for row in rows if row.place == "files") >= 8 * elements
    assert not any(row.taken for row in rows if row.place == "host" and "moment" in row.purpose)
