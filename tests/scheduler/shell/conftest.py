"""A scheduler in mid-run, whose HTTP API answers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from fastapi.testclient import TestClient

from services.scheduler.core.inputs import WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import State
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.roster import LastStatus
from shared.bus.bus import Bus
from shared.process.service import Health
from shared.run.layout import commit_key
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from tests import examples
from tests.scheduler.shell.live import Live, Trainer
from tests.scheduler.shell.served import Outbox, commit, stored
from tests.shared.store.hosts import CountedReads


@pytest.fixture
def folder(tmp_path: Path) -> CountedReads:
    for version in (0, 1):
        path = tmp_path / commit_key("test", version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(commit(version).encode())
    return CountedReads(tmp_path)


@pytest.fixture
def scheduler(folder: CountedReads) -> Scheduler:
    plan = examples.plan()
    state, _ = step(plan, State(), WorkerJoined("rollout-0-a", "rollout-0", "rollout"), 0.0)
    state, _ = step(plan, state, examples.published(1), 1.0)
    scheduler = Scheduler(
        plan,
        cast(Bus, Outbox()),
        ObjectStore(folder),
        cast(VersionIndex, None),
        Health(),
        state=state,
        committed_at=[0.0, 2.0, 4.0, 7.0],
    )
    for version in (0, 1):
        scheduler.chain.add(stored(version))
    scheduler.run_log.is_read = True
    scheduler.roster.statuses["rollout-0-a"] = LastStatus(examples.status("rollout"), 0.0)
    return scheduler


@pytest.fixture
async def index(redis_url: str) -> AsyncIterator[VersionIndex]:
    async with VersionIndex.connect(redis_url, run="test") as index:
        yield index


@pytest.fixture
def live(bus: Bus, index: VersionIndex, folder_store: ObjectStore) -> Live:
    """A scheduler on real brokers, which does not run yet."""
    scheduler = Scheduler(examples.plan(num_batches=9), bus, folder_store, index, Health())
    return Live(Trainer(bus, folder_store), scheduler, index)


@pytest.fixture
def client(scheduler: Scheduler) -> TestClient:
    return TestClient(create_app(scheduler))
