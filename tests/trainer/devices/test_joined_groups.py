"""Merged steps of several groups in one pass: held back for one another, and for nothing else."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.trainer.devices import pool
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.errors import ContractError, OutOfMemory, Untrainable
from shared.messages.contracts import FragmentGenerated, GroupFailed, GroupTrained
from tests.trainer.cluster import Cluster, Start
from tests.trainer.fakes import FakeDevice

GROUPS = 5
WHOLE = GroupSlice(range(4))


def joins(run: Cluster, number: int, *, faults: Sequence[Exception] = ()) -> FakeDevice:
    """Have the device train so many groups in one pass."""
    device: Any = run.training.devices[0]
    left = list(faults)

    async def accumulate_together(groups: Sequence[GroupData]) -> None:
        if left:
            raise left.pop(0)
        names = [group.trajectories[0].decode() for group in groups]
        if "no group" in names:
            raise ContractError("not a trajectory")
        run.training.log.append(f"together {' '.join(names)}")
        for group in groups:
            for sample in WHOLE.samples:
                run.training.counted[group.trajectories[0].decode(), sample] += 1
        await asyncio.sleep(0.001)

    device.groups_at_once, device.accumulate_together = number, accumulate_together
    run.run_freely()
    found: FakeDevice = device
    return found


def passes(run: Cluster) -> list[str]:
    return [each for each in run.training.log if each.startswith(("together", "d0 train"))]


async def test_groups_wait_for_one_another_and_the_last_ones_for_nobody(trainer: Start) -> None:
    async with trainer(batch__groups=GROUPS) as run:
        joins(run, 3)
        await run.send(0, 0, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await run.told(GroupTrained)
        await run.send(0, 2)
        assert {event.group for event in await run.told(GroupTrained, 3)} == {0, 1, 2}
        await run.send(0, 3, 4)
        assert len((await run.commit(1)).trained) == GROUPS
        assert passes(run) == ["together 0/0 0/1 0/2", "together 0/3 0/4"]


async def test_nobody_waits_for_long(trainer: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "HOLD_S", 0.1)
    async with trainer(batch__groups=GROUPS) as run:
        joins(run, 3)
        await run.send(0, 0)
        await run.told(GroupTrained)
        assert passes(run) == ["d0 train 0/0 0-3"]


async def test_each_optimizer_step_has_its_own_passes(trainer: Start) -> None:
    async with trainer(batch__groups=4, trainer__updates=2) as run:
        joins(run, 3)
        await run.send(0, 0, 1, 2, 3)
        await run.commit(1)
        assert passes(run) == ["together 0/0 0/1", "together 0/2 0/3"]


async def test_a_number_that_grows_while_groups_wait_holds_up_nothing(trainer: Start) -> None:
    async with trainer(batch__groups=GROUPS) as run:
        device: Any = joins(run, 2)
        await run.send(0, 0)
        await run.until(lambda: len(run.app._pool._slices) == 1)
        device.groups_at_once = 4
        await run.send(0, 1, 2, 3)
        assert len(await run.told(GroupTrained, 4)) == 4
        await run.send(0, 4)
        await run.commit(1)
        assert passes(run) == ["together 0/0 0/1 0/2 0/3", "d0 train 0/4 0-3"]


async def test_a_lent_device_generates_while_groups_wait(trainer: Start) -> None:
    async with trainer(batch__groups=GROUPS) as run:
        joins(run, 3)
        await run.lend(1)
        await run.send(0, 0)
        await run.generate(0, 5)
        await run.told(FragmentGenerated)
        assert not passes(run)


async def test_of_groups_that_cannot_be_trained_together_the_faulty_one_alone_is_sent_again(
    trainer: Start,
) -> None:
    async with trainer(batch__groups=3) as run:
        joins(run, 3)
        await run.send(0, 0, 1)
        await run.send(0, 2, content="no group")
        assert [event.group for event in await run.told(GroupFailed)] == [2]
        await run.send(0, 2, attempt=1)
        assert {group.group for group in (await run.commit(1)).trained} == {0, 1, 2}
        assert passes(run) == [f"d0 train 0/{group} 0-3" for group in (0, 1, 2)]


@pytest.mark.parametrize(
    "fault", [OutOfMemory("too many", smaller=True), Untrainable("of other shapes")]
)
async def test_what_has_failed_in_the_middle_of_a_pass_begins_the_batch_again(
    trainer: Start, fault: Exception
) -> None:
    """Nothing is counted twice, whatever was in the gradient by then."""
    async with trainer(batch__groups=3) as run:
        joins(run, 3, faults=[fault])
        await run.send(0, 0, 1, 2)
        assert {group.group for group in (await run.commit(1)).trained} == {0, 1, 2}
