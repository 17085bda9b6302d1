"""Slices of groups wait for devices, first in, first out."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.devices.pool import Outcome, QueuedGroup, QueuedSlice, QueuedSlices
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.errors import ContractError
from tests import examples
from tests.trainer.batch.test_admission import group_of


def queued(number: int, size: int, told: list[Outcome]) -> QueuedGroup:
    command = group_of(examples.scored(examples.task()))
    return QueuedGroup(
        command=command.model_copy(update={"group": number}),
        data=GroupData(trajectories=(), conditions=b"", advantages=(0.0,) * size),
        tell=told.append,
    )


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), num_devices=st.integers(1, 9))
def test_every_sample_is_in_one_slice_and_groups_come_first_in_first_out(
    sizes: list[int], num_devices: int
) -> None:
    async def taken() -> list[QueuedSlice]:
        slices, told = QueuedSlices(num_devices, 2), list[Outcome]()
        for number, size in enumerate(sizes):
            slices.put(queued(number, size, told))
        found = []
        while (taken_slice := slices.take()) is not None:
            found.append(taken_slice)
        assert not told
        for taken_slice in reversed(found):  # done in any order
            with taken_slice.training():
                pass
        assert [outcome.command.group for outcome in told] == [*reversed(range(len(sizes)))]
        await asyncio.wait_for(slices.all_taken(), 1)
        return found

    found = asyncio.run(taken())
    everything = [(n, sample) for n, size in enumerate(sizes) for sample in range(size)]
    assert [
        (p.group.command.group, sample) for p in found for sample in p.group_slice.samples
    ] == everything
    if num_devices == 1:
        assert len(found) == len(sizes)


def test_a_merged_step_is_trained_by_one_device_for_all_samples() -> None:
    slices = QueuedSlices(3, 2, merged_steps=1)
    slices.put(queued(0, 6, []))
    found = []
    while (taken_slice := slices.take()) is not None:
        found.append(taken_slice.group_slice)
    rows = [(len(each.samples), each.steps(2)) for each in found]
    assert rows == [(6, range(1)), *[(2, range(1, 2))] * 3]


async def test_room_is_there_once_the_last_slice_is_taken_or_dropped() -> None:
    slices = QueuedSlices(2, 2)
    slices.put(queued(0, 4, []))
    waiting = asyncio.create_task(slices.all_taken())
    slices.take()
    await asyncio.sleep(0)
    assert not waiting.done()
    slices.take()
    await waiting
    slices.put(queued(1, 4, []))
    waiting = asyncio.create_task(slices.all_taken())
    await asyncio.sleep(0)
    slices.clear()
    await waiting
    assert slices.take() is None


def test_a_group_of_which_a_slice_is_none_is_told_once_with_its_error() -> None:
    told: list[Outcome] = []
    group = queued(0, 2, told)
    group.num_left = 2
    with QueuedSlice(group, GroupSlice(range(1))).training():
        raise ContractError("no group")
    assert not told
    with QueuedSlice(group, GroupSlice(range(1, 2))).training():
        pass
    assert [str(outcome.error) for outcome in told] == ["no group"]
    with (
        pytest.raises(ValueError, match="a bug"),
        QueuedSlice(group, GroupSlice(range(1))).training(),
    ):
        raise ValueError("a bug")
