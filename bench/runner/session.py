"""Brokers that serve every run of a study."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench import FROM_CLONE
from digenrl.local.brokers.embedded import Program, plan_brokers
from digenrl.local.processes.ports import releasing_ports
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.secrets.keys import load_keys
from digenrl.local.secrets.tokens import Tokens, load_tokens
from shared.messages.rights import Role
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
    secrets: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)
    """What each role proves itself with; nothing if one user may do everything."""

    def of(self, service: str) -> dict[str, str]:
        """Return what a service proves itself with; fluid devices are trainers."""
        role: Role = next((each for each in self.secrets if service.startswith(each)), "trainer")
        return dict(self.secrets[role]) if self.secrets else {}

    def settings(self, run: str) -> ServiceSettings:
        given = {
            key.removeprefix("DIGENRL_").lower(): value
            for key, value in {**self.environment, **self.of("scheduler")}.items()
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
    by_role: bool = False,
) -> AsyncIterator[Session]:
    """Starts real brokers, which keep their data in ``data``, and stops them at the end.

    ``objects``: a folder in place of the S3 server. ``place``: changes how a broker is started.
    ``by_role``: whether each role has a user of its own, with its rights alone.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with releasing_ports():
        plan = plan_brokers(data, load_keys(folder) if by_role else secrets.token_urlsafe(24))
        names: Collection[str] = BROKERS
        tokens = load_tokens(folder)
        environment = plan.environment | tokens.environment | FROM_CLONE
        if objects is not None:
            names = BROKERS[:2]
            environment["DIGENRL_STORE_URL"] = objects.as_uri()
            environment["DIGENRL_HOST_CACHE"] = str(objects / "host-cache")
        brokers = Supervisor(folder / "logs", environment)
        wanted = [place(program) for program in plan.programs if program.name in names]
        try:
            await asyncio.gather(*(brokers.start(program) for program in wanted))
            of_roles = plan.secrets if by_role else {}
            yield Session(folder, environment, brokers, tokens, secrets=of_roles)
        finally:
            await brokers.stop(list(names))
