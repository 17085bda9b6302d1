"""Pieces of groups: every sample and step once, and small ones at the end of a batch."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.devices.slices import GroupSlice, slice_group

SIZES, LANES, STEPS = st.integers(1, 40), st.integers(1, 40), st.integers(1, 20)


def work(slices: list[GroupSlice], trained_steps: int) -> Counter[tuple[int, int]]:
    return Counter(
        (sample, step)
        for each in slices
        for sample in each.samples
        for step in each.steps(trained_steps)
    )


@given(size=SIZES, lanes=LANES, steps=STEPS, is_last=st.booleans(), merged=st.integers(0, 1))
def test_every_step_of_every_sample_is_in_one_piece(
    size: int, lanes: int, steps: int, is_last: bool, merged: int
) -> None:
    slices = slice_group(size, lanes, steps, is_last=is_last, merged_steps=merged)
    assert work(slices, steps) == Counter((n, k) for n in range(size) for k in range(steps))
    assert all(each.samples and each.steps(steps) for each in slices), "an empty slice"


@given(size=SIZES, steps=STEPS, is_last=st.booleans(), merged=st.integers(0, 1))
def test_one_device_takes_whole_groups(size: int, steps: int, is_last: bool, merged: int) -> None:
    slices = slice_group(size, 1, steps, is_last=is_last, merged_steps=merged)
    assert slices == [GroupSlice(range(size))]


@given(size=SIZES, lanes=st.integers(2, 40), steps=STEPS, is_last=st.booleans())
def test_a_merged_step_is_one_piece_of_all_samples(
    size: int, lanes: int, steps: int, is_last: bool
) -> None:
    first, *others = slice_group(size, lanes, steps, is_last=is_last, merged_steps=1)
    assert (first.samples, first.steps(steps)) == (range(size), range(1))
    assert not any(0 in each.steps(steps) for each in others)
    assert bool(others) == (steps > 1)
    cut = slice_group(size, lanes, steps, is_last=is_last)
    if is_last and steps > 4:  # later steps are cut as finely as others
        assert len(others) == len(cut)


def test_several_devices_take_a_few_samples_and_at_the_end_parts_of_one() -> None:
    first = slice_group(16, 5, 9, is_last=False)
    assert [len(each.samples) for each in first] == [3] * 5 + [1]
    last = slice_group(16, 5, 9, is_last=True)
    assert {(len(each.samples), len(each.steps(9))) for each in last} == {(1, 3)}
    assert {len(each.steps(2)) for each in slice_group(16, 5, 2, is_last=True)} == {1}
