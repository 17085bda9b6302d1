"""Brokers that serve every run of the bench, and what its services are started with."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr

from bench import FROM_CLONE
from bench.two_devices.pinned import pinned
from bench.two_devices.placement import Placement
from digenrl.local.brokers import Program, plan_brokers
from digenrl.local.ports import ports_let_go
from digenrl.local.supervisor import Supervisor
from shared.store import ObjectStore, StoreSettings, open_store


@dataclass(frozen=True, slots=True)
class Session:
    supervisor: Supervisor
    environment: dict[str, str]
    """Where the brokers are."""
    placement: Placement
    folder: Path
    """For logs and recipes, a folder per run."""

    @property
    def store(self) -> ObjectStore:
        given = self.environment
        return open_store(
            StoreSettings(
                url=given["DIGENRL_STORE_URL"],
                endpoint=given["DIGENRL_S3_ENDPOINT"],
                access_key=SecretStr(given["DIGENRL_S3_ACCESS_KEY"]),
                secret_key=SecretStr(given["DIGENRL_S3_SECRET_KEY"]),
            )
        )


@asynccontextmanager
async def open_session(folder: Path, placement: Placement) -> AsyncIterator[Session]:
    """Real brokers, off the devices' cores where there are others; gone at the end."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with ports_let_go(), tempfile.TemporaryDirectory(dir=folder, prefix="brokers-") as data:
        brokers = plan_brokers(Path(data), secrets.token_urlsafe(24))
        supervisor = Supervisor(folder / "logs", brokers.environment | FROM_CLONE)
        names = [program.name for program in brokers.programs]
        try:
            await asyncio.gather(
                *(supervisor.start(on(program, placement.others)) for program in brokers.programs)
            )
            yield Session(supervisor, brokers.environment, placement, folder)
        finally:
            await supervisor.stop(names)


def on(program: Program, cpus: Sequence[int]) -> Program:
    """The program, on these cores."""
    return replace(program, argv=pinned(program.argv, cpus))
