"""Brokers that serve every run of a study."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from bench import FROM_CLONE
from digenrl.local.brokers import Program, plan_brokers
from digenrl.local.ports import releasing_ports
from digenrl.local.supervisor import Supervisor
from digenrl.local.tokens import Tokens, tokens_of
from shared.process.settings import ServiceSettings
from shared.store import ObjectStore, open_store

BROKERS = ("nats", "valkey", "objects")


@dataclass(slots=True)
class Session:
    """The brokers, while the session is open."""

    folder: Path
    """Logs and recipes, a folder per run."""
    environment: dict[str, str]
    """What the services need to find the brokers."""
    brokers: Supervisor
    tokens: Tokens
    num_runs: int = 0

    def settings(self, run: str) -> ServiceSettings:
        given = {
            key.removeprefix("DIGENRL_").lower(): value
            for key, value in self.environment.items()
            if key.startswith("DIGENRL_")
        }
        return ServiceSettings(run=run, worker="bench", **given)  # type: ignore[arg-type]

    def new_folder(self, run: str) -> Path:
        folder = self.folder / run
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def store(self) -> ObjectStore:
        return open_store(self.settings("bench").store)


@contextlib.asynccontextmanager
async def open_session(
    folder: Path,
    data: Path,
    *,
    objects: Path | None = None,
    place: Callable[[Program], Program] = lambda program: program,
) -> AsyncIterator[Session]:
    """Starts real brokers, which keep their data in ``data``, and stops them at the end.

    ``objects``: a folder in place of the S3 server. ``place``: changes how a broker is started.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with releasing_ports():
        plan = plan_brokers(data, secrets.token_urlsafe(24))
        names: Collection[str] = BROKERS
        tokens = tokens_of(folder)
        environment = plan.environment | tokens.environment | FROM_CLONE
        if objects is not None:
            names = BROKERS[:2]
            environment["DIGENRL_STORE_URL"] = f"file://{objects}"
            environment["DIGENRL_HOST_CACHE"] = str(objects / "host-cache")
        brokers = Supervisor(folder / "logs", environment)
        wanted = [place(program) for program in plan.programs if program.name in names]
        try:
            await asyncio.gather(*(brokers.start(program) for program in wanted))
            yield Session(folder, environment, brokers, tokens)
        finally:
            await brokers.stop(list(names))
