"""Alarms about a run that makes no progress."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.scheduler import limits
from services.scheduler.core.state import Plan, State
from services.scheduler.core.waiting import is_exchange_late, standstill
from shared.learning.metrics import nothing_trained
from shared.messages.workers import WorkerStatus
from shared.run.chain import CommitSummary
from shared.run.log_entries import NO_DEVICE_WORKS

IDLE_ACTIVITIES = "waiting_for", "refused", "stopping"
"""Beginnings of the activities in which a device does not work."""


@dataclass(slots=True)
class RunAlarms:
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Text of each alarm; empty while the alarm does not fire."""
    _busy: Mapping[str, float] = field(default_factory=dict)
    """Address -> seconds that the worker had worked at the last look."""
    _version: int | None = None
    _since: float = 0.0
    """When a device was last seen at work."""

    def look(
        self, plan: Plan, state: State, workers: Collection[WorkerStatus],
        steps: Collection[CommitSummary], now: float,
    ) -> Mapping[str, str]:  # fmt: skip
        """Return the reasons as of now."""
        newest = [(each.version, each.metrics) for each in steps][-limits.ALARM_STEPS :]
        is_open = state.phase == "running" and state.batch is not None and not state.recovering
        idle_in = (
            (*IDLE_ACTIVITIES, "committing") if is_exchange_late(state, now) else IDLE_ACTIVITIES
        )
        waits = is_open and all(each.activity.startswith(idle_in) for each in workers)
        busy = {each.address: each.busy_seconds for each in workers}
        has_worked = any(each > self._busy.get(address, each) for address, each in busy.items())
        version = newest[-1][0] if newest else -1
        if not waits or has_worked or version != self._version:
            self._since = now
        self._busy, self._version = busy, version
        idle = now - self._since
        self.reasons = {
            NO_DEVICE_WORKS: standstill(plan, state, idle) if idle >= limits.MAX_IDLE_S else "",
            "nothing_trained": "".join(nothing_trained(newest)),
        }
        return self.reasons
