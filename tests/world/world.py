"""A world: brokers, a store, the services of one run, and what starts those again that end."""

import asyncio
import hashlib
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from pydantic import SecretStr

from bench.cluster.build import Emulation
from bench.cluster.payloads import Scaled
from digenrl.local.brokers.nats_config import server_config
from digenrl.local.brokers.seaweedfs import OWNER
from shared.messages.records import HOME
from shared.messages.rights import ROLES, Role
from shared.process.settings import ServiceSettings
from shared.run.layout import parse_name
from shared.store import ObjectStore
from shared.store.settings import StoreSettings
from tests.world.bucket import KEYS, Bucket, BucketHandle
from tests.world.draws import RUN, Draw
from tests.world.loop import Process, WorldLoop, current
from tests.world.nats_server import NatsServer
from tests.world.nats_transport import Connection, Network
from tests.world.nature import EPOCH, begun
from tests.world.services import Site
from tests.world.valkey import Valkey
from tests.world.web import Web

AGAIN_S = 0.3
"""Seconds after which a process that has ended is started again, at most."""
NATS = ("nats", 4222)
NATS_CONFIG = server_config("/", listen="nats:4222", keys=KEYS)
PORTS = {"scheduler": 8000, "scheduler-1": 8001}


SIZES = Scaled(window=256, start=0, media=256, conditions=256, adapter=4096)
"""Bytes of what a run stores."""


@dataclass(slots=True)
class Service:
    """A service that is kept running."""

    name: str
    role: Role
    process: Process | None = None
    starts: int = 0
    is_done: bool = False
    """Whether it has ended with its run."""
    is_away: bool = False
    """Whether nobody starts it."""
    errors: list[str] = field(default_factory=list)
    """What has ended it, but for faults."""

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.state == "runs"


