"""Windows are always full, and where their strategy says."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.learning.windows import WindowRule, Windows


@given(
    rule=st.sampled_from(["group", "random", "progressive", "decay"]),
    first=st.integers(0, 20),
    length=st.integers(0, 20),
    stride=st.integers(1, 9),
    stay=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    rolls_back=st.booleans(),
    where=st.tuples(st.integers(0, 10_000), st.integers(0, 64)),
)
def test_a_window_is_never_empty(
    rule: WindowRule, first: int, length: int, stride: int, stay: tuple[int, int],
    rolls_back: bool, where: tuple[int, int],
) -> None:  # fmt: skip
    windows = Windows(
        first=first, last=first + length, rule=rule, stride=stride,
        batches=stay[0], batches_at_last=stay[1], rolls_back=rolls_back,
    )  # fmt: skip
    batch, group = where
    assert first <= windows.start(0, batch, group) <= first + length
    assert windows.start(0, batch, group) == windows.start(0, batch, group)


def path(windows: Windows, batches: int, group: int = 0) -> list[int]:
    return [windows.start(7, batch, group) for batch in range(batches)]


def test_a_progressive_window_moves_and_stays_at_the_last_full_one() -> None:
    windows = Windows(first=0, last=5, rule="progressive", stride=2, batches=3)
    assert path(windows, 15) == [0, 0, 0, 2, 2, 2, 4, 4, 4, 5, 5, 5, 5, 5, 5]
    assert path(windows, 15, group=3) == path(windows, 15)


def test_a_decaying_window_stays_shorter_and_shorter() -> None:
    windows = Windows(first=0, last=3, rule="decay", stride=1, batches=4, batches_at_last=1)
    assert Counter(path(windows, 10)) == {0: 4, 1: 3, 2: 2, 3: 1}
    assert path(windows, 30)[10:] == [3] * 20


def test_a_window_that_rolls_back_begins_again_after_its_last_position() -> None:
    windows = Windows(first=0, last=5, rule="progressive", stride=2, batches=2, rolls_back=True)
    once = [0, 0, 2, 2, 4, 4, 5, 5]
    assert path(windows, 20) == [*once, *once, 0, 0, 2, 2]
    windows = Windows(first=0, last=2, rule="decay", batches=3, batches_at_last=1, rolls_back=True)
    assert path(windows, 9) == [0, 0, 0, 1, 1, 2, 0, 0, 0]


def test_a_random_window_is_one_for_all_groups_and_for_some_batches() -> None:
    windows = Windows(first=0, last=7, rule="random", batches=5)
    starts = path(windows, 200)
    assert all(len(set(starts[at : at + 5])) == 1 for at in range(0, 200, 5))
    assert starts == path(windows, 200, group=9)
    assert len(set(starts)) > 4


def test_a_group_s_window_is_its_own() -> None:
    windows = Windows(first=0, last=7)
    assert len({windows.start(0, 0, group) for group in range(64)}) == 8


@pytest.mark.parametrize("rule", ["progressive", "decay"])
def test_one_position_is_enough(rule: WindowRule) -> None:
    assert path(Windows(first=2, last=2, rule=rule, batches=3), 20) == [2] * 20
