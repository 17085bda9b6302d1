"""A rollout worker whose device holds no text encoder: encoders have made the conditions."""

from functools import partial

import pytest

from shared.messages.contracts import FragmentFailed, FragmentGenerated, FragmentReleased, Prompt
from shared.run.conditions import read_conditions, store_conditions
from tests import examples
from tests.examples import ENCODING
from tests.rollout.worker import RUN, Cluster, Start
from tests.waiting import until


@pytest.fixture
def worker(worker: Start) -> Start:
    return partial(worker, encoding=ENCODING)


def prompt_of(group: int) -> str:
    return f"prompt {group}"


async def encode(cluster: Cluster, group: int, packed: bytes | None = None) -> None:
    prompt = prompt_of(group)
    digest = ENCODING.digest(prompt)
    data = prompt.upper().encode() if packed is None else packed
    await store_conditions(cluster.store, RUN, digest, data, prompt=prompt, worker="encoder-0")


async def generate(cluster: Cluster, *groups: int, version: int = 0, attempt: int = 0) -> None:
    """Each group has a prompt of its own."""
    for group in groups:
        task = examples.task(
            batch=version, group=group, attempt=attempt, policy=examples.policy(version),
            prompt=Prompt(text=prompt_of(group)),
        )  # fmt: skip
        await cluster.bus.publish(task)


async def test_a_fragment_waits_for_its_conditions_and_the_status_says_for_which_and_why(
    cluster: Cluster,
) -> None:
    await generate(cluster, 3)
    await until(lambda: cluster.worker.activity == "waiting_for_conditions")
    status = cluster.worker._status()
    assert "'prompt 3' (batch 0, group 3)" in status.note
    assert "digenrl serve encoder" in status.note and "encoder.workers" in status.note
    assert status.busy_seconds == 0, "a device that waits is not busy"
    await encode(cluster, 3)
    [event] = await cluster.told("fragment_generated")
    assert isinstance(event, FragmentGenerated)
    assert cluster.device.given == [b"PROMPT 3"]
    found = await read_conditions(cluster.store, RUN, ENCODING.digest(prompt_of(3)))
    assert found is not None and event.stored.conditions == found.ref
    await until(lambda: cluster.worker.activity == "waiting_for_trainer")
    assert cluster.worker._status().note == ""


async def test_conditions_are_fetched_while_the_device_is_at_another_fragment(
    cluster: Cluster,
) -> None:
    cluster.device.free.clear()
    await encode(cluster, 0)
    await encode(cluster, 1)
    await generate(cluster, 0)
    await until(lambda: cluster.device.begun == ["fragment 0"])
    await generate(cluster, 1)
    await until(lambda: cluster.app._waiting.has_ready)
    assert cluster.worker.activity == "generating"
    await cluster.store.delete_folder(f"{RUN}/conditions")
    cluster.device.free.set()
    await cluster.told("fragment_generated", 2)
    assert cluster.device.given == [b"PROMPT 0", b"PROMPT 1"]


async def test_a_fragment_whose_conditions_are_here_goes_before_one_that_waits_for_them(
    cluster: Cluster,
) -> None:
    await encode(cluster, 1)
    await generate(cluster, 0, 1)
    [event] = await cluster.told("fragment_generated")
    assert isinstance(event, FragmentGenerated) and event.fragment.group == 1
    await encode(cluster, 0)
    await cluster.told("fragment_generated", 2)


async def test_a_fragment_whose_prompt_cannot_be_encoded_fails_with_the_encoder_s_reason(
    cluster: Cluster,
) -> None:
    digest, fault = ENCODING.digest(prompt_of(3)), "the prompt cannot be encoded: no template"
    await store_conditions(
        cluster.store, RUN, digest, b"", prompt="", worker="encoder-0", fault=fault
    )
    await generate(cluster, 3)
    [failed] = await cluster.told("fragment_failed")
    assert isinstance(failed, FragmentFailed) and failed.reason == fault


@pytest.mark.parametrize("fault", ["missing", "changed", "not what the network takes"])
async def test_faulty_conditions_fail_the_fragment_and_not_the_worker_and_are_made_anew(
    cluster: Cluster, fault: str
) -> None:
    digest = ENCODING.digest(prompt_of(3))
    await encode(cluster, 3, fault.encode())
    found = await read_conditions(cluster.store, RUN, digest)
    assert found is not None
    if fault == "missing":
        await cluster.store.delete([found.ref.key])
    elif fault == "changed":
        await cluster.store.write(found.ref.key, b"CHANGED")
    await generate(cluster, 3)
    [failed] = await cluster.told("fragment_failed")
    assert isinstance(failed, FragmentFailed) and failed.stage == "rollout"
    assert await read_conditions(cluster.store, RUN, digest) is None, "forgotten"
    await generate(cluster, 3, attempt=1)
    await until(lambda: cluster.worker.activity == "waiting_for_conditions")
    await encode(cluster, 3)
    await cluster.told("fragment_generated")
    assert cluster.device.given == [b"PROMPT 3"]


async def test_another_attempt_stores_anew_what_it_was_given(cluster: Cluster) -> None:
    await encode(cluster, 3)
    await generate(cluster, 3)
    [event] = await cluster.told("fragment_generated")
    assert isinstance(event, FragmentGenerated)
    await cluster.store.delete([event.stored.conditions.key])
    await generate(cluster, 3, attempt=1)
    await cluster.told("fragment_generated", 2)
    assert await cluster.store.get(event.stored.conditions) == b"PROMPT 3"


async def test_a_fragment_that_has_become_stale_goes_back_without_its_conditions(
    cluster: Cluster,
) -> None:
    await generate(cluster, 0)
    await until(lambda: cluster.worker.activity == "waiting_for_conditions")
    await cluster.publish_version(1)
    [event] = await cluster.told("fragment_released")
    assert isinstance(event, FragmentReleased)
    assert (event.slot.group, event.reason) == (0, "stale")
    await until(lambda: cluster.worker.activity == "waiting_for_trainer")


async def test_a_worker_that_ends_gives_back_what_still_waits(cluster: Cluster) -> None:
    await generate(cluster, 0, 1)
    await until(lambda: len(cluster.app._waiting) == 2)
    await cluster.drain()
    events = await cluster.told("fragment_released", 2)
    assert [(e.slot.group, e.reason) for e in events if isinstance(e, FragmentReleased)] == [
        (0, "draining"), (1, "draining"),
    ]  # fmt: skip
