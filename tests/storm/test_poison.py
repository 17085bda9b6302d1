"""Mutated messages through each real service: none dies, the run goes on, and each poison is in the
dead letters with its reason."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgpack
import pytest
import structlog

from shared.bus.connection import open_connection
from shared.errors import ContractError
from shared.messages.codec import decode, encode
from shared.messages.contracts import (
    FragmentGenerated,
    FragmentScored,
    GenerateFragment,
    Message,
    TrainGroup,
)
from shared.messages.rights import Role
from shared.messages.subjects import message_subject
from shared.run.log import Log
from shared.run.log_entries import DeadLetter
from tests.shared.messages.test_mutations import MESSAGES, mutated
from tests.storm.cluster import Cluster, cluster, until_true
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(600)]
NUM = int(os.environ.get("DIGENRL_SERVICE_MUTATIONS", "5000"))
"""Mutations for each service."""
FAR = 1_000_000
"""First of the batches that the run never comes to."""
SOON, WITHIN = 8, 40
"""Batches that the trainer comes to while the test goes on: so many later, and so many of them."""
AT_ONCE = 200
log = structlog.get_logger()

ORIGINALS = {message["kind"]: decode(msgpack.packb(message)) for message in MESSAGES.values()}


@dataclass(frozen=True)
class Place:
    """Where messages are aimed at."""

    address: str
    """Address of a rollout device."""
    batch: int
    """The batch in training."""


def fragment_at(message: Message, number: int) -> Message:
    """Return a message about a fragment of a batch that is far away."""
    assert isinstance(message, GenerateFragment | FragmentGenerated | FragmentScored)
    fragment = message.fragment.model_copy(update={"batch": FAR + number})
    return message.model_copy(update={"fragment": fragment})


def task(place: Place, number: int) -> Message:
    """Return a task of a rollout device."""
    message = fragment_at(ORIGINALS["generate_fragment"], number)
    return message.model_copy(update={"worker": place.address})


def group(place: Place, number: int) -> Message:
    """Return a group of a batch that the trainer soon comes to."""
    message = ORIGINALS["train_group"]
    assert isinstance(message, TrainGroup)
    batch = place.batch + SOON + number % WITHIN
    return message.model_copy(update={"batch": batch, "attempt": 1000 + number})


def published(place: Place, number: int) -> Message:
    return ORIGINALS["policy_published"]


def generated(place: Place, number: int) -> Message:
    return fragment_at(ORIGINALS["fragment_generated"], number)


def scored(place: Place, number: int) -> Message:
    return fragment_at(ORIGINALS["fragment_scored"], number)


READ_BY: dict[str, tuple[Role, Callable[[Place, int], Message]]] = {
    "rollout": ("scheduler", task),
    "reward": ("rollout", generated),
    "trainer": ("scheduler", group),
    "scheduler": ("reward", scored),
    "encoder": ("trainer", published),
}
"""Service -> whose rights its messages are sent with, and which they are."""


def is_readable(run: str, subject: str, data: bytes) -> bool:
    try:
        return message_subject(run, decode(data)) == subject
    except ContractError:
        return False


async def poison(run: Cluster, service: str, place: Place) -> int:
    """Send mutated messages to a service; return how many of them nobody can read."""
    role, original = READ_BY[service]
    name, draw, unreadable = run.recipe.run.name, Random(service), 0
    others = [encode(each) for each in ORIGINALS.values()]
    client = await open_connection(run.secrets[role]["DIGENRL_NATS_URL"], "poison")
    try:
        stream = client.jetstream()
        for first in range(0, NUM, AT_ONCE):
            sending = []
            for number in range(first, min(first + AT_ONCE, NUM)):
                message = original(place, number)
                subject, data = (
                    message_subject(name, message),
                    mutated(draw, encode(message), others),
                )
                unreadable += not is_readable(name, subject, data)
                sending.append(stream.publish(subject, data, timeout=20))
            await asyncio.gather(*sending)
    finally:
        await client.close()
    return unreadable


@pytest.mark.parametrize("service", READ_BY)
async def test_no_service_dies_of_mutated_messages_and_all_are_kept(
    tmp_path: Path, service: str
) -> None:
    setting = small(tmp_path, steps=100_000, tag=1, encoders=1)
    async with cluster(tmp_path / "run", setting) as run:
        await run.until_step(2)
        workers = await run.get("/v1/workers")
        address = next(each["address"] for each in workers if each["service"] == "rollout")
        place = Place(address, await run.num_commits() - 1)
        unreadable = await poison(run, service, place)
        assert unreadable > NUM / 3

        async def are_kept() -> bool:
            log = Log.of_run(run.store, run.recipe.run.name)
            await log.look()
            letters = [each for each in log.entries if isinstance(each, DeadLetter)]
            found = [letter for letter in letters if letter.kind == "unreadable"]
            assert all(letter.reason for letter in found)
            return len(found) >= unreadable

        await run.until_step(place.batch + SOON + WITHIN + 2, seconds=200)
        await until_true(are_kept, seconds=200)
        log.info("poisoned", service=service, messages=NUM, unreadable=unreadable)
        assert not any(run.num_deaths.values()), run.num_deaths
        await run.until_step(await run.num_commits())
        assert await violations_of(run) == []
