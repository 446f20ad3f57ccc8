"""What lies in files: as little as must, spread over the model, and never more than the cap."""

from __future__ import annotations

import re
from typing import Any

import noria
import pytest
import torch
from torch import nn

from benchmarks.systems.by_noria import least_host_memory

WIDTHS = [64] * 16


def model(widths: list[int] = WIDTHS) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for width in widths))


def plan(widths: list[int] = WIDTHS, **policy: Any) -> Any:
    made = model(widths)
    optimizer = torch.optim.AdamW(made.parameters())
    return noria.plan(made, optimizer, device="cpu", units=[nn.Linear], kernel="fused", **policy)


def host_bytes(planned: Any) -> int:
    return sum(size for place, _, size in planned.rows() if place == "host")


def least(widths: list[int] = WIDTHS, **policy: Any) -> int:
    made = model(widths)
    policy = {"device": "cpu", "units": [nn.Linear], "kernel": "fused", "files": "/never/made", **policy}
    return least_host_memory(made, torch.optim.AdamW(made.parameters()), **policy)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_the_home_fits_and_no_more_lies_in_files_than_must(share, state_dtype):
    whole = host_bytes(plan(state_dtype=state_dtype))
    few = least(state_dtype=state_dtype)
    room = int(few + share * (whole - few))
    planned = plan(files="/never/made", host_memory=room, state_dtype=state_dtype)
    assert host_bytes(planned) <= room
    if share == 1.0:
        assert not planned.files.sizes
    else:
        one_less = host_bytes(planned) + max(planned.files.sizes.values())
        assert one_less > room, "one unit more could have stayed in memory"


def test_slots_of_the_gradient_ring_drive_no_state_into_files_for_nothing():
    """The ring has six slots if nothing lies in files, and eight if all does. The least are four."""
    policy: dict[str, Any] = {"update": "backward", "draft_memory": 0, "widths": [64] * 24}
    whole, few = host_bytes(plan(**policy)), least(**policy)
    slot = plan(**policy).ring.slot_bytes
    found = [plan(files="/never/made", host_memory=room, **policy) for room in range(few, whole + slot, slot)]
    for planned, room in zip(found, range(few, whole + slot, slot), strict=True):
        assert planned.files.is_used == (room < whole - 2 * slot)
        if planned.files.is_used:
            assert planned.ring.num_slots <= 4 + planned.files.most_postponed
            assert planned.ring.most_postponed == planned.ring.num_slots - 4
    used = [len(planned.files.sizes) for planned in found]
    assert used == sorted(used, reverse=True)
    assert [planned.ring.num_slots for planned in found[:6]] == [4, 5, 6, 7, 8, 8] and found[-1].ring.num_slots == 6


