"""What somebody can do who has a role's key and is no worker of the run: nothing under a name of
its own, on real NATS and real SeaweedFS."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import cycle, islice
from pathlib import Path

import pytest
import structlog
from nats.aio.client import Client
from pydantic import SecretStr

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.messages import subjects
from shared.messages.codec import encode
from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    GenerateFragment,
    GradientComputed,
    GradientReleased,
    GroupFailed,
    GroupGradientRef,
    Message,
    ObjectRef,
    Prompt,
    Trajectories,
)
from shared.messages.rights import ROLES, Role
from shared.messages.subjects import subject_of
from shared.run.dead_letters import read_letters
from shared.run.rights import WRITES
from shared.store import ObjectStore, StoreSettings, open_store
from tests.storm.cluster import Cluster, cluster
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]
ROGUE = "rogue-00000000"
NOWHERE = ObjectRef(key="small/batches/nowhere", sha256="0" * 64, size=1)
STORED = Trajectories(
    trajectory=NOWHERE, conditions=NOWHERE, media=NOWHERE, weights_digest="0" * 64
)
THIEVES = tuple(role for role in ROLES if role != "scheduler")
"""Roles whose key does not command the run anyhow."""
log = structlog.get_logger()


def results(role: Role, task: GenerateFragment, name: str, stored: Trajectories) -> list[Message]:
    """Return what a role may say of a task, as if ``name`` had done it."""
    fragment, batch, index = task.fragment, task.fragment.batch, task.fragment.group
    prompt, samples = Prompt(text="forged"), (1.0,) * fragment.num_samples
    made = FragmentGenerated(
        fragment=fragment,
        policy=task.policy,
        prompt=prompt,
        stored=stored,
        worker=name,
        seconds=0.1,
    )
    score = FragmentScored(
        fragment=fragment, policy=task.policy, stored=stored, rewards=samples,
        parts={"emulated": samples}, generated_by=name, worker=name, seconds=0.1,
    )  # fmt: skip
    gradient = GroupGradientRef(gradient=NOWHERE, tally={}, worker=name)
    of_both: list[Message] = [
        made,
        FragmentFailed(slot=fragment.slot, stage="rollout", reason="forged", worker=name),
        FragmentFailed(slot=fragment.slot, stage="rollout", reason="forged", worker=None),
        FragmentReleased(slot=fragment.slot, worker=name, reason="returned"),
    ]
    if role == "reward":
        return [score]
    if role == "trainer":
        return of_both
    return [
        *of_both,
        score,
        GradientComputed(
            batch=batch, group=index, attempt=0, policy=task.policy, contribution=gradient,
            seconds=0.1,
        ),
        GradientReleased(batch=batch, group=index, attempt=0, worker=name, reason="failed"),
        GroupFailed(batch=batch, group=index, attempt=0, reason="forged"),
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def messages_of(run: Cluster, role: Role) -> AsyncIterator[Client]:
    client = Client()
    await client.connect(run.secrets[role]["DIGENRL_NATS_URL"], allow_reconnect=False)
    try:
        yield client
        await client.flush(5)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def tasks_of(run: Cluster) -> AsyncIterator[AsyncIterator[GenerateFragment]]:
    """Follow the tasks that the scheduler gives from now on."""
    url, name = run.secrets["scheduler"]["DIGENRL_NATS_URL"], run.recipe.run.name
    async with Bus.connect(url, run=name, name="tests") as bus:
        last = (await bus.stored(subjects.TASK))[1]

        async def tasks() -> AsyncIterator[GenerateFragment]:
            async with contextlib.aclosing(bus.follow(subjects.TASK, after=last)) as found:
                async for received in found:
                    if isinstance(received.message, GenerateFragment):
                        yield received.message

        yield tasks()


async def send_results(run: Cluster, role: Role, number: int) -> None:
    """Say so often of tasks of others that they are done, have failed or are given back."""
    name, sent = run.recipe.run.name, 0
    async with messages_of(run, role) as client, tasks_of(run) as tasks:
        async for task in tasks:
            for message in results(role, task, ROGUE, STORED):
                await client.publish(subject_of(name, message), encode(message))
                sent += 1
            if sent >= number:
                return


def store_as(run: Cluster, role: Role) -> ObjectStore:
    secrets = run.secrets[role]
    return open_store(
        StoreSettings(
            url=run.environment["DIGENRL_STORE_URL"],
            endpoint=run.environment["DIGENRL_S3_ENDPOINT"],
            access_key=SecretStr(secrets["DIGENRL_S3_ACCESS_KEY"]),
            secret_key=SecretStr(secrets["DIGENRL_S3_SECRET_KEY"]),
        )
    )


def foreign_keys(run: str, role: Role) -> list[str]:
    """Return names that another role has, and its own folders at every place that another has."""
    places = {each for places in WRITES.values() for each in places}
    other = {each for each in places if not each.startswith(WRITES[role])}
    names = [f"{each}00000099.json" if each.endswith("/") else each for each in sorted(other)]
    positions = [
        f"{place}{own}00000099.json"
        for place in sorted(other)
        if place.endswith("/")
        for own in WRITES[role]
        if own.endswith("/")
    ]
    return [f"{run}/{each}" for each in (*names, *positions)]


async def store_objects(run: Cluster, role: Role, number: int) -> list[str]:
    """Store so many objects where a role may not; return those that were taken."""
    store, taken = store_as(run, role), list[str]()

    async def put(key: str) -> None:
        with contextlib.suppress(Unavailable):
            await store.write(key, b"{}")
            taken.append(key)

    keys = islice(cycle(foreign_keys(run.recipe.run.name, role)), number)
    await asyncio.gather(*map(put, keys))
    return taken


@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.slow)])
async def test_a_stolen_key_does_nothing_to_what_others_store_and_do(
    tmp_path: Path, number: int
) -> None:
    setting = small(tmp_path, steps=100_000, tag=1, gradient_help=True)
    async with cluster(tmp_path / "run", setting, stores_in="s3") as run:
        await run.until_step(2)
        for role in THIEVES:
            assert await store_objects(run, role, number) == [], role
            await send_results(run, role, number)
        await run.until_step(await run.num_commits() + 2)
        records = await run.commits()
        groups = [group for record in records for group in record.trained]
        assert not [group for group in groups if ROGUE in (*group.workers, group.trained_by)]
        assert {attempt for group in groups for *_, attempt in group.fragments} == {0}
        assert {group.attempt for group in groups} == {0}
        assert not any(run.num_deaths.values())
        assert [letter.reason for letter, _ in await read_letters(run.store, "small")] == []
        assert await violations_of(run) == []
