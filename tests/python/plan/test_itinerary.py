"""Room plan: passes are recorded at their first occurrence and known again at the next."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

FORWARD, BACKWARD = _C.Signature("forward"), _C.Signature("backward", forward=0)


def visit(hook, phase="forward"):
    return _C.Visit(hook, phase, [hook])


def run(book, signature, hooks, gradients=()):
    """One pass; what the book expected at its beginning and after each announcement, and the id it got."""
    expected = [book.begin(signature)]
    for hook in hooks:
        expected.append(book.announce(visit(hook, signature.phase)))
        for unit in gradients:
            if unit == hook:
                book.note_gradient(unit)
    return expected, book.end()


hook_lists = st.lists(st.integers(0, 3), max_size=6)
signatures = st.builds(_C.Signature, st.just("forward"), st.integers(0, 1), st.booleans(), st.booleans())
loops = st.lists(st.tuples(signatures, hook_lists, st.booleans()), min_size=1, max_size=5)


@settings(max_examples=150)
@given(loops)
def test_a_loop_of_passes_is_recognised_from_its_second_round_on(loop):
    """The first pass of round two had another predecessor; from round three on every pass is expected
    outright, unless the loop itself does two things after the same pass."""
    book = _C.ItineraryBook()
    rounds = []
    for _ in range(4):
        outcome = []
        for signature, hooks, updates in loop:
            outcome.append(run(book, signature, hooks))
            if updates:
                book.note_update()
        rounds.append(outcome)
    ids = [[itinerary for _, itinerary in outcome] for outcome in rounds]
    assert ids[0] == ids[1] == ids[2] == ids[3], "a pass that was seen before got a new name"
    assert len(book) == len(set(ids[0]))
    for outcome in rounds[1:]:
        for expected, itinerary in outcome:
            assert expected[-1] is not None or len(expected) == 1, "a pass that was seen before is unknown at its end"
            assert len(book.visits(itinerary)) == len(expected) - 1
    followers = {}
    for k, itinerary in enumerate(ids[0]):
        followers.setdefault((itinerary, loop[k][2]), set()).add(ids[0][(k + 1) % len(loop)])
    if all(len(following) == 1 for following in followers.values()):
        for expected, itinerary in rounds[2]:
            assert expected == [itinerary] * len(expected)


@settings(max_examples=100)
@given(st.lists(hook_lists, min_size=1, max_size=4), hook_lists)
def test_the_expected_itinerary_always_begins_like_what_was_announced(known, hooks):
    book = _C.ItineraryBook()
    for each in known:
        run(book, FORWARD, each)
    visits = [book.visits(itinerary) for itinerary in range(len(book))]
    expected, _ = run(book, FORWARD, hooks)
    assert expected[0] is not None
    for length in range(1, len(hooks) + 1):
        alike = [
            itinerary for itinerary, each in enumerate(visits) if [v.hook for v in each[:length]] == hooks[:length]
        ]
        if expected[length] is None:
            assert alike == [], "a known itinerary with the same beginning was passed over"
        else:
            assert expected[length] in alike
            assert expected[length - 1] not in alike or expected[length] == expected[length - 1], "switched for nothing"


def test_what_followed_the_same_predecessor_is_expected_before_what_is_newest():
    book = _C.ItineraryBook()
    for hooks in ([0, 1], [0, 2], [0, 1], [0, 2]):
        expected, _ = run(book, FORWARD, hooks)
    assert expected == [1, 1, 1]


def test_an_update_between_makes_another_successor():
    """Two micro-batches, then a step: one backward is followed by two different forwards."""
    book = _C.ItineraryBook()
    first, second = _C.Signature("forward"), _C.Signature("forward", accumulating=True)
    for _ in range(2):
        for signature in (first, second):
            run(book, signature, [0, 1])
            run(book, _C.Signature("backward", forward=0), [1, 0], gradients=[0, 1])
        book.note_update()
    assert book.successor(1) == (2, False)
    assert book.expected_after_update() == 0
    assert book.begin(first) == 0


def test_after_its_first_backward_the_same_forward_is_expected_again():
    book = _C.ItineraryBook()
    assert book.expected_after_update() is None
    run(book, FORWARD, [0, 1])
    assert book.expected_after_update() is None
    run(book, BACKWARD, [1, 0])
    assert book.expected_after_update() == 0


def test_what_really_happened_is_what_is_kept():
    """The same visits with other gradients are another itinerary, which shows only at the end."""
    book = _C.ItineraryBook()
    assert run(book, BACKWARD, [1, 0], gradients=[0, 1]) == ([None, None, None], 0)
    assert run(book, BACKWARD, [1, 0], gradients=[1]) == ([0, 0, 0], 1)
    assert [v.gradients for v in book.visits(1)] == [[1], []]
    assert run(book, BACKWARD, [1, 0], gradients=[1]) == ([1, 1, 1], 1)


def test_gradients_of_a_visit_are_noted_once_and_in_order():
    book = _C.ItineraryBook()
    book.begin(BACKWARD)
    book.announce(_C.Visit(0, "backward", [0, 1, 2], [2]))  # as announced, gradients do not count
    for unit in (2, 0, 2, 1, 0):
        book.note_gradient(unit)
    assert book.visits(book.end())[0].gradients == [0, 1, 2]


def test_a_shorter_and_a_longer_pass_are_told_apart_at_their_end():
    book = _C.ItineraryBook()
    assert run(book, FORWARD, [0, 1, 2])[1] == 0
    assert run(book, FORWARD, [0, 1]) == ([0, 0, 0], 1)
    assert run(book, FORWARD, [0, 1, 2]) == ([1, 1, 1, 0], 0)


def test_an_abandoned_pass_leaves_nothing_behind():
    book = _C.ItineraryBook()
    run(book, FORWARD, [0, 1])
    run(book, BACKWARD, [1, 0])
    book.note_update()
    book.begin(FORWARD)
    book.announce(visit(7))
    assert book.position == 0
    book.abandon()
    assert (len(book), book.position) == (2, -1)
    assert run(book, FORWARD, [0, 1]) == ([0, 0, 0], 0)
    assert book.successor(1) == (0, True), "the update before the pass that raised still counts"


def test_signatures_keep_itineraries_apart():
    book = _C.ItineraryBook()
    run(book, FORWARD, [0, 1])
    expected, itinerary = run(book, _C.Signature("forward", training=False), [0, 1])
    assert (expected, itinerary) == ([None, None, None], 1)
    assert book.signature(1).training is False and book.signature(0) == FORWARD


@pytest.mark.parametrize("misuse", [lambda b: b.end(), lambda b: b.announce(visit(0)), lambda b: b.note_gradient(0)])
def test_outside_of_a_pass_nothing_is_recorded(misuse):
    with pytest.raises(_C.InvariantError):
        misuse(_C.ItineraryBook())