def test_undo_logs_take_what_state_in_files_leaves(monkeypatch):
    monkeypatch.setattr("noria.model.layout.SLOTS_PER_ELEMENT", 0.03)  # else a log is larger than a record
    (log,) = set(plan().draftable.values())
    few, whole = least(), host_bytes(plan(draft_memory=3 * log))
    drafted = set()
    for room in range(few, whole + log, log // 2):
        planned, without = (plan(files="/never/made", draft_memory=size, host_memory=room) for size in (3 * log, 0))
        assert planned.files == without.files
        assert host_bytes(planned) <= room
        assert not planned.drafted & planned.files.sizes.keys()
        left = (room - host_bytes(without)) // log
        assert len(planned.drafted) == min(3, left, len(planned.units) - len(planned.files.sizes))
        drafted.add((planned.files.is_used, len(planned.drafted)))
    assert drafted > {(True, 0), (True, 1), (False, 0), (False, 3)}


def test_units_in_files_are_spread_over_the_model():
    whole, few = host_bytes(plan()), least()
    chosen = sorted(plan(files="/never/made", host_memory=(whole + few) // 2).files.sizes)
    gaps = [after - before for before, after in zip([-1, *chosen], [*chosen, len(WIDTHS)], strict=True)]
    assert 4 <= len(chosen) <= 12
    assert max(gaps) <= 4


def test_a_unit_much_larger_than_the_others_stays_in_memory_as_its_slots_would_take_more():
    widths = [64] * 16 + [512]
    planned = plan(widths, files="/never/made", host_memory=least(widths))
    assert len(widths) - 1 not in planned.files.sizes
    assert len(planned.files.sizes) == 16


def test_a_plan_takes_no_space_and_says_what_lies_in_files(tmp_path):
    planned = plan(files=tmp_path / "run", host_memory=least())
    assert not (tmp_path / "run").exists()
    assert "moments of 16 of 16 units lie in files" in str(planned)
    assert ("files", "records", planned.files.file_bytes) in planned.rows()


def test_low_bits_of_masters_lie_in_files_beside_the_moments():
    planned = plan(files="/never/made", host_memory=least(dtype=torch.bfloat16), dtype=torch.bfloat16)
    taken = {purpose: size for place, purpose, size in planned.rows() if place == "host"}
    assert taken.get("low bits", 0) == taken.get("exp_avg", 0) == 0
    num_elements = sum(parameter.numel() for parameter in model().parameters())
    assert 10 * num_elements <= planned.files.file_bytes <= 10 * num_elements + 4096 * len(WIDTHS)


def test_the_cap_on_files_holds():
    of_one = plan(files="/never/made", host_memory=least()).files.slot_bytes
    with pytest.raises(noria.UsageError, match="host_memory of at least"):
        plan(files="/never/made", host_memory=least(), file_memory=8 * of_one)
    room = int(re.search(r"\((\d+) bytes\)", refusal_of(file_memory=8 * of_one))[1])  # type: ignore[index]
    planned = plan(files="/never/made", host_memory=room, file_memory=8 * of_one)
    assert planned.files.file_bytes <= 8 * of_one


def test_a_plan_says_what_smaller_moments_would_put_into_files():
    policy: dict[str, Any] = {"files": "/never/made", "host_memory": least()}
    planned = plan(**policy)
    assert list(planned.files.instead) == ["bf16", "8bit"]
    for state_dtype, size in planned.files.instead.items():
        assert plan(state_dtype=state_dtype, **policy).files.file_bytes == size < planned.files.file_bytes
    assert planned.files.instead_text() in str(planned)
    assert re.search(r'instead of .* in files: .* with state_dtype="bf16", .* with state_dtype="8bit"', str(planned))
    few = least(state_dtype="8bit")
    last = plan(state_dtype="8bit", files="/never/made", host_memory=few)
    assert last.files.sizes and not last.files.instead and "instead of" not in str(last)


def test_a_plan_names_the_units_whose_moments_lie_in_files():
    assert "(0-15)" in str(plan(files="/never/made", host_memory=least()))
    some = plan(files="/never/made", host_memory=(host_bytes(plan()) + least()) // 2)
    told = re.search(r"writes .* \((.*)\)", str(some))
    assert told is not None and told[1].split(", ")[0].split("-")[0] == str(min(some.files.sizes))


def refusal_of(**policy: Any) -> str:
    with pytest.raises(noria.UsageError) as refusal:
        plan(files="/never/made", host_memory=1, **policy)
    return str(refusal.value)


# ---- frozen weights ------------------------------------------------------------------------------------------------


def with_frozen(room: int, **policy: Any) -> Any:
    """Each second layer is frozen, and the bias of one other."""
    made = model()
    for layer in made[::2]:
        layer.requires_grad_(False)
    made[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in made.parameters() if each.requires_grad])
    policy = {"files": "/never/made", **policy}
    return noria.plan(made, optimizer, device="cpu", units=[nn.Linear], kernel="fused", host_memory=room, **policy)


def least_with_frozen(**policy: Any) -> int:
    with pytest.raises(noria.UsageError, match="host_memory of at least") as refusal:
        with_frozen(1, **policy)
    return int(str(refusal.value).split(" bytes)")[0].rpartition("(")[2])


def test_frozen_weights_lie_in_files_only_if_all_state_there_is_not_enough():
    few, whole = least_with_frozen(), with_frozen(1 << 30).home_bytes
    was_weights = False
    for number in range(21):
        room = few + (whole - few) * number // 20
        planned = with_frozen(room)
        assert host_bytes(planned) <= room
        if planned.files.weights:
            assert len(planned.files.sizes) == len(WIDTHS) // 2
            one_less = host_bytes(planned) + max(planned.files.weights_sizes.values())
            assert one_less > room, "one unit more could have stayed in memory"
        was_weights |= bool(planned.files.weights)
    assert was_weights and not planned.files.is_used


def test_frozen_weights_lie_in_files_in_whole_pages():
    planned = with_frozen(least_with_frozen())
    arena = next(region for region in planned.regions if region.purpose == "working copies")
    assert len(planned.files.weights) == len(arena.in_files) == len(WIDTHS) // 2
    for (unit, (begin, end)), (there, then) in zip(planned.files.weights.items(), arena.in_files, strict=True):
        assert there % 4096 == then % 4096 == 0 and then - there == end - begin
        assert planned.units[unit].gradients <= begin < end <= planned.units[unit].weights
        assert begin - planned.units[unit].gradients < 4096 > planned.units[unit].weights - end
    assert f"frozen weights of {len(WIDTHS) // 2} of 16 units lie in files" in str(planned)


def test_the_cap_on_files_holds_for_frozen_weights():
    least_files = with_frozen(least_with_frozen()).files
    cap = least_files.state_bytes + 2 * least_files.weights_slot_bytes
    planned = with_frozen(least_with_frozen(file_memory=cap), file_memory=cap)
    assert planned.files.file_bytes <= cap


def test_weights_that_train_stay_in_memory_and_so_do_those_that_are_read_at_home():
    assert not plan(files="/never/made", host_memory=least()).files.weights
    assert not with_frozen(least_with_frozen(reads="home"), reads="home").files.weights
