"""Runs of the emulated cluster, one after the other over the same brokers."""

import asyncio
import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx

from bench import FROM_CLONE
from bench.cluster.hold import Interval
from bench.cluster.processes import JOINING_S, SERVICES, SETTING, joined_key
from bench.cluster.setting import Setting, recipe_of, write_prompts
from bench.two_devices.placement import cpu_seconds
from digenrl.local.brokers import Program, plan_brokers
from digenrl.local.ports import free_ports, ports_let_go
from digenrl.local.supervisor import Supervisor, last_line
from services.scheduler.core.usage import BatchUsage
from shared.bus.bus import Bus
from shared.errors import DigenRLError
from shared.messages import subjects
from shared.messages.contracts import PolicyPublished
from shared.process.settings import ServiceSettings
from shared.run.layout import usage_key
from shared.store import ObjectStore, open_store

BROKERS = ("nats", "valkey")
"""Objects are files in memory: SeaweedFS takes 10 ms of a core for each MB that is put, and 2 ms
for each object, more than two cores have at these rates."""
MEMORY = Path("/dev/shm")
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""So that the emulated hosts, all on this machine, use memory again: a new page costs as much time
as filling it does."""
SILENCE_S = 60.0
"""Without a commit for this long, a run has failed."""
USAGE_TRIES = 100

T = TypeVar("T")
OnCommit = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """What processes and streams had come to at a commit."""

    version: int
    at: float
    """Monotonic seconds."""
    cpu: dict[str, float]
    """Process -> seconds."""
    stored: dict[str, int]
    """Stream -> messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What was seen of one run."""

    setting: Setting
    commits: list[float]
    """When each version was announced, the first one first."""
    begin: Sample
    """At the last commit but one of the warm-up: to ask the broker delays what comes next."""
    end: Sample
    usage: list[BatchUsage]
    intervals: list[Interval]
    overshoot: dict[str, dict[str, float]]
    """Of sleeps, by service."""


@dataclass(slots=True)
class Session:
    """The brokers, while the session is open."""

    folder: Path
    environment: dict[str, str]
    brokers: Supervisor
    _runs: int = 0

    async def run(self, setting: Setting, warm_up: int, last: int, note: OnCommit) -> RunRecord:
        """Run until version ``last`` is committed; ``note`` is told of each version.

        Raises:
            DigenRLError: a service has died, or nothing is committed any more.
        """
        self._runs += 1
        setting = setting.model_copy(update={"run": f"{setting.run}-{self._runs}"})
        folder = self.folder / setting.run
        _prepare(folder, setting)
        sampled = (warm_up - 1, last)
        services = Supervisor(folder / "logs", self.environment | FROM_CLONE)
        settings = _settings(self.environment, setting.run)
        emulated = [name for name in SERVICES if name != "rollout" or setting.num_rollout]
        [port] = free_ports(1)
        async with settings.connect_bus() as bus:
            watch = _Watch(self, services, bus, setting.run, sampled)
            try:
                for program in _programs(folder, emulated, port):
                    await services.start(program, wait=False)
                await watch.until_joined(port, setting)
                await open_store(settings.store).create(joined_key(setting.run), b"")
                await watch.until(last, note)
                usage = await _usage(open_store(settings.store), setting.run, last)
            finally:
                await services.stop(list(services.children))
            await _forget(bus, open_store(settings.store), setting.run)
        found = {name: json.loads((folder / f"{name}.json").read_text()) for name in emulated}
        return RunRecord(
            setting=setting,
            commits=watch.commits,
            begin=watch.samples[sampled[0]],
            end=watch.samples[last],
            usage=usage,
            intervals=[Interval(**each) for one in found.values() for each in one["intervals"]],
            overshoot={name: one["overshoot"] for name, one in found.items()},
        )


@contextlib.asynccontextmanager
async def opened(parent: Path) -> AsyncIterator[Session]:
    """A session with brokers of its own; nothing of it is left but logs if it fails."""
    with ports_let_go():
        async with _opened(*_folders(parent)) as session:
            yield session


@contextlib.asynccontextmanager
async def _opened(folder: Path, objects: Path) -> AsyncIterator[Session]:
    plan = plan_brokers(folder, secrets.token_urlsafe(24))
    environment = plan.environment | {"DIGENRL_STORE_URL": f"file://{objects}"}
    brokers = Supervisor(folder / "logs", environment)
    try:
        wanted = [program for program in plan.programs if program.name in BROKERS]
        await asyncio.gather(*(brokers.start(program) for program in wanted))
        yield Session(folder, environment, brokers)
    finally:
        await brokers.stop(list(BROKERS))
        shutil.rmtree(objects, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _folders(parent: Path) -> tuple[Path, Path]:
    """One for brokers and logs, and one in memory for objects."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="cluster-", dir=parent))
    (folder / "logs").mkdir()
    memory = MEMORY if MEMORY.is_dir() else None
    return folder, Path(tempfile.mkdtemp(prefix="digenrl-bench-", dir=memory))


