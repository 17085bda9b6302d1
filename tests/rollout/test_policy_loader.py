"""Versions that a rollout worker generates by: announced, named by a fragment, or found."""

import asyncio

import pytest

from shared.errors import IntegrityError, Unavailable
from shared.messages.contracts import FragmentFailed, FragmentReleased
from shared.messages.records import WeightsChange
from shared.run.commits import read_commit
from shared.run.manifest import StoredTensors
from shared.telemetry import ANNOUNCEMENTS_REFUSED
from tests import examples
from tests.rollout.worker import RUN, Cluster, FakeDevice, FakeStaged, Start
from tests.waiting import until


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the versions that a device has staged, in order."""
    digests = list[str]()
    stage = FakeDevice.stage

    async def record(device: FakeDevice, weights: StoredTensors) -> FakeStaged:
        version = await stage(device, weights)
        digests.append(version.digest)
        return version

    monkeypatch.setattr(FakeDevice, "stage", record)
    return digests


async def test_a_new_version_is_used_after_the_fragment_under_way(cluster: Cluster) -> None:
    cluster.device.free.clear()
    await cluster.generate(0, 1)
    await until(lambda: cluster.device.begun == ["fragment 0"])
    await cluster.publish_version(1)
    await until(lambda: cluster.app._loader.newest == 1)
    await cluster.generate(2, version=1)
    cluster.device.free.set()
    await cluster.told("fragment_generated", 2)
    assert cluster.device.done == ["fragment 0 by 0", "fragment 2 by 1"]
    [event] = await cluster.told("fragment_released")
    assert isinstance(event, FragmentReleased)
    assert (event.slot.group, event.reason) == (1, "stale")


async def test_a_version_whose_announcement_is_missed_is_found_in_its_commit(
    cluster: Cluster,
) -> None:
    await cluster.publish_version(1, announce=False)
    await cluster.generate(0, version=1)
    await cluster.told("fragment_generated")
    assert cluster.device.done == ["fragment 0 by 1"]


async def test_a_version_that_nobody_has_committed_is_not_believed(cluster: Cluster) -> None:
    refused = ANNOUNCEMENTS_REFUSED._value.get()
    for forged in (2**40, 1):
        await cluster.bus.publish(examples.published(forged))
    await until(lambda: ANNOUNCEMENTS_REFUSED._value.get() == refused + 2)
    await cluster.generate(0)
    await cluster.told("fragment_generated")
    await cluster.publish_version(1)
    await until(lambda: cluster.app._loader.newest == 1)
    await cluster.generate(1, version=1)
    await cluster.told("fragment_generated", 2)
    assert cluster.device.done == ["fragment 0 by 0", "fragment 1 by 1"]


async def test_a_version_that_is_stored_and_not_committed_is_generated_by_and_fetched_once(
    worker: Start, staged: list[str]
) -> None:
    async with worker() as cluster:
        cluster.device.free.clear()
        await cluster.generate(0)
        await until(lambda: cluster.device.begun == ["fragment 0"])
        weights = await cluster.weights(examples.digest(1))
        await cluster.generate(1, 2, version=1, weights=weights)
        await until(lambda: staged[-1:] == [examples.digest(1)])
        assert cluster.device.done == [], "it is staged beside generation"
        cluster.device.free.set()
        await cluster.told("fragment_generated", 3)
        assert cluster.app._loader.newest == 0, "it may be lost before it is committed"
        await cluster.publish_version(1)
        await until(lambda: cluster.app._loader.newest == 1)
        await cluster.generate(3, version=1)
        await cluster.told("fragment_generated", 4)
        assert cluster.device.done == [
            "fragment 0 by 0", "fragment 1 by 1", "fragment 2 by 1", "fragment 3 by 1"
        ]  # fmt: skip
        assert staged.count(examples.digest(1)) == 1


async def test_the_first_fetch_over_a_line_continues_although_a_newer_version_is_published(
    worker: Start, staged: list[str]
) -> None:
    async with worker() as cluster:
        await until(lambda: staged == [examples.digest(0)])
        cluster.backend.held_back = (await cluster.weights(examples.digest(1))).key
        await cluster.publish_version(1)
        await until(lambda: cluster.app._loader.newest == 1)
        await cluster.publish_version(2)
        await asyncio.sleep(0.05)
        cluster.backend.given.set()
        await until(lambda: staged[1:] == [examples.digest(1), examples.digest(2)])


async def test_a_version_that_is_committed_while_it_is_loaded_is_not_loaded_twice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = list[FakeDevice](), asyncio.Event()
    stage = FakeDevice.stage

    async def slow(device: FakeDevice, weights: StoredTensors) -> FakeStaged:
        begun.append(device)
        await released.wait()
        return await stage(device, weights)

    await cluster.generate(0)
    await cluster.told("fragment_generated")
    await until(lambda: cluster.app._loader.newest == 0)
    monkeypatch.setattr(FakeDevice, "stage", slow)
    weights = await cluster.weights(examples.digest(1))
    await cluster.generate(1, version=1, weights=weights)
    await until(lambda: len(begun) == 1)
    await cluster.publish_version(1)
    await until(lambda: cluster.app._loader.newest == 1)
    released.set()
    await cluster.told("fragment_generated", 2)
    assert len(begun) == 1
    assert cluster.device.done == ["fragment 0 by 0", "fragment 1 by 1"]


async def test_of_a_lost_version_another_one_of_the_same_number_is_used(cluster: Cluster) -> None:
    lost = examples.policy(1, weights=9)
    weights = await cluster.weights(lost.weights_digest)
    await cluster.bus.publish(examples.task(batch=1, policy=lost, weights=weights))
    await cluster.told("fragment_generated")
    await cluster.generate(1)
    await cluster.told("fragment_generated", 2)
    await cluster.publish_version(1)
    await until(lambda: cluster.app._loader.newest == 1)
    await cluster.generate(2, version=1)
    await cluster.told("fragment_generated", 3)
    assert cluster.device.done == ["fragment 0 by 9", "fragment 1 by 0", "fragment 2 by 1"]


async def test_stored_weights_of_another_digest_fail_the_fragment(cluster: Cluster) -> None:
    await until(lambda: cluster.app._loader.newest == 0)
    weights = await cluster.weights(examples.digest(9))
    await cluster.generate(0, version=1, weights=weights)
    [event] = await cluster.told("fragment_failed")
    assert isinstance(event, FragmentFailed)
    assert "another digest" in event.reason
    assert cluster.device.done == []


async def test_weights_that_do_not_lie_with_those_of_the_run_are_not_read(cluster: Cluster) -> None:
    await until(lambda: cluster.app._loader.newest == 0)
    packed = examples.digest(1).encode()
    weights = await cluster.store.put("another-run/weights", packed, suffix=".safetensors")
    await cluster.generate(0, version=1, weights=weights)
    [event] = await cluster.told("fragment_failed")
    assert isinstance(event, FragmentFailed)
    assert "no weights of this run" in event.reason
    assert cluster.device.done == []


@pytest.mark.parametrize("fault", [IntegrityError("cut off"), Unavailable("the store is away")])
async def test_weights_that_could_not_be_staged_are_staged_again(
    cluster: Cluster, fault: IntegrityError | Unavailable
) -> None:
    await until(lambda: cluster.app._loader.newest == 0)
    cluster.device.staging_fault = fault
    await cluster.publish_version(1)
    await until(lambda: cluster.device.staging_fault is None)
    await cluster.generate(0, version=1)
    await cluster.told("fragment_generated")
    assert cluster.device.done == ["fragment 0 by 1"]


async def test_a_fragment_waits_for_its_weights_over_an_outage(cluster: Cluster) -> None:
    await cluster.publish_version(1, announce=False)
    cluster.backend.outages = 4
    await cluster.generate(0, version=1)
    await cluster.told("fragment_generated")
    assert cluster.backend.outages == 0


async def test_weights_that_are_not_those_of_the_version_fail_the_fragment(
    cluster: Cluster,
) -> None:
    await cluster.generate(0, version=2)  # was never committed
    [event] = await cluster.told("fragment_failed")
    assert isinstance(event, FragmentFailed)
    assert "version 2 is not a committed one" in event.reason
    await cluster.generate(1)
    await cluster.told("fragment_generated")


async def test_weights_of_an_old_version_that_are_deleted_send_the_fragment_back(
    cluster: Cluster,
) -> None:
    await cluster.publish_version(1, announce=False)
    deleted = await read_commit(cluster.store, RUN, 1)
    assert deleted is not None
    await cluster.store.delete([deleted.weights.key])
    await cluster.publish_version(2, announce=False)
    await cluster.generate(0, version=1)
    await cluster.generate(1, version=2)
    [event] = await cluster.told("fragment_released")
    assert isinstance(event, FragmentReleased)
    assert (event.slot.group, event.reason) == (0, "stale")
    await cluster.told("fragment_generated")
    assert cluster.device.done == ["fragment 1 by 2"]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of what devices have staged."""
    keys, stage = list[str](), FakeDevice.stage

    async def noted(device: FakeDevice, weights: StoredTensors) -> FakeStaged:
        found = await stage(device, weights)
        keys.append(weights.ref.key)
        return found

    monkeypatch.setattr(FakeDevice, "stage", noted)
    return keys


