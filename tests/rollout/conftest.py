"""A rollout worker for each test, which waits for nothing any longer than it has to."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tests.rollout import worker as workers
from tests.rollout.worker import Cluster, Start


@pytest.fixture
def worker(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a worker; takes what `cluster` does after its first two arguments."""
    monkeypatch.setattr("services.rollout.policy_loader.WORKER_RETRY_S", 0.01)
    monkeypatch.setattr("shared.devices.conditions.CONDITIONS_POLL_S", 0.01)
    monkeypatch.setattr("shared.process.worker.WORKER_RETRY_S", 0.01)
    return partial(workers.cluster, nats_url, tmp_path / "objects")


@pytest.fixture
async def cluster(worker: Start) -> AsyncIterator[Cluster]:
    async with worker() as cluster:
        yield cluster
