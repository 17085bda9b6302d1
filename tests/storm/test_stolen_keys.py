"""What somebody can do who has a role's key and is no worker of the run: nothing under a name of
its own, on real NATS and real SeaweedFS."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
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
    FragmentGenerated,
    FragmentSlot,
    GenerateFragment,
    TrainGroup,
    Trajectories,
)
from shared.messages.rights import ROLES, Role
from shared.messages.subjects import message_subject
from shared.run.log import Log
from shared.run.log_entries import DeadLetter
from shared.store import ObjectStore, StoreSettings, open_store
from tests.paths import ROOT
from tests.storm.cluster import Cluster, cluster
from tests.storm.forged import STORED, foreign_keys, results
from tests.storm.judge import violations_of
from tests.storm.small import small

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]
ROGUE = "rogue-00000000"
THIEVES = tuple(role for role in ROLES if role != "scheduler")
"""Roles whose key does not command the run anyhow."""
log = structlog.get_logger()


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
                await client.publish(message_subject(name, message), encode(message))
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
@pytest.mark.slow
async def test_a_stolen_key_does_nothing_to_what_others_store_and_do(
    tmp_path: Path, number: int
) -> None:
    setting = small(tmp_path, steps=100_000, tag=1)
    async with cluster(tmp_path / "run", setting, stores_in="s3") as run:
        await run.until_step(2)  # in the first batches a lent trainer may give work back
        before = await run.num_commits()
        for role in THIEVES:
            assert await store_objects(run, role, number) == [], role
            await send_results(run, role, number)
        await run.until_step(await run.num_commits() + 2)
        records = (await run.commits())[before + 1 :]
        groups = [group for record in records for group in record.trained]
        assert not [group for group in groups if ROGUE in group.workers]
        assert {attempt for group in groups for *_, attempt in group.fragments} == {0}
        assert {group.attempt for group in groups} == {0}
        assert not any(run.num_deaths.values())
        log = Log.of_run(run.store, "small")
        await log.look()
        assert not [each for each in log.entries if isinstance(each, DeadLetter)]
        assert await violations_of(run) == []


@dataclass
class Forger:
    """Answers tasks under the names of the workers that have them, with the samples of another
    task of the same version."""

    run: Cluster
    bus: Bus
    known: dict[int, FragmentGenerated] = field(default_factory=dict)
    sent: dict[FragmentSlot, Trajectories] = field(default_factory=dict)
    trained: set[FragmentSlot] = field(default_factory=set)

    async def watch(self, stream: subjects.Stream) -> None:
        """Learn what is generated, and which forged results are trained."""
        async for received in self.bus.follow(stream, after=(await self.bus.stored(stream))[1]):
            if isinstance(received.message, FragmentGenerated):
                self.known[received.message.policy.version] = received.message
            if isinstance(received.message, TrainGroup):
                for each in received.message.fragments:
                    if self.sent.get(each.fragment.slot) == each.stored:
                        self.trained.add(each.fragment.slot)

    async def answer(self, number: int) -> None:
        async with messages_of(self.run, "rollout") as client, tasks_of(self.run) as tasks:
            async for task in tasks:
                source = self.known.get(task.policy.version)
                if source is not None and source.fragment.slot != task.fragment.slot:
                    self.sent[task.fragment.slot] = source.stored
                    made = results("rollout", task, task.worker, source.stored)[0]
                    await client.publish(message_subject(self.bus.run, made), encode(made))
                if len(self.sent) == number:
                    return


@pytest.mark.slow
async def test_results_under_the_name_of_another_count_as_the_page_says(tmp_path: Path) -> None:
    """All workers of a role have one key, so nothing tells a forged result from an honest one."""
    async with cluster(tmp_path / "run", small(tmp_path, steps=100_000), stores_in="s3") as run:
        await run.until_step(2)
        url = run.secrets["scheduler"]["DIGENRL_NATS_URL"]
        async with Bus.connect(url, run="small", name="tests") as bus:
            forger = Forger(run, bus)
            streams = (subjects.TRAJ, subjects.TRAIN)
            watching = [asyncio.create_task(forger.watch(each)) for each in streams]
            with contextlib.suppress(TimeoutError):  # the run may fail of it
                await asyncio.wait_for(forger.answer(200), 120)
                await asyncio.sleep(5)
            for each in watching:
                each.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        view = await run.get("/v1/run")
    log.info("forged", sent=len(forger.sent), trained=len(forger.trained), run=view)
    page = (ROOT / "docs" / "security.md").read_text()
    assert len(forger.trained) > len(forger.sent) / 2
    assert re.search(r"of 200 such results on the digits, \d+ were trained", page)