async def change_to(cluster: Cluster, number: int, *, base: int, makes: int) -> WeightsChange:
    """Store the change from one version's weights to another's, which makes those of a third."""
    ref = await cluster.store.put(
        f"{RUN}/weights", examples.digest(makes).encode(), suffix=f".{number}.change.safetensors"
    )
    return WeightsChange(base=examples.digest(base), ref=ref)


async def test_a_device_with_the_version_before_reads_the_change_alone(
    worker: Start, read: list[str]
) -> None:
    async with worker() as cluster:
        await cluster.generate(0)
        await cluster.told("fragment_generated")
        change = await change_to(cluster, 1, base=0, makes=1)
        await cluster.publish_version(1, change=change)
        await cluster.generate(1, version=1)
        await cluster.told("fragment_generated", 2)
        assert cluster.device.done == ["fragment 0 by 0", "fragment 1 by 1"]
        assert read[1:] == [change.ref.key]


@pytest.mark.parametrize("fault", ["other base", "gone", "other bits"])
async def test_without_a_change_that_leads_to_the_version_all_weights_are_read(
    worker: Start, read: list[str], fault: str
) -> None:
    async with worker() as cluster:
        await cluster.generate(0)
        await cluster.told("fragment_generated")
        base, makes = (5 if fault == "other base" else 0), (7 if fault == "other bits" else 1)
        change = await change_to(cluster, 1, base=base, makes=makes)
        if fault == "gone":
            await cluster.store.delete([change.ref.key])
        await cluster.publish_version(1, change=change)
        await cluster.generate(1, version=1)
        await cluster.told("fragment_generated", 2)
        assert cluster.device.done == ["fragment 0 by 0", "fragment 1 by 1"]
        assert "change" not in read[-1]


async def test_a_device_that_joins_reads_all_weights(worker: Start, read: list[str]) -> None:
    async with worker() as cluster:
        change = await change_to(cluster, 1, base=0, makes=1)
        await cluster.publish_version(1, change=change)
        await cluster.generate(1, version=1)
        await cluster.told("fragment_generated")
        assert read and "change" not in read[-1]
