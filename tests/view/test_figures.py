"""What the pages show of devices."""

from typing import cast

import pytest

from digenrl.api.run_history import RunHistory
from digenrl.view.figures import schedule_of, slowest_of
from shared.run.usage import BatchUsage
from shared.store import ObjectStore


def test_members_exchange_gradients() -> None:
    history = RunHistory(cast(ObjectStore, None), "test")
    for batch, seconds in ((0, 1.0), (1, 2.0)):
        devices = {"trainer-0": {"training": 3.0, "committing": seconds}}
        usage = {"batch": batch, "seconds": 5.0, "devices": devices}
        history.usage[batch] = BatchUsage.model_validate(usage)
    shown = schedule_of(history)
    assert shown["exchanged"] == {"trainer-0": 1.5}
    assert shown["uses"]["committing"] == "exchanges gradients"


def slowest(waits: str, *seconds: float, device: str = "cpu") -> dict[str, object] | None:
    """Return what is shown of the first of these workers."""
    workers: list[dict[str, object]] = [
        {"worker": str(at), "device": device if at else "cpu", "seconds_per_sample": each}
        for at, each in enumerate((*seconds, None))
    ]
    known = {"worker": "0", "seconds_per_sample": seconds[0], "mean_seconds_per_sample": 0.1}
    return slowest_of(known, workers, waits)


def test_a_worker_is_called_slow_only_if_it_holds_up_others_or_is_unlike_its_equals() -> None:
    assert slowest("waiting_for_reward", 0.3, 0.2) is None
    assert slowest_of(None, [], "tail") is None
    for waits in ("waiting_for_rollout", "tail"):
        found = slowest(waits, 0.3, 0.1)
        assert found is not None and not found["is_far_slower"]
        assert found["mean_seconds_per_sample"] == pytest.approx(0.2)
    found = slowest("waiting_for_reward", 0.9, 0.1, 0.1)
    assert found is not None and found["is_far_slower"]
    assert slowest("waiting_for_reward", 0.9, 0.1, 0.1, device="H100") is None, "by nature"
