"""Room base: the three kinds of failure, amounts as text, and traces."""

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import noria
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from noria import _C
from noria._build_check import check_build

LANE = st.sampled_from(_C.LANES)
VERB = st.sampled_from(_C.VERBS)


# ---- errors ------------------------------------------------------------------------------------------------


def test_callers_mistake_says_what_was_expected_what_was_found_and_what_to_do():
    with pytest.raises(noria.UsageError, match=r'^noria expected a lane, but found "fetsch"\. Remedy: use one of comp'):
        _C.Span(0, "fetsch", "fetch", 0, 0, 1)


def test_the_three_kinds_of_failure_are_told_apart():
    kinds = (_C.UsageError, _C.InvariantError, _C.MachineError)
    for kind in kinds:
        assert issubclass(kind, RuntimeError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)


def test_usage_error_goes_by_its_public_name_and_travels_between_processes():
    assert repr(noria.UsageError) == "<class 'noria.UsageError'>"
    error = pickle.loads(pickle.dumps(noria.UsageError("noria expected a, but found b. Remedy: c")))
    assert type(error) is noria.UsageError
    assert str(error) == "noria expected a, but found b. Remedy: c"


# ---- bytes -------------------------------------------------------------------------------------------------


@given(st.integers(-(2**62), 2**62))
def test_amounts_are_exact_below_a_kibibyte_and_within_half_a_tenth_above(amount):
    number, unit = _C.format_bytes(amount).split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    if unit == "B":
        assert int(number) == amount
        assert abs(amount) < 1024
    else:
        assert abs(amount) >= 1024
        assert abs(float(number) * scale - amount) <= 0.05 * scale * (1 + 1e-9) + abs(amount) * 2**-50
        assert abs(float(number)) < 1024 or unit == "GiB"


def test_amounts_read_as_people_write_them():
    assert _C.format_bytes(812 * 2**20) == "812.0 MiB"
    assert _C.format_bytes(1023) == "1023 B"
    assert _C.format_bytes(2**20 - 1) == "1.0 MiB"  # not "1024.0 KiB"


# ---- traces ------------------------------------------------------------------------------------------------


@st.composite
def spans(draw):
    num_spans = draw(st.integers(0, 12))
    made = []
    for op in range(num_spans):
        start_us = draw(st.integers(0, 1000))
        waits = draw(st.lists(st.integers(-3, op - 1), unique=True, max_size=3)) if op else []
        made.append(
            _C.Span(
                op,
                draw(LANE),
                draw(VERB),
                draw(st.integers(-1, 3)),
                start_us,
                start_us + draw(st.integers(0, 50)),
                bytes=draw(st.integers(0, 2**40)),
                waits=waits,
            )
        )
    return made


def as_tuple(span):
    return span.op, span.lane, span.verb, span.unit, span.start_us, span.end_us, span.bytes, span.waits


@given(spans(), st.integers(0, 14))
def test_trace_keeps_the_newest_and_counts_what_it_dropped(made, capacity):
    trace = _C.Trace(capacity)
    for span in made:
        trace.add(span)
    kept = made[len(made) - min(capacity, len(made)) :]
    assert [as_tuple(span) for span in trace.spans()] == [as_tuple(span) for span in kept]
    assert trace.num_dropped == len(made) - len(kept)
    trace.clear()
    assert trace.spans() == []
    assert trace.num_dropped == 0


