"""A rollout worker for each test, which waits for nothing any longer than it has to."""

from functools import partial
from pathlib import Path

import pytest

from tests.rollout.worker import Start, cluster


@pytest.fixture
def worker(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a worker; takes what `cluster` does after its first two arguments."""
    monkeypatch.setattr("services.rollout.policy_loader.RETRY_S", 0.01)
    monkeypatch.setattr("shared.devices.conditions.LOOK_S", 0.01)
    monkeypatch.setattr("shared.process.worker.RETRY_S", 0.01)
    return partial(cluster, nats_url, tmp_path / "objects")
