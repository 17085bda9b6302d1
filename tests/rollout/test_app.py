"""Fragments of a rollout worker, from the task to what is stored."""

import asyncio

from shared.errors import OutOfMemory
from shared.messages.contracts import FragmentFailed, FragmentGenerated, FragmentReleased, Prompt
from shared.run.layout import conditions_folder
from tests import examples
from tests.rollout.worker import ADDRESS, RUN, Cluster
from tests.waiting import until


async def test_a_fragment_is_stored_and_reported_with_the_weights_that_made_it(
    cluster: Cluster,
) -> None:
    await cluster.generate(3)
    [event] = await cluster.told("fragment_generated")
    assert isinstance(event, FragmentGenerated)
    assert event.fragment == examples.fragment(group=3)
    assert event.stored.weights_digest == examples.digest(0)
    assert (event.worker, event.seconds) == (ADDRESS, 0.25)
    assert await cluster.store.get(event.stored.trajectory) == b"3"
    assert await cluster.store.get(event.stored.conditions) == event.prompt.text.encode()


async def test_conditions_are_stored_while_their_fragment_is_generated(cluster: Cluster) -> None:
    cluster.device.free.clear()
    await cluster.generate(3, 4)
    folder = cluster.backend._root / conditions_folder(RUN)
    await until(lambda: bool(list(folder.glob("*.safetensors"))))
    stored = await cluster.store.keys(conditions_folder(RUN))
    assert cluster.device.done == [], "it is at its first fragment"
    cluster.device.free.set()
    events = await cluster.told("fragment_generated", 2)
    assert [e.stored.conditions.key for e in events if isinstance(e, FragmentGenerated)] == [
        *stored, *stored,
    ]  # fmt: skip


async def test_conditions_that_could_not_be_stored_are_stored_with_the_fragment(
    cluster: Cluster,
) -> None:
    cluster.device.free.clear()
    await cluster.generate(3)
    await until(lambda: cluster.device.begun == ["fragment 3"])
    cluster.device.free.set()
    await cluster.told("fragment_generated")
    cluster.device.free.clear()
    cluster.backend.outages = 1
    other = Prompt(text="another prompt")
    await cluster.bus.publish(examples.task(group=4, prompt=other))
    await until(lambda: not cluster.backend.outages)
    cluster.device.free.set()
    event = (await cluster.told("fragment_generated", 2))[-1]
    assert isinstance(event, FragmentGenerated)
    assert await cluster.store.get(event.stored.conditions) == b"another prompt"


async def test_conditions_that_another_device_has_stored_are_not_sent_again(
    cluster: Cluster,
) -> None:
    packed = examples.PROMPTS[0].text.encode()
    await cluster.store.put(conditions_folder(RUN), packed, suffix=".safetensors")
    await cluster.generate(3)
    [event] = await cluster.told("fragment_generated")
    assert isinstance(event, FragmentGenerated)
    assert await cluster.store.get(event.stored.conditions) == packed
    folder = conditions_folder(RUN)
    assert [key for key in cluster.backend.written if key.startswith(folder)] == [
        event.stored.conditions.key
    ], "by the test only"


async def test_another_attempt_stores_the_conditions_anew(cluster: Cluster) -> None:
    await cluster.generate(3)
    [event] = await cluster.told("fragment_generated")
    assert isinstance(event, FragmentGenerated)
    conditions = event.stored.conditions
    await cluster.store.write(conditions.key, b"x" * conditions.size)
    await cluster.bus.publish(examples.task(group=3, attempt=1))
    await cluster.told("fragment_generated", 2)
    assert await cluster.store.get(conditions) == event.prompt.text.encode()


async def test_a_fragment_that_was_given_back_is_not_given_back_again(cluster: Cluster) -> None:
    cluster.device.free.clear()
    await cluster.publish_version(1)
    await until(lambda: cluster.app._loader.newest == 1)
    await cluster.generate(0)
    await cluster.told("fragment_released")
    await cluster.generate(1, 2, version=1)
    await until(lambda: len(cluster.app._waiting) == 1)
    await cluster.drain()
    events = await cluster.told("fragment_released", 3)
    assert [(e.slot.group, e.reason) for e in events if isinstance(e, FragmentReleased)] == [
        (0, "stale"), (1, "draining"), (2, "draining"),
    ]  # fmt: skip


async def test_a_fragment_is_decoded_beside_the_steps_of_the_next_one_fragment_deep(
    cluster: Cluster,
) -> None:
    device = cluster.device
    device.decodes.clear()
    await cluster.generate(0, 1, 2)
    await until(lambda: len(device.done) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert device.decoding == [0], "the second waits for the first, and the third for both"
    assert device.begun == ["fragment 0", "fragment 1"]
    device.decodes.set()
    events = await cluster.told("fragment_generated", 3)
    done = sorted(e.fragment.group for e in events if isinstance(e, FragmentGenerated))
    assert done == [0, 1, 2], "two are stored at a time"
    assert device.decoding == [0, 1, 2]


async def test_a_fragment_keeps_its_version_while_the_next_one_takes_another(
    cluster: Cluster,
) -> None:
    device = cluster.device
    device.decodes.clear()
    await cluster.generate(0)
    await until(lambda: device.decoding == [0])
    await cluster.publish_version(1)
    await cluster.generate(1, version=1)
    await until(lambda: device.done == ["fragment 0 by 0", "fragment 1 by 1"])
    device.decodes.set()
    events = await cluster.told("fragment_generated", 2)
    made = [e for e in events if isinstance(e, FragmentGenerated)]
    digests = {e.fragment.group: e.stored.weights_digest for e in made}
    assert digests == {0: examples.digest(0), 1: examples.digest(1)}


async def test_what_cannot_be_decoded_fails_alone(cluster: Cluster) -> None:
    device = cluster.device
    device.decoding_fault = OutOfMemory("no room", what="decoding", remedy="less")
    await cluster.generate(0, 1)
    [failed] = await cluster.told("fragment_failed")
    assert isinstance(failed, FragmentFailed)
    assert (failed.slot.group, failed.reason) == (0, "no room")
    [event] = await cluster.told("fragment_generated")
    assert isinstance(event, FragmentGenerated) and event.fragment.group == 1
    assert cluster.worker.memory_shortage is not None


async def test_what_is_decoded_when_the_worker_stops_is_given_back(cluster: Cluster) -> None:
    cluster.device.decodes.clear()
    await cluster.generate(0, 1)
    await until(lambda: len(cluster.device.done) == 2)
    await cluster.drain()
    events = await cluster.told("fragment_released", 2)
    assert [(e.slot.group, e.reason) for e in events if isinstance(e, FragmentReleased)] == [
        (0, "draining"), (1, "draining"),
    ]  # fmt: skip
