"""One run of the real services, each device's process on its core, and what was heard of it."""

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import nats
from nats.aio.msg import Msg

from bench.two_devices.events import Heard
from bench.two_devices.placement import cpu_seconds
from bench.two_devices.session import Session, on
from digenrl.local.brokers import Program
from digenrl.local.ports import free_ports
from services.scheduler.core.usage import BatchUsage
from shared.errors import ContractError, Unavailable
from shared.messages.codec import decode
from shared.messages.contracts import FragmentFailed, GroupFailed, Message, PolicyPublished
from shared.recipe.recipe import Recipe
from shared.run.layout import usage_key

ROLLOUT, TRAINER = "rollout-0", "trainer-0"
SERVICES = ("scheduler", "reward-0", ROLLOUT, TRAINER)
PATIENCE_S = 240.0
LOOK_S = 1.0
HEAD_START_S = 1.0
"""The trainer starts last: its first version opens the first batch, whoever is there to generate
it. One that it has to generate alone says nothing about the others."""
STOP_S = 1.0
"""A run that has been measured is not drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What was heard of a run, and what its processes used while it was measured."""

    heard: tuple[Heard, ...]
    first: int
    """Version that opened the first batch that is measured."""
    last: int
    """Version that the last one made."""
    cpu_seconds: Mapping[str, float]
    """By process, between the two announcements."""
    usage: tuple[BatchUsage, ...]
    """What the scheduler kept of its batches, those of the warm-up among them."""


@dataclass(slots=True)
class Listener:
    """Every message of a run, with the time at which it was heard."""

    heard: list[Heard] = field(default_factory=list)
    version: int = -1
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, message: Message) -> None:
        self.heard.append(Heard(time.monotonic(), message))
        if isinstance(message, PolicyPublished):
            self.version = max(self.version, message.policy.version)
            self._changed.set()

    async def until(self, version: int) -> None:
        while self.version < version:
            self._changed.clear()
            await self._changed.wait()

    @property
    def failures(self) -> list[str]:
        return [
            each.message.reason
            for each in self.heard
            if isinstance(each.message, FragmentFailed | GroupFailed)
        ]


async def measured_run(
    session: Session, recipe: Recipe, *, warm_up: int, slowdown: float
) -> RunRecord:
    """Start the services, wait for every batch of the recipe but its last, and stop them.

    The last one has no next batch beside it, as others have with one-step asynchrony.

    Raises:
        Unavailable: if the batches do not come in time, something failed, or a service died.
        ChildFailed: if one cannot be kept running.
    """
    listener, last = Listener(), recipe.run.steps - 1
    client = await nats.connect(session.environment["DIGENRL_NATS_URL"])

    async def receive(raw: Msg) -> None:
        try:
            listener.record(decode(raw.data))
        except ContractError:
            return  # the broker's own

    try:
        await client.subscribe(f"dg.{recipe.run.name}.>", cb=receive)
        await _start(session, recipe, slowdown)
        await _wait(session, listener, warm_up)
        before = _used(session)
        await _wait(session, listener, last)
        after = _used(session)
        usage = await _usage(session, recipe.run.name, range(last))
    finally:
        await session.supervisor.stop(list(SERVICES), seconds=STOP_S)
        await client.close()
    return RunRecord(
        heard=tuple(listener.heard),
        first=warm_up,
        last=last,
        cpu_seconds={name: after[name] - before[name] for name in before},
        usage=usage,
    )


async def _start(session: Session, recipe: Recipe, slowdown: float) -> None:
    folder = session.folder / "runs" / recipe.run.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.json"
    path.write_text(recipe.model_dump_json(indent=1))
    session.supervisor.logs = folder
    for name in SERVICES:
        if name == TRAINER:
            await asyncio.sleep(HEAD_START_S)
        if name != ROLLOUT or recipe.rollout.workers:
            program = _program(name, recipe.run.name, str(path), slowdown)
            cpus = _cpus(session, name)
            await session.supervisor.start(on(program, cpus), wait=False)


def _program(name: str, run: str, recipe: str, slowdown: float) -> Program:
    service = name.partition("-")[0]
    what = ["--recipe", recipe] if service == "scheduler" else ["--run", run, "--worker", name]
    serve = ["digenrl", "serve", service]
    if name == ROLLOUT and slowdown > 1:
        serve = ["bench.slowed", str(slowdown)]
    argv = [sys.executable, "-m", *serve, *what, "--port", str(free_ports(1)[0])]
    return Program(name=name, argv=argv, ready=_at_once)


async def _at_once() -> bool:
    return True


def _cpus(session: Session, name: str) -> tuple[int, ...]:
    placement = session.placement
    return {ROLLOUT: (placement.rollout,), TRAINER: (placement.trainer,)}.get(
        name, placement.others
    )


async def _wait(session: Session, listener: Listener, version: int) -> None:
    """Until it is announced, or somebody has failed."""
    deadline = time.monotonic() + PATIENCE_S
    waiting = asyncio.create_task(listener.until(version))
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=LOOK_S)
            _check(session, listener)
            if not waiting.done() and time.monotonic() > deadline:
                raise Unavailable(
                    f"version {version} was not made within {PATIENCE_S:.0f} s; see "
                    f"{session.supervisor.logs}"
                )
    finally:
        waiting.cancel()


def _check(session: Session, listener: Listener) -> None:
    """A run in which something was done twice tells nothing about its schedule."""
    if session.supervisor.failed.done():
        session.supervisor.failed.result()
    died = [c.program.name for c in session.supervisor.children.values() if c.num_restarts]
    if died or listener.failures:
        raise Unavailable(
            f"{', '.join(died) or 'some work'} failed; see {session.supervisor.logs}: "
            f"{listener.failures[:3] or 'the last lines there'}"
        )


def _used(session: Session) -> dict[str, float]:
    """CPU seconds of each service and broker, and of this process."""
    children = session.supervisor.children.items()
    used = {
        name: cpu_seconds(child.process.pid)
        for name, child in children
        if child.process is not None
    }
    return used | {"bench": time.process_time()}


async def _usage(session: Session, run: str, batches: range) -> tuple[BatchUsage, ...]:
    """The last it stores after the announcement."""
    await asyncio.sleep(LOOK_S)
    found = [await session.store.read(usage_key(run, batch)) for batch in batches]
    return tuple(BatchUsage.model_validate_json(data) for data in found if data)
