"""Rank correlations of two scores of the same samples."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tail_check.agreement import agreement, spearman

scores = st.lists(st.integers(0, 9).map(float), min_size=2, max_size=12)


def test_ranks_are_compared_and_not_values() -> None:
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == 1
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    # 1 - 6 (1 + 1 + 4 + 1 + 1) / (5 x 24), and with a tie by hand: ranks 0, 1.5, 1.5, 3
    assert spearman([1, 2, 3, 4, 5], [2, 1, 5, 3, 4]) == pytest.approx(1 - 6 * 8 / 120)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1, 1], [1, 2]) is None


@given(scores)
def test_a_correlation_is_of_ranks_alone(values: list[float]) -> None:
    found = spearman(values, [3 * value - 1 for value in values])
    assert found == (None if min(values) == max(values) else 1)


def test_what_decides_is_the_order_within_groups() -> None:
    """Two easy prompts and two hard ones: over all samples the tail seems to agree, though it
    reverses every group."""
    whole = [[0.9, 0.8], [0.91, 0.81], [0.2, 0.1], [0.21, 0.11]]
    coarse = [[0.8, 0.9], [0.81, 0.91], [0.1, 0.2], [0.11, 0.21]]
    found = agreement(whole, coarse)
    assert (found.within, found.error, found.groups) == (-1, 0, 4)
    assert found.overall is not None and found.overall > 0.4


def test_groups_without_a_difference_say_nothing_and_a_tail_that_makes_one_equal_says_no() -> None:
    found = agreement([[1, 1], [1, 2], [1, 2]], [[1, 2], [5, 5], [1, 2]])
    assert (found.within, found.groups) == (0.5, 2)
    nothing = agreement([[1, 1]], [[1, 2]])
    assert (nothing.within, nothing.error, nothing.groups) == (None, None, 0)


def test_samples_without_a_score_are_left_out() -> None:
    found = agreement([[1, None, 2, 3]], [[1, 7, None, 2]])
    assert (found.within, found.overall) == (1, 1)
    assert agreement([[1, None]], [[1, 2]]).within is None
