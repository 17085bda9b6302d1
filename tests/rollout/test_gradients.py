"""A rollout worker that is asked for gradients between its fragments."""

from collections.abc import Awaitable, Callable

import pytest

from shared.errors import IntegrityError
from shared.messages.contracts import ComputeGradient, GradientComputed, GradientReleased
from tests import examples
from tests.rollout.worker import ADDRESS, RUN, Cluster, Start

Damage = Callable[[ComputeGradient, Cluster], Awaitable[ComputeGradient]]


def waits_with(cluster: Cluster, num_groups: int) -> Callable[[], bool]:
    return lambda: len(cluster.app._gradients.ready) == num_groups


async def released(cluster: Cluster, count: int = 1) -> list[tuple[int, str]]:
    events = await cluster.told("gradient_released", count)
    assert all(isinstance(event, GradientReleased) and event.worker == ADDRESS for event in events)
    return [(e.group, e.reason) for e in events if isinstance(e, GradientReleased)]


async def test_a_gradient_goes_before_the_fragments_that_wait(worker: Start) -> None:
    async with worker() as cluster:
        await cluster.generate(0, 1)
        await cluster.until(lambda: cluster.device.begun == ["fragment 0"])
        await cluster.compute(await cluster.group(7))
        await cluster.until(waits_with(cluster, 1))
        cluster.device.free.set()
        await cluster.told("fragment_generated", 2)
        assert cluster.device.done == [
            "fragment 0 by 0", "gradient of batch 0 group 7 samples 0 by 0", "fragment 1 by 0",
        ]  # fmt: skip


async def test_the_gradient_is_stored_with_its_batch_and_reported(worker: Start) -> None:
    async with worker() as cluster:
        cluster.device.free.set()
        command = await cluster.group(1)
        await cluster.compute(command)
        [event] = await cluster.told("gradient_computed")
        assert isinstance(event, GradientComputed)
        assert (event.batch, event.group, event.attempt) == (0, 1, 0)
        assert event.policy == command.policy
        contribution = event.contribution
        assert (contribution.worker, contribution.tally) == (ADDRESS, {"num_rows": 4.0})
        assert contribution.gradient.key.startswith(f"{RUN}/batches/00000000/")
        assert contribution.gradient.key.endswith(".gradient.safetensors")
        assert await cluster.store.get(contribution.gradient) == b"a gradient"
        [group] = cluster.device.groups
        assert group.trajectories == (b"batch 0 group 1 samples 0", b"batch 0 group 1 samples 2")
        assert (group.conditions, group.staleness) == (b"conditions", 0)
        assert group.advantages == command.group.advantages


async def test_the_gradient_is_that_of_the_trained_weights_of_its_version(worker: Start) -> None:
    """They are fetched once, and the device goes on generating by the others."""
    async with worker() as cluster:
        cluster.device.free.set()
        await cluster.compute(await cluster.group(1))
        await cluster.told("gradient_computed")
        await cluster.publish_version(1, trained=examples.digest(77))
        for number in (2, 3):
            await cluster.compute(await cluster.group(number, version=1, batch=1))
        await cluster.told("gradient_computed", 3)
        assert cluster.device.trained == [None, examples.digest(77), examples.digest(77)]
        assert cluster.device.weights_digest() == examples.digest(1)
        await cluster.generate(4, version=1)
        await cluster.told("fragment_generated")


async def test_the_device_goes_on_with_fragments_while_a_group_is_fetched(worker: Start) -> None:
    async with worker() as cluster:
        cluster.device.free.set()
        command = await cluster.group(7)
        cluster.backend.held_back = command.group.fragments[1].stored.trajectory.key
        await cluster.compute(command)
        await cluster.until(lambda: len(cluster.app._gradients._held) == 1)
        await cluster.generate(0, 1)
        await cluster.told("fragment_generated", 2)
        assert not cluster.device.groups
        cluster.backend.given.set()
        await cluster.told("gradient_computed")


async def test_a_gradient_of_an_older_version_goes_back(worker: Start) -> None:
    async with worker() as cluster:
        await cluster.generate(0)
        await cluster.until(lambda: cluster.device.begun == ["fragment 0"])
        await cluster.compute(await cluster.group(7))
        await cluster.until(waits_with(cluster, 1))
        await cluster.publish_version(1)
        await cluster.until(lambda: cluster.app._loader.newest == 1)
        cluster.device.free.set()
        assert await released(cluster) == [(7, "stale")]
        assert not cluster.device.groups


