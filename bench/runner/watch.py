"""One run of the real services: started, followed by what it announces, and stopped."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from bench.runner.placement import cpu_seconds
from bench.runner.session import Session
from digenrl.local.brokers.embedded import USER, Program
from digenrl.local.processes.child_logs import reason_in
from digenrl.local.processes.supervisor import Child, Supervisor
from shared.bus.bus import Bus
from shared.errors import ContractError, Unavailable
from shared.messages import subjects
from shared.messages.codec import decode
from shared.messages.contracts import FragmentFailed, GroupFailed, Message, PolicyPublished
from shared.messages.rights import inbox_subject
from shared.run.layout import usage_key
from shared.run.usage import BatchUsage

LOOK_S = 1.0
USAGE_TRIES = 100
"""The scheduler stores what it knows of a batch shortly after its commit."""

T = TypeVar("T")
OnCommit = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Heard:
    """A message, and when it was heard in monotonic seconds."""

    at: float
    message: Message


@dataclass(frozen=True, slots=True)
class Sample:
    """What processes and streams had come to at a commit."""

    version: int
    at: float
    """Monotonic seconds."""
    cpu: dict[str, float]
    """Process -> seconds."""
    stored: dict[str, int] = field(default_factory=dict)
    """Stream -> messages."""


@dataclass(slots=True)
class Watch:
    """Follows one run while it goes on."""

    session: Session
    run: str
    services: Supervisor
    client: Client
    patience_s: float
    """Seconds without a commit after which a run has failed."""
    heard: list[Heard] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    """When each version was announced, the first one first."""
    may_die: set[str] = field(default_factory=set)
    """Processes that are killed, and start anew."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self, raw: Msg) -> None:
        try:
            message = decode(raw.data)
        except ContractError:
            return  # the broker's own
        self.hear(message)

    async def follow_stored(self, wanted: Sequence[str]) -> None:
        """Hear what is stored under these subjects, for ever: a role's user may subscribe to
        nothing else."""
        bus = Bus(self.client, self.run)
        await bus.wait_for_streams()
        async for received in bus.follow(subjects.EVT, wanted):
            if received.message is not None:
                self.hear(received.message)

    def hear(self, message: Message) -> None:
        self.heard.append(Heard(time.monotonic(), message))
        if isinstance(message, PolicyPublished) and message.policy.version == len(self.commits):
            self.commits.append(self.heard[-1].at)
            self._changed.set()

    async def follow(
        self, first: int, last: int, note: OnCommit, *, streams: bool
    ) -> tuple[Sample, Sample]:
        """Waits for every version up to ``last``, and takes samples at the two.

        ``streams``: the samples count messages, for which the broker is asked.
        """
        samples = {}
        for version in range(last + 1):
            await self.or_failed(self._announced(version))
            if version in (first, last):
                samples[version] = await self._sample(version, streams=streams)
            note(version)
        return samples[first], samples[last]

    async def or_failed(self, awaited: Awaitable[T]) -> T:
        """Returns the result.

        Raises:
            Unavailable: if a service has died, some work has failed, or it takes too long.
        """
        task = asyncio.ensure_future(awaited)
        deadline = time.monotonic() + self.patience_s
        try:
            while not task.done():
                self._check(deadline)
                await asyncio.wait({task}, timeout=LOOK_S)
            self._check(deadline)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return task.result()

    async def usage(self, batches: int) -> list[BatchUsage]:
        """Returns what the scheduler stored of the first batches."""
        store, keys = self.session.store, [usage_key(self.run, batch) for batch in range(batches)]
        for _ in range(USAGE_TRIES):
            if await store.read(keys[-1]) is not None:
                break
            await asyncio.sleep(0.05)
        found = [await store.read(key) for key in keys]
        return [BatchUsage.model_validate_json(data) for data in found if data is not None]

    async def forget(self) -> None:
        """Leaves nothing behind that the next run would have to share with this one."""
        for stream in subjects.STREAMS:
            await self.client.jetstream().purge_stream(stream.name, subject=f"dg.{self.run}.>")
        await self.session.store.delete_folder(self.run)

    async def _announced(self, version: int) -> None:
        while len(self.commits) <= version:
            self._changed.clear()
            await self._changed.wait()

    def _check(self, deadline: float) -> None:
        """Refuses a run in which something was done twice: it tells nothing about its schedule."""
        logs = f"see {self.services.logs}"
        for name, child in self.services.children.items():
            if name not in self.may_die and (child.num_restarts or _has_ended(child)):
                raise Unavailable(f"{self.run}: {name} has died: {reason_in(child.log_path)}")
        for each in self.heard:
            if isinstance(each.message, FragmentFailed | GroupFailed):
                raise Unavailable(f"{self.run}: {each.message.reason}; {logs}")
        if time.monotonic() > deadline:
            raise Unavailable(f"{self.run}: no commit for {self.patience_s:.0f} s; {logs}")

    async def _sample(self, version: int, *, streams: bool) -> Sample:
        cpu = {"bench": time.process_time()}
        for name, child in (self.services.children | self.session.brokers.children).items():
            if child.process is not None:
                cpu[name] = cpu_seconds(child.process.pid)
        stored = {}
        for stream in subjects.STREAMS if streams else ():
            info = await self.client.jetstream().stream_info(stream.name)
            stored[stream.name] = info.state.last_seq
        return Sample(version, self.commits[version], cpu, stored)


@contextlib.asynccontextmanager
async def watching(
    session: Session,
    run: str,
    logs: Path,
    subjects_heard: Sequence[str],
    *,
    patience_s: float,
    stop_s: float,
) -> AsyncIterator[Watch]:
    """Listens to a run; its services, which the caller starts, are stopped at the end."""
    services = Supervisor(logs, session.environment)
    url = session.settings(run).nats_url.get_secret_value()
    inbox = inbox_subject(urlsplit(url).username or USER)
    client = await nats.connect(url, inbox_prefix=inbox.encode())
    watch = Watch(session, run, services, client, patience_s)
    try:
        following = []
        if session.secrets:
            following.append(asyncio.create_task(watch.follow_stored(subjects_heard)))
        else:
            for subject in subjects_heard:
                await client.subscribe(subject, cb=watch.receive)
        try:
            yield watch
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await services.stop(list(services.children), seconds=stop_s)
        await watch.forget()
    finally:
        await client.close()


def _has_ended(child: Child) -> bool:
    return child.process is not None and child.process.returncode is not None


def service(name: str, module: Sequence[str], **environment: str) -> Program:
    """Returns a Python module as a program that is not waited for."""

    async def at_once() -> bool:
        return True

    return Program(
        name=name, argv=[sys.executable, "-m", *module], ready=at_once, environment=environment
    )