class World:
    def __init__(self, drawn: Draw, folder: Path, loop: WorldLoop) -> None:
        self.drawn = drawn
        self.loop = loop
        self.random = Random(f"{drawn.seed}/world")
        self.site = Site(folder, _emulation(drawn), drawn.recipe(folder), drawn.num_groups)
        self.log: list[str] = []
        """What has happened, line by line."""
        self.network = Network()
        self.nats = NatsServer(NATS_CONFIG)
        self.network.servers[NATS] = self.nats
        self.network.on_connect.append(self._connected)
        self.bucket = Bucket([RUN], self.random_of("bucket"), EPOCH, self._note_request)
        self.valkey = Valkey()
        self.web = Web(lambda: _name(), lambda sender, receiver: 0.0)
        names = ["scheduler", *(["scheduler-1"] if drawn.standby else []), *self.site.names()]
        self.services = {name: Service(name, _role_of(name)) for name in names}
        self.handles: dict[str, BucketHandle] = {}
        """The store as each process has it."""
        self.is_over = False

    def random_of(self, name: str) -> Random:
        return Random(f"{self.drawn.seed}/{name}")

    def say(self, what: str) -> None:
        self.log.append(f"{self.loop.now:.6f} {what}")

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.log).encode()).hexdigest()

    # --- what processes are given ---

    def settings(self, service: Service) -> ServiceSettings:
        """Return what a service is told by its environment."""
        return self.settings_of(service.name, service.role, PORTS.get(service.name, 0))

    def settings_of(self, name: str, role: Role, port: int = 0) -> ServiceSettings:
        """Return where a process of that name and role finds everything."""
        key, redis_url = SecretStr(name), SecretStr(self.valkey.url(name, role))
        own = {"worker": name, "port": port, "s3_access_key": key, "redis_url": redis_url}
        own["site"] = "lab" if self.drawn.seconds_per_byte(name) else HOME
        return _settings(role).model_copy(update=own)

    def open_store(self, settings: StoreSettings) -> ObjectStore:
        """Have the signature of `shared.store.open_store`."""
        assert settings.access_key is not None
        assert settings.secret_key is not None
        return ObjectStore(
            self.handle(
                settings.access_key.get_secret_value(), settings.secret_key.get_secret_value()
            )
        )

    def handle(self, name: str, role: str) -> BucketHandle:
        """Return the store as a process has it; its faults stay when it is started again."""
        if name not in self.handles:
            random, slowest = self.random_of(f"store/{name}"), self.drawn.slowest_request
            handle = self.bucket.handle(name, role)
            each = handle.seconds_per_byte = self.drawn.seconds_per_byte(name)
            handle.delay = lambda operation, size: random.random() * slowest + size * each
            self.handles[name] = handle
        return self.handles[name]

    def _connected(self, connection: Connection) -> None:
        process = current()
        if process is not None:
            process.at_death.append(connection.close)
        name = "" if process is None else process.name
        random = self.random_of(f"nats/{name}/{connection.number}")
        slowest = self.drawn.slowest_message
        connection.to_server.delay = connection.to_client.delay = lambda: random.random() * slowest

    # --- what keeps running ---

    async def keep(self, service: Service) -> None:
        """Start a service, and again whenever it ends, until it ends with its run."""
        random = self.random_of(f"keep/{service.name}")
        while not (service.is_done or self.is_over):
            process = begun(self.drawn.seed, service.name, service.starts)
            service.process, service.starts = process, service.starts + 1
            gone = asyncio.Event()
            process.at_death += [gone.set, lambda: self.web.kill(service.name)]
            self.say(f"start {service.name} {service.starts}")
            task = process.start(self.site.run(service.name, self.settings(service)))
            task.add_done_callback(partial(_ended, process))
            await gone.wait()
            told = process.told_to_end is not None and process.told_to_end.done()
            self._note_end(service, task, told)
            await asyncio.sleep(random.random() * AGAIN_S)
            while service.is_away:  # noqa: ASYNC110 -- it ends by a fault's end
                await asyncio.sleep(AGAIN_S)

    def _note_end(self, service: Service, task: "asyncio.Task[None]", told: bool) -> None:
        if not task.done():
            self.say(f"killed {service.name}")
        elif task.cancelled() or task.exception() is None:
            self.say(f"end {service.name}")
            service.is_done = service.role != "scheduler" and not told
        else:
            error = _leaf(task.exception())
            service.errors.append(error)
            self.say(f"error {service.name} {error}")

    # --- what is known of the run ---

    @property
    def judging(self) -> ObjectStore:
        return ObjectStore(self.bucket.handle("judge", OWNER))

    @property
    def num_commits(self) -> int:
        """Versions that are in the store, with the first one."""
        commits = self.bucket.objects.under(f"{RUN}/commits/")
        return sum(parse_name(RUN, "commits", each) is not None for each in commits)

    @property
    def is_finished(self) -> bool:
        return self.num_commits > self.drawn.setting.steps

    # --- the log ---

    def tell(self, level: str, event: MutableMapping[str, Any]) -> None:
        """Take what a process logs."""
        if level in ("warning", "error") or event["event"] in ("phase", "fault"):
            fields = " ".join(f"{key}={event[key]}" for key in sorted(event) if key != "event")
            self.say(f"{_name()} {event['event']} {fields}"[:300])

    def note_stored(self, stream: str, sequence: int, subject: str) -> None:
        if not stream.startswith("KV_"):
            self.say(f"{stream} {sequence} {subject}")

    def _note_request(self, name: str, operation: str, key: str) -> None:
        if operation in ("create", "write", "delete"):
            self.say(f"{name} {operation} {key}")


@cache
def _settings(role: Role) -> ServiceSettings:
    """Return what all processes of a role are told; to make it takes 4 ms."""
    given: dict[str, Any] = {
        "nats_url": f"nats://{role}:{KEYS.secret(role)}@{NATS[0]}:{NATS[1]}",
        "redis_url": "redis://nobody",
        "store_url": "s3://digenrl",
        "s3_access_key": "nobody",
        "s3_secret_key": role,
    }
    return ServiceSettings(
        run=RUN, worker="nobody", host="127.0.0.1", port=0, open_api=True, host_cache="off", **given
    )


def _emulation(drawn: Draw) -> Emulation:
    """Return the devices of a run, of which everything that they store is small."""
    profile = drawn.setting.load_profile()
    start = 256 if profile.shape.merged_steps else 0
    return Emulation(drawn.setting, profile, replace(SIZES, start=start))


def _ended(process: Process, _: "asyncio.Task[None]") -> None:
    """With its work a process ends, and all that is left of it."""
    process.kill()


def _name() -> str:
    process = current()
    return "" if process is None else process.name


def _role_of(name: str) -> Role:
    return next(role for role in ROLES if name.startswith(role))


def _leaf(error: BaseException | None) -> str:
    """Return what has ended a task in the end."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return repr(error)
