"""What each of a trainer's devices does next, and loans of them, over devices without torch."""

import pytest
import structlog.testing

from shared.errors import OutOfMemory
from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    GroupTrained,
)
from shared.messages.workers import MemoryShortage
from shared.run.conditions import store_conditions
from tests import examples
from tests.examples import ENCODING
from tests.trainer.cluster import RUN, Start
from tests.trainer.fakes import FakeGeneration


def fine(group: str) -> list[str]:
    """The last groups of a batch, all of it by device 1."""
    return [f"d1 train {group} {sample}.{part}/3" for sample in range(4) for part in range(3)]


async def test_devices_share_the_groups_and_do_not_wait_for_one_another(trainer: Start) -> None:
    async with trainer(trainer__devices=2, batch__groups=3) as run:
        slow, fast = run.training.devices
        await run.send(0, 0)
        await run.log_holds("d0 train 0/0 0-1", "d1 train 0/0 2-3")
        fast.free.set()  # the other one is stuck in its half
        await run.send(0, 1, 2)
        assert {event.group for event in await run.told(GroupTrained, 2)} == {1, 2}
        assert [entry for entry in run.training.log if entry.startswith("d1")] == [
            "d1 train 0/0 2-3", *fine("0/1"), *fine("0/2")
        ]  # fmt: skip
        assert "step 0" not in run.training.log
        slow.free.set()
        assert {group.group for group in (await run.commit(1)).trained} == {0, 1, 2}


async def test_each_device_generates_what_it_has_unbroken_and_then_trains_whatever_others_do(
    trainer: Start,
) -> None:
    async with trainer(trainer__devices=2) as run:
        slow, fast = run.training.devices
        await run.lend(1)
        await run.generate(0, 5, 6)
        await run.log_holds("d0 step 5", "d1 step 6")
        await run.send(0, 0, 1)  # ready while both generate
        fast.free.set()
        assert [e.group for e in await run.told(GroupTrained, 2)] == [0, 1]
        assert [entry for entry in run.training.log if entry.startswith("d1")] == [
            *["d1 step 6"] * 3, *fine("0/0"), *fine("0/1")
        ]  # fmt: skip
        slow.free.set()
        await run.commit(1)


async def test_a_single_device_trains_first_and_goes_on_with_its_fragment(trainer: Start) -> None:
    async with trainer() as run:
        await run.lend(1)
        await run.generate(0, 5)
        await run.log_holds("d0 step 5")
        await run.send(0, 0)
        await run.until(lambda: not run.app._pool._slices._has_room.is_set())
        run.run_freely()
        [made] = await run.told(FragmentGenerated)
        assert run.training.log[1:] == ["d0 step 5", "d0 train 0/0 0-3", *["d0 step 5"] * 2]
        assert made.seconds == pytest.approx(0.3)
        assert await run.store.get(made.stored.media) == b"media"


async def test_what_its_own_device_has_generated_is_not_read_back(trainer: Start) -> None:
    async with trainer() as run:
        run.run_freely()
        await run.lend(1)
        await run.generate(0, 0)
        [made] = await run.told(FragmentGenerated)
        own = made.stored.trajectory.key
        assert await run.store.get(made.stored.trajectory) == b"path", "it is stored all the same"
        num_read = run.backend.keys_read.count(own)
        await run.send(0, 0, content="path")
        await run.send(0, 1)
        record = await run.commit(1)
        assert [group.group for group in record.trained] == [0, 1]
        assert run.backend.keys_read.count(own) == num_read
        assert made.stored.conditions.key not in run.backend.keys_read


