"""Pieces of groups: every sample and step once, and small ones at the end of a batch."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.devices.slices import GroupSlice, slice_group

SIZES, LANES, STEPS = st.integers(1, 40), st.integers(1, 40), st.integers(1, 20)


def work(pieces: list[GroupSlice], trained_steps: int) -> Counter[tuple[int, int]]:
    return Counter(
        (sample, step)
        for piece in pieces
        for sample in piece.samples
        for step in piece.steps(trained_steps)
    )


@given(size=SIZES, lanes=LANES, steps=STEPS, is_last=st.booleans())
def test_every_step_of_every_sample_is_in_one_piece(
    size: int, lanes: int, steps: int, is_last: bool
) -> None:
    pieces = slice_group(size, lanes, steps, is_last=is_last)
    assert work(pieces, steps) == Counter((n, k) for n in range(size) for k in range(steps))
    assert all(piece.samples and piece.steps(steps) for piece in pieces), "an empty piece"


@given(size=SIZES, steps=STEPS, is_last=st.booleans())
def test_one_device_takes_whole_groups(size: int, steps: int, is_last: bool) -> None:
    assert slice_group(size, 1, steps, is_last=is_last) == [GroupSlice(range(size))]


def test_several_devices_take_a_few_samples_and_at_the_end_parts_of_one() -> None:
    assert [len(piece.samples) for piece in slice_group(16, 5, 9, is_last=False)] == [3] * 5 + [1]
    last = slice_group(16, 5, 9, is_last=True)
    assert {(len(piece.samples), len(piece.steps(9))) for piece in last} == {(1, 3)}
    assert {len(piece.steps(2)) for piece in slice_group(16, 5, 2, is_last=True)} == {1}
