"""Automatic repairs of `digenrl up`: after its disk was full, NATS accepts nothing until it is
restarted, even if there is space again."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog

from digenrl.local.limits import MIN_RESTART_BYTES, RESTART_DELAY_S
from digenrl.local.processes.supervisor import Supervisor
from shared.telemetry import NATS_STORES_NOTHING

log = structlog.get_logger()


@dataclass(slots=True)
class AlarmRemedies:
    folder: Path
    url: str
    """Address of the scheduler."""
    client: httpx.AsyncClient
    _not_before: float = 0.0

    async def look(self, supervisor: Supervisor) -> None:
        """Restart NATS if the scheduler reports that it stores nothing, although there is space."""
        now = time.monotonic()
        if now < self._not_before or shutil.disk_usage(self.folder).free < MIN_RESTART_BYTES:
            return
        try:
            reason = str((await self.client.get(f"{self.url}/readyz")).json().get("status"))
        except (httpx.HTTPError, ValueError):
            return
        if reason.startswith(NATS_STORES_NOTHING):
            self._not_before = now + RESTART_DELAY_S
            log.warning("nats_restarted", reason=reason)
            supervisor.restart("nats")