async def test_what_a_committed_batch_has_lost_from_the_store_is_stale(worker: Start) -> None:
    async with worker() as cluster:
        cluster.device.free.set()
        command = await cluster.group(7)
        await cluster.publish_version(1)
        await cluster.until(lambda: cluster.app._loader.newest == 1)
        await cluster.store.delete_folder(f"{RUN}/batches")
        await cluster.compute(command)
        assert await released(cluster) == [(7, "stale")]


async def test_a_group_of_the_version_before_is_trained_at_the_newest(worker: Start) -> None:
    async with worker(max_staleness=1) as cluster:
        cluster.device.free.set()
        await cluster.publish_version(1)
        await cluster.compute(await cluster.group(3, version=0, batch=1))
        [event] = await cluster.told("gradient_computed")
        assert isinstance(event, GradientComputed)
        assert event.policy == examples.policy(1)
        assert cluster.device.done == ["gradient of batch 1 group 3 samples 0 by 1"]
        assert cluster.device.groups[0].staleness == 1


async def fails_on_the_device(command: ComputeGradient, cluster: Cluster) -> ComputeGradient:
    cluster.device.fault = IntegrityError("the device is out of order")
    return command


async def has_no_finite_tally(command: ComputeGradient, cluster: Cluster) -> ComputeGradient:
    cluster.device.tally = {"loss": float("nan")}
    return command


async def has_lost_a_trajectory(command: ComputeGradient, cluster: Cluster) -> ComputeGradient:
    await cluster.backend.delete([command.group.fragments[0].stored.trajectory.key])
    return command


async def was_generated_by_other_weights(
    command: ComputeGradient, cluster: Cluster
) -> ComputeGradient:
    first, second = command.group.fragments
    stored = second.stored.model_copy(update={"weights_digest": examples.digest(5)})
    fragments = (first, second.model_copy(update={"stored": stored}))
    group = command.group.model_copy(update={"fragments": fragments})
    return command.model_copy(update={"group": group})


async def is_one_step_stale(_: ComputeGradient, cluster: Cluster) -> ComputeGradient:
    await cluster.publish_version(1)
    return await cluster.group(7, version=0, batch=1)


@pytest.mark.parametrize(
    "damage",
    [
        fails_on_the_device,
        has_no_finite_tally,
        has_lost_a_trajectory,
        was_generated_by_other_weights,
        is_one_step_stale,
    ],
)
async def test_what_fails_goes_back_and_the_worker_goes_on(worker: Start, damage: Damage) -> None:
    async with worker() as cluster:
        cluster.device.free.set()
        await cluster.compute(await damage(await cluster.group(7), cluster))
        assert await released(cluster) == [(7, "failed")]
        newest = max(0, cluster.app._loader.newest)
        await cluster.generate(1, version=newest)
        await cluster.told("fragment_generated")
        cluster.device.tally = {}
        await cluster.compute(await cluster.group(8, version=newest, batch=newest))
        [event] = await cluster.told("gradient_computed")
        assert isinstance(event, GradientComputed)
        assert event.group == 8


async def test_an_outage_of_the_store_is_waited_for(worker: Start) -> None:
    async with worker() as cluster:
        command = await cluster.group(7)
        cluster.backend.outages = 5
        await cluster.compute(command)
        await cluster.until(lambda: bool(cluster.device.begun))
        assert cluster.backend.outages == 0
        cluster.backend.outages = 3
        cluster.device.free.set()
        await cluster.told("gradient_computed")
        assert cluster.backend.outages == 0


async def test_a_worker_that_stops_gives_back_all_that_it_has(worker: Start) -> None:
    async with worker() as cluster:
        await cluster.compute(await cluster.group(0))
        await cluster.until(lambda: bool(cluster.device.begun))  # under way
        await cluster.compute(await cluster.group(1))
        await cluster.until(waits_with(cluster, 1))
        slow = await cluster.group(2)
        cluster.backend.held_back = slow.group.fragments[0].stored.trajectory.key
        await cluster.compute(slow)
        await cluster.generate(5)
        await cluster.until(lambda: len(cluster.app._waiting) == 1)
        await cluster.until(lambda: len(cluster.app._gradients._held) == 3)
        await cluster.drain()
        assert sorted(await released(cluster, 3)) == [(n, "draining") for n in range(3)]
        await cluster.told("fragment_released")


async def test_what_is_done_is_not_given_back(worker: Start) -> None:
    async with worker() as cluster:
        cluster.device.free.set()
        await cluster.compute(await cluster.group(0))
        await cluster.told("gradient_computed")
        await cluster.until(lambda: not cluster.app._gradients._held)
        cluster.device.free.clear()
        await cluster.compute(await cluster.group(1))
        await cluster.until(lambda: len(cluster.device.begun) == 2)
        await cluster.drain()
        assert await released(cluster) == [(1, "draining")]