async def test_a_device_that_is_called_back_is_so_after_a_step_and_keeps_its_fragment(
    trainer: Start,
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with trainer() as run:
            await run.lend(1)
            await run.generate(0, 5)
            await run.log_holds("d0 step 5")
            await run.call_back(2)
            assert not [entry for entry in logs if entry["event"] == "device_returned"]
            run.run_freely()
            await run.until(lambda: any(e["event"] == "device_returned" for e in logs))
            assert run.training.log[1:] == ["d0 step 5"]
            [returned] = [entry for entry in logs if entry["event"] == "device_returned"]
            assert (returned["generation"], returned["step_ms"]) == (2, 100.0)
            await run.lend(3)
            await run.told(FragmentGenerated)
            assert run.training.log[1:] == ["d0 step 5"] * 3


async def test_fragments_that_are_not_kept_go_back(trainer: Start) -> None:
    async with trainer() as run:
        await run.lend(1)
        await run.generate(0, 5, 6)
        await run.log_holds("d0 step 5")
        await run.call_back(2, keep=False)
        released = await run.told(FragmentReleased, 2)
        assert {(e.slot.group, e.reason) for e in released} == {(5, "returned"), (6, "returned")}
        run.run_freely()
        await run.lend(3)
        await run.generate(0, 7)
        await run.told(FragmentGenerated)
        assert run.training.log[1:] == ["d0 step 5", *["d0 step 7"] * 3]
        assert await run.all_told(FragmentReleased) == 2


@pytest.mark.parametrize("num_devices", [1, 2])
async def test_after_a_commit_what_was_begun_with_the_version_before_goes_back(
    trainer: Start, num_devices: int
) -> None:
    async with trainer(trainer__devices=num_devices) as run:
        await run.lend(1)
        await run.generate(0, 5, 6, 7)
        await run.log_holds("d0 step 5")
        await run.call_back(2)
        run.run_freely()
        await run.send(0, 0, 1)
        released = await run.told(FragmentReleased, 3)
        assert {(e.slot.group, e.reason) for e in released} == {
            (5, "stale"), (6, "stale"), (7, "stale"),
        }  # fmt: skip
        await run.commit(1)
        assert "step 0" in run.training.log


async def test_a_lent_device_trains_while_no_encoder_has_stored_a_fragment_s_conditions(
    trainer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.devices.conditions.LOOK_S", 0.01)
    prompt = examples.task().prompt.text
    digest = ENCODING.digest(prompt)
    async with trainer(encoding=ENCODING) as run:
        run.run_freely()
        await run.lend(1)
        await run.generate(0, 5)
        await run.until(lambda: run.worker.activity == "waiting_for_conditions")
        await run.send(0, 0)
        await run.told(GroupTrained)
        [device] = run.training.devices
        assert device.given == []
        await store_conditions(run.store, RUN, digest, b"text", prompt=prompt, worker="encoder-0")
        [made] = await run.told(FragmentGenerated)
        assert device.given == [b"text"]
        assert await run.store.get(made.stored.conditions) == b"text"
        await run.store.delete([made.stored.conditions.key])
        run.app._agent._waiting._encoded._kept.clear()  # type: ignore[union-attr]
        await run.generate(0, 6)
        [failed] = await run.told(FragmentFailed)
        assert failed.slot.group == 6 and "is not in the store" in failed.reason
        await run.send(0, 1)
        await run.commit(1)


async def test_a_lent_device_without_memory_for_a_fragment_fails_that_one_and_goes_on(
    trainer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeGeneration.advance

    async def advance(work: FakeGeneration) -> None:
        if work.task.fragment.group == 5 and work.steps_left == 1:
            raise OutOfMemory("70 GiB of 79", what="a denoising step", remedy="make it smaller")
        await whole(work)

    monkeypatch.setattr(FakeGeneration, "advance", advance)
    async with trainer() as run:
        run.run_freely()
        await run.lend(1)
        await run.generate(0, 5, 6)
        [failed] = await run.told(FragmentFailed)
        assert (failed.slot.group, failed.stage) == (5, "rollout")
        assert failed.reason == "70 GiB of 79"
        [made] = await run.told(FragmentGenerated)
        assert made.fragment.group == 6
        await run.send(0, 0, 1)
        await run.commit(1)
        assert run.worker.memory_shortage == MemoryShortage(
            what="a denoising step", since="the fragment has failed", remedy="make it smaller"
        )