@dataclass(slots=True)
class _Watch:
    """Follows the announcements of one run."""

    session: Session
    services: Supervisor
    bus: Bus
    run: str
    sampled: tuple[int, int]
    """Versions."""
    commits: list[float] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)

    async def until_joined(self, port: int, setting: Setting) -> None:
        """Until the scheduler, at ``port``, knows all workers but the trainer."""
        await self._or_died(_all_joined(port, setting))

    async def until(self, last: int, note: OnCommit) -> None:
        await self._or_died(self.bus.wait_for_streams())
        subject = subjects.event_subject(self.run, "policy_published")
        async with contextlib.aclosing(self.bus.follow(subjects.EVT, [subject])) as stream:
            while len(self.commits) <= last:
                received = await self._or_died(anext(stream))
                event = received.message
                if not isinstance(event, PolicyPublished) or event.policy.version != len(
                    self.commits
                ):
                    continue
                self.commits.append(time.monotonic())
                if event.policy.version in self.sampled:
                    self.samples[event.policy.version] = await self._sample()
                note(event.policy.version)

    async def _or_died(self, awaited: Awaitable[T]) -> T:
        """The result, unless a service dies before, or it takes too long."""
        task = asyncio.ensure_future(awaited)
        deadline = time.monotonic() + SILENCE_S
        try:
            while not task.done() and time.monotonic() < deadline:
                self._check_alive()
                await asyncio.wait({task}, timeout=1.0)
            if not task.done():
                logs = self.services.logs
                raise DigenRLError(f"{self.run}: no commit for {SILENCE_S:.0f} s; see {logs}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return task.result()

    def _check_alive(self) -> None:
        for child in self.services.children.values():
            process = child.process
            if child.num_restarts or (process is not None and process.returncode is not None):
                last = last_line(child.log_path)
                raise DigenRLError(f"{self.run}: {child.program.name} has died: {last}")

    async def _sample(self) -> Sample:
        processes = self.services.children | self.session.brokers.children
        cpu = {}
        for name, child in processes.items():
            if child.process is not None:
                cpu[name] = cpu_seconds(child.process.pid)
        stored = {}
        for stream in subjects.STREAMS:
            info = await self.bus.jetstream.stream_info(stream.name)
            stored[stream.name] = info.state.last_seq
        return Sample(len(self.commits) - 1, self.commits[-1], cpu, stored)


def _prepare(folder: Path, setting: Setting) -> None:
    (folder / "logs").mkdir(parents=True)
    (folder / SETTING).write_text(setting.model_dump_json(indent=1))
    write_prompts(folder, setting.load_profile().shape.groups * setting.steps)
    (folder / "recipe.json").write_text(recipe_of(setting, folder).model_dump_json(indent=1))


async def _all_joined(port: int, setting: Setting) -> None:
    wanted = {"rollout": setting.num_rollout, "reward": setting.num_reward}
    async with httpx.AsyncClient(verify=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                run = (await client.get(f"http://127.0.0.1:{port}/v1/run")).json()
                if all(run["num_workers"][service] == wanted[service] for service in wanted):
                    return
            await asyncio.sleep(JOINING_S)


def _programs(folder: Path, emulated: Sequence[str], port: int) -> list[Program]:
    """The scheduler as it is always run, and the emulation of the others."""
    scheduler = [
        sys.executable, "-m", "digenrl", "serve", "scheduler",
        "--recipe", str(folder / "recipe.json"), "--port", str(port),
    ]  # fmt: skip
    workers = {
        service: [sys.executable, "-m", "bench.cluster.processes", service, str(folder)]
        for service in emulated
    }

    async def ready() -> bool:
        async with httpx.AsyncClient(verify=False) as client:
            return (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200

    commands = {"scheduler": scheduler, **workers}
    return [
        Program(name=name, argv=argv, ready=ready, environment=MALLOC)
        for name, argv in commands.items()
    ]


def _settings(environment: dict[str, str], run: str) -> ServiceSettings:
    given = {
        key.removeprefix("DIGENRL_").lower(): value
        for key, value in environment.items()
        if key.startswith("DIGENRL_")
    }
    return ServiceSettings(run=run, worker="bench", **given)  # type: ignore[arg-type]


async def _usage(store: ObjectStore, run: str, last: int) -> list[BatchUsage]:
    """Of every batch; the scheduler stores the last one shortly after its commit."""
    for _ in range(USAGE_TRIES):
        if await store.read(usage_key(run, last - 1)) is not None:
            break
        await asyncio.sleep(0.05)
    found = [await store.read(usage_key(run, batch)) for batch in range(last)]
    return [BatchUsage.model_validate_json(data) for data in found if data is not None]


async def _forget(bus: Bus, store: ObjectStore, run: str) -> None:
    """Leave nothing behind that the next run would have to share with this one."""
    for stream in subjects.STREAMS:
        await bus.jetstream.purge_stream(stream.name, subject=f"dg.{run}.>")
    await store.delete_folder(run)