@given(spans(), st.lists(st.text(max_size=5), max_size=4))
@example([_C.Span(0, "fetch", "fetch", 0, 0, 1)], ['say "\\"\n'])
def test_picture_has_one_slice_for_each_span_and_one_arrow_for_each_wait(made, unit_names):
    trace = _C.Trace(100)
    for span in made:
        trace.add(span)
    unit_names = [name.encode("utf-8", "replace").decode() for name in unit_names]
    events = json.loads(trace.chrome_json(unit_names))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(rows.values()) == list(_C.LANES)

    slices = {event["args"]["op"]: event for event in events if event["ph"] == "X"}
    assert len(slices) == len(made)
    named = unit_names + ["0", "1", "2", "3"][len(unit_names) :]  # a unit without a name shows its number
    for span in made:
        slice_ = slices[span.op]
        unit = "" if span.unit < 0 else f" {named[span.unit]}"
        assert slice_["name"] == span.verb + unit
        assert rows[slice_["tid"]] == span.lane
        assert (slice_["ts"], slice_["dur"]) == (span.start_us, span.end_us - span.start_us)
        assert slice_["args"]["bytes"] == span.bytes

    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    known = {span.op for span in made}
    assert len(starts) == sum(wait in known for span in made for wait in span.waits)
    for arrow in starts.values():  # leaves from inside a slice, or it would hang in the air
        assert any(
            slice_["tid"] == arrow["tid"]
            and slice_["ts"] <= arrow["ts"]
            and (arrow["ts"] < slice_["ts"] + slice_["dur"] or slice_["dur"] == 0)
            for slice_ in slices.values()
        )


def test_spans_may_come_from_any_thread():
    trace = _C.Trace(1000)
    together = threading.Barrier(4)

    def add(lane):
        together.wait()
        for op in range(100):
            trace.add(_C.Span(op, lane, "fetch", 0, op, op + 1))

    threads = [threading.Thread(target=add, args=(lane,)) for lane in _C.LANES[:4]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in _C.LANES[:4]:
        assert [span.op for span in trace.spans() if span.lane == lane] == list(range(100))


def test_clock_never_runs_backwards_and_a_trace_begins_at_zero():
    readings = [_C.clock_us() for _ in range(100)]
    assert readings == sorted(readings)
    before = _C.clock_us()
    trace = _C.Trace(1)
    assert 0 <= trace.now_us <= _C.clock_us() - before + 1


# ---- the build check ---------------------------------------------------------------------------------------


def built_with(folder, version):
    (folder / "_built_with.json").write_text(json.dumps({"torch": version}))
    return folder


@pytest.mark.parametrize("found", ["2.13.0", "2.13.1+cu130", "2.13.0a0+git12"])
def test_engine_loads_beside_any_build_of_its_own_torch_minor(tmp_path, found):
    check_build(built_with(tmp_path, "2.13.0+cpu"), found)


@pytest.mark.parametrize("found", ["2.12.1", "2.14.0+cpu", "3.13.0", "2.1.0"])
def test_engine_built_against_another_torch_minor_is_refused_before_it_is_loaded(tmp_path, found):
    with pytest.raises(ImportError, match=rf"expected torch 2\.13\.\*.*found torch {found.split('+')[0]}.*Remedy: pip"):
        check_build(built_with(tmp_path, "2.13.0+cpu"), found)


def test_missing_engine_is_named_with_the_command_that_builds_it(tmp_path):
    with pytest.raises(ImportError, match=r"expected its engine.*found none.*Remedy: pip install"):
        check_build(tmp_path, "2.13.0")


@pytest.mark.parametrize(
    ("namespace", "taken", "key"),
    [
        ("_", "fallback(torch.library.fallthrough_kernel, 'DeferredInit')", "DeferredInit"),
        ("aten", "impl('mul_.Tensor', print, 'DeferredInit')", "DeferredInit"),
        ("aten", "impl('_foreach_add_.Scalar', print, 'TESTING_ONLY_GenericWrapper')", "TESTING_ONLY_GenericWrapper"),
    ],
)
def test_a_dispatch_key_that_another_library_has_taken_is_named_at_import(namespace, taken, key):
    code = f"""
import torch, torch.library
other = torch.library.Library("{namespace}", "IMPL")
other.{taken}
try:
    import noria
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"expected torch's dispatch key {key} free" in done.stdout
    assert "Remedy: use noria in a process that does not import that library" in done.stdout


def test_package_checks_the_build_before_it_loads_the_engine():
    text = Path(noria.__file__).read_text()
    assert text.index("_check_build(") < text.index("noria._C")
