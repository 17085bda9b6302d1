"""When NATS is said to store nothing."""

from types import SimpleNamespace
from typing import Any

from services.scheduler import limits
from services.scheduler.shell.housekeeping import STORES_NOTHING, StreamWatch
from shared.messages import subjects
from shared.process.service import Health


def test_a_lease_that_is_old_because_the_scheduler_was_stopped_is_no_fault_of_nats() -> None:
    """It is renewed soon, if NATS has only just answered again."""
    health, bus = Health(), SimpleNamespace(full={}, seconds_unstored=0.0)
    of_bus: Any = bus
    watch = StreamWatch(of_bus, health, lambda: None, seconds_unstored=lambda: 20.0)
    states = dict.fromkeys(stream.name for stream in subjects.STREAMS)
    watch._look_for_room(states, answers_for=0.0)
    assert health.ready
    watch._look_for_room(states, answers_for=limits.NATS_ALARM_DELAY_S)
    assert health.reason == STORES_NOTHING
