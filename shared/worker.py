"""What every worker does besides its work: say once a second what it is doing."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.bus import Bus
from shared.contracts import Activity, Service, WorkerStatus
from shared.telemetry import QUARANTINED

STATUS_S = 1.0


@dataclass(slots=True)
class Worker:
    """The status of this process; `doing` marks what it is busy with."""

    service: Service
    name: str
    idle: Activity
    """What it waits for when it is not busy."""
    device: str = "cpu"
    policy_version: int | None = None
    num_done: int = 0
    busy_seconds: float = 0.0
    activity: Activity = field(default="starting")

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        began, self.activity = time.monotonic(), activity
        try:
            yield
        finally:
            self.activity = self.idle
            self.busy_seconds += time.monotonic() - began

    async def report(self, bus: Bus) -> None:
        """Tell the scheduler, for ever."""
        while True:
            await bus.tell(self._status())
            await asyncio.sleep(STATUS_S)

    def _status(self) -> WorkerStatus:
        quarantined = sum(
            sample.value
            for metric in QUARANTINED.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
        return WorkerStatus(
            service=self.service,
            worker=self.name,
            activity=self.activity,
            policy_version=self.policy_version,
            num_done=self.num_done,
            num_quarantined=int(quarantined),
            busy_seconds=round(self.busy_seconds, 3),
            device=self.device,
        )
