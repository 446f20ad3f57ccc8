"""The twin that noria's bits are held against is itself held against arithmetic checked by eye."""

import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noria.testing.twin import MasterTwin, assert_same_bits, first_difference, round_to_bfloat16
from torch import nn

WORDS = st.lists(
    st.integers(0, 2**32 - 1) | st.integers(0, 2**16 - 1).map(lambda high: high << 16 | 0x8000), min_size=1
)
FINITE = WORDS.map(lambda words: [word for word in words if word >> 23 & 0xFF < 0xFE]).filter(len)


def from_words(words: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"={len(words)}I", *words)), dtype=torch.float32)


def high_words(rounded: torch.Tensor) -> list[int]:
    return [word & 0xFFFF for word in rounded.view(torch.int16).tolist()]


def exactly(value: float) -> Fraction:
    return Fraction(*value.as_integer_ratio())


@given(WORDS)
def test_rounding_is_the_stated_integer_rule_for_every_bit_pattern(words):
    assert high_words(round_to_bfloat16(from_words(words))) == [(w + 0x8000 & 0xFFFFFFFF) >> 16 for w in words]


@given(FINITE)
def test_rounding_goes_to_the_nearest_and_from_a_tie_away_from_zero(words):
    for word, rounded in zip(words, round_to_bfloat16(from_words(words)).tolist(), strict=True):
        exact, near, far = map(exactly, from_words([word, word & 0xFFFF0000, (word & 0xFFFF0000) + 0x10000]).tolist())
        # the two bfloat16 neighbours; `far` is the one away from zero
        assert exactly(rounded) == (near if abs(exact - near) < abs(exact - far) else far)


@given(WORDS)
def test_the_rounded_half_and_the_low_bits_rebuild_the_master(words):
    for word, high in zip(words, high_words(round_to_bfloat16(from_words(words))), strict=True):
        low = (word & 0xFFFF) - (0x10000 if word & 0x8000 else 0)
        assert (high << 16) + low & 0xFFFFFFFF == word


@given(FINITE)
def test_torchs_own_cast_differs_on_exact_ties_only(words):
    master = from_words(words)
    differs = (master.bfloat16().view(torch.int16) != round_to_bfloat16(master).view(torch.int16)).tolist()
    assert all(word & 0xFFFF == 0x8000 for word, d in zip(words, differs, strict=True) if d)


def test_what_is_not_float32_is_refused_by_the_rounding():
    with pytest.raises(TypeError, match=r"float64"):
        round_to_bfloat16(torch.ones(2, dtype=torch.float64))


def one_weight(value: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.tensor([[value]], dtype=dtype))
    return model


def test_updates_smaller_than_a_bfloat16_step_add_up_in_the_master():
    model = one_weight(1.0)
    twin = MasterTwin(model, lambda masters: torch.optim.SGD(masters, lr=2.0**-10))
    seen = []
    for _ in range(6):
        model.weight.grad = -torch.ones_like(model.weight)
        twin.step()
        seen.append((twin.masters["weight"].item(), model.weight.item()))
    # bfloat16 has a step of 2**-7 above 1: the tie at half a step, after four updates, goes away from zero
    assert seen == [(1 + i * 2.0**-10, 1.0 if i < 4 else 1 + 2.0**-7) for i in range(1, 7)]


def test_a_model_in_float32_gives_the_masters_all_its_bits_and_the_model_the_rounded_ones():
    value = 1 + 2.0**-8  # a tie, which torch's cast would send down to 1
    twin = MasterTwin(one_weight(value), lambda masters: torch.optim.SGD(masters))
    assert twin.masters["weight"].item() == value
    assert twin.model.weight.dtype is torch.bfloat16 and twin.model.weight.item() == 1 + 2.0**-7


def test_a_frozen_parameter_has_no_master_and_is_what_torchs_cast_makes_of_it():
    model = one_weight(1 + 2.0**-8)
    twin = MasterTwin(model.requires_grad_(False), lambda masters: torch.optim.SGD(masters))
    twin.step()
    assert twin.model.weight.item() == 1.0


def test_the_twin_trains_like_the_optimizer_itself_on_the_same_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).bfloat16()
    alone = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    reference = torch.optim.AdamW(alone, lr=0.1)
    twin = MasterTwin(model, lambda masters: torch.optim.AdamW(masters, lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        model(torch.randn(4, 3, dtype=torch.bfloat16)).square().mean().backward()
        for p, master in zip(model.parameters(), alone, strict=True):
            master.grad = p.grad.float()
        twin.step()
        reference.step()
        assert all(p.grad is None for p in model.parameters())
    assert_same_bits(twin.masters.items(), zip(twin.masters, alone, strict=True))
    assert_same_bits(model.named_parameters(), zip(twin.masters, map(round_to_bfloat16, alone), strict=True))
    assert first_difference(before, list(model.parameters()), list(twin.masters)) is not None


def test_a_parameter_without_a_gradient_is_not_updated_not_even_decayed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    twin = MasterTwin(model, lambda masters: torch.optim.AdamW(masters, lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    model[1].bias.grad = None
    twin.step()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert moved == ["1.weight"]


NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            torch.tensor([0.0, 0.0]),
            torch.tensor([0.0, -0.0]),
            r"x: 1 of 2 .* \(1,\): 0.0 \(0x00000000\) against -0.0 \(0x8",
        ),
        (from_words([NAN]), from_words([OTHER_NAN]), "nan .0x7fc00000. against nan .0x7fc00001."),
        (torch.ones(2), torch.ones(3), r"\(2,\) against .*\(3,\)"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float32.* against .*float64"),
        (torch.tensor(1), torch.tensor(2), r"1 of 1 .* at \(\): 1 .* against 2 "),
        (
            torch.tensor([True, False]),
            torch.tensor([True, True]),
            r"\(1,\): False \(0x00\) against True \(0x01\)",
        ),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), None),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), r"1 of 1 .*\(1\+1j\)"),
        (from_words([NAN]), from_words([NAN]), None),
        (torch.arange(6).view(2, 3), torch.arange(6).view(2, 3).t().contiguous().t(), None),
        (torch.ones(0), torch.ones(0), None),
        (nn.Parameter(torch.ones(2).bfloat16()), torch.ones(2).bfloat16(), None),
    ],
)
def test_tensors_are_the_same_only_if_every_bit_is(a, b, message):
    difference = first_difference([torch.ones(1), a], [torch.ones(1), b], ["before", "x"])
    if message is None:
        assert difference is None
    else:
        with pytest.raises(AssertionError, match=message):
            assert_same_bits({"before": torch.ones(1), "x": a}, [("x", b), ("before", torch.ones(1))])
        assert difference.startswith("x: ")


def test_missing_names_and_nothing_at_all_are_no_agreement():
    with pytest.raises(AssertionError, match=r"names differ.*y"):
        assert_same_bits({"x": torch.ones(1)}, {"x": torch.ones(1), "y": torch.ones(1)})
    with pytest.raises(AssertionError, match=r"nothing to compare"):
        assert_same_bits({}, {})


@given(words=WORDS, data=st.data())
def test_a_single_flipped_bit_is_always_found_and_placed(words, data):
    place, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 31))
    flipped = [word ^ (1 << bit if i == place else 0) for i, word in enumerate(words)]
    difference = first_difference([from_words(words)], [from_words(flipped)], ["x"])
    assert difference is not None and f"x: 1 of {len(words)} elements differ, first at ({place},)" in difference
