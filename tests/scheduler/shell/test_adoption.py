"""How long versions take from their commit to the devices that generate with them."""

import pytest

from services.scheduler.shell import adoption
from services.scheduler.shell.adoption import UNKNOWN, Adoption, Lag
from shared.messages.workers import Service, WorkerStatus
from tests import examples


def status(worker: str, version: int | None, service: Service = "rollout") -> WorkerStatus:
    return examples.status(service, worker=worker, policy_version=version)


def test_a_version_is_adopted_from_the_first_to_the_last_rollout_worker() -> None:
    known = Adoption()
    for worker in ("rollout-0", "rollout-1"):
        known.hear(status(worker, 4), 0.0)
    known.hear(status("rollout-2", None), 0.0)
    known.committed(5, 10.0)
    assert known.lag(5) == Lag(10.0) and known.lag(4) is UNKNOWN
    known.hear(status("trainer-0", 5, "trainer"), 10.0)
    known.hear(status("rollout-0", 4), 10.5)
    assert known.lag(5).first_seconds is None
    known.hear(status("rollout-0", 5), 11.0)
    known.hear(status("rollout-1", 5), 13.0)
    known.hear(status("rollout-0", 5), 20.0)  # it still has it
    assert known.lag(5) == Lag(10.0, 1.0, 3.0)


def test_a_version_that_was_loaded_before_its_commit_was_adopted_at_once() -> None:
    known = Adoption()
    known.hear(status("rollout-0", 5), 9.0)
    known.committed(5, 10.0)
    assert known.lag(5) == Lag(10.0, 0.0, 0.0)
    known.hear(status("rollout-1", 5), 13.0)
    assert known.lag(5) == Lag(10.0, 0.0, 3.0)


def test_of_old_versions_and_of_workers_that_left_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adoption, "KEPT", 2)
    known = Adoption()
    for version in range(3):
        known.committed(version, float(version))
        known.hear(status("rollout-0", version), version + 0.5)
    assert known.lag(0) is UNKNOWN and known.lag(2).first_seconds == 0.5
    known.forget("rollout-0-a")
    assert known._newest == {}
