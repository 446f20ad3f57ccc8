"""The interval that against.py shows."""

from benchmarks.against import interval


def test_interval_of_a_median_lies_between_the_tabled_order_statistics():
    assert interval(range(1, 7)) == (1, 6)
    assert interval(range(1, 21)) == (6, 15)
    assert interval(range(100, 0, -1)) == (40, 61)


def test_interval_of_too_few_values_is_all_of_them():
    assert interval([0.5]) == (0.5, 0.5)
    assert interval([3, 1, 2]) == (1, 3)
