"""Runs one seed from its beginning to its verdict."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import services.scheduler.shell.service
import shared.process.worker_process
from shared.run.commits import commit_chain
from shared.run.repair import find_damage, mend
from tests.storm.lagging import known
from tests.world.companions import companions_installed
from tests.world.draws import RUN, draw
from tests.world.faults import Fault, Nemesis
from tests.world.invariants import Invariants
from tests.world.judge import violations
from tests.world.loop import WorldLoop
from tests.world.nats_streams import StoredMessage, Stream
from tests.world.nats_transport import installed
from tests.world.nature import in_world
from tests.world.watch import Watch
from tests.world.world import World

FINISHES_S = 240.0
"""Seconds after peace within which a run ends."""
LOOK_S = 0.5
GONE = "Unavailable("
"""Begins what ends a process that cannot reach what it starts with."""
REFUSED = "another worker is named"
"""What ends a worker in whose place another one lives on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    violations: tuple[str, ...]
    faults: tuple[Fault, ...]
    digest: str
    """Of the log."""
    virtual_seconds: float
    cpu_seconds: float
    log: tuple[str, ...]

    @property
    def is_well(self) -> bool:
        return not self.violations


def live(seed: int, folder: Path, kept: frozenset[int] | None = None) -> Outcome:
    """Run a seed in this process.

    Args:
        folder: has what `draws.prepare` writes; gets the seed's profile.
        kept: numbers of the faults that strike; None: all.
    """
    began = time.process_time()
    with known():
        loop, drawn = WorldLoop(seed), draw(seed, folder)
        world = World(drawn, folder, loop)
        nemesis, invariants = Nemesis(world, kept), Invariants(world)
        found: list[str] = []

        async def run() -> None:
            found.extend(await _live(world, nemesis))

        with in_world(loop, seed, world.tell), _connected(world), invariants.watched():
            asyncio.set_event_loop(None)
            loop.run(run())
    found += invariants.violations[:3]
    found += [f"asyncio: {each}" for each in map(_trouble, loop.troubles) if each]
    return Outcome(
        seed, tuple(found), tuple(nemesis.struck), world.digest, loop.now,
        time.process_time() - began, tuple(world.log),
    )  # fmt: skip


@contextlib.contextmanager
def _connected(world: World) -> Iterator[None]:
    append = Stream.append

    def noted(stream: Stream, made: StoredMessage) -> None:
        world.note_stored(stream.name, made.seq, made.subject)
        append(stream, made)

    with (
        installed(world.network),
        patch.object(Stream, "append", noted),
        world.valkey.installed(),
        world.web.installed(),
        companions_installed(world.open_store),
        patch.object(services.scheduler.shell.service, "open_store", world.open_store),
        patch.object(shared.process.worker_process, "open_store", world.open_store),
        patch.object(services.scheduler.shell.service, "check_store", _nothing),
        patch.object(shared.process.worker_process, "check_weights", lambda _: None),
        patch.object(shared.process.worker_process, "prepare_libraries", lambda *_, **__: None),
    ):
        yield


async def _nothing(*_: object, **__: object) -> None:
    """A world has no address that anybody could ask without a key."""


async def _live(world: World, nemesis: Nemesis) -> list[str]:
    keeping = [asyncio.create_task(world.keep(each)) for each in world.services.values()]
    world.nats.start()
    watch = Watch(world)
    watch.start()
    striking = asyncio.create_task(nemesis.strike())
    await striking
    deadline = world.loop.now + FINISHES_S
    while not world.is_finished and world.loop.now < deadline:  # noqa: ASYNC110 -- the store
        await asyncio.sleep(LOOK_S)
    await watch.settle()
    world.is_over = True
    found = _errors(world) + await watch.violations()
    if not world.is_finished:
        found.append(f"not finished {FINISHES_S:.0f} s after peace: {world.num_commits} versions")
    for task in keeping:
        task.cancel()
    for service in world.services.values():
        if service.process is not None:
            service.process.kill()
    return found + await _judged(world)


async def _judged(world: World) -> list[str]:
    """Mend what can be mended, as whoever runs `digenrl repair`, and judge what there is."""
    store = world.judging
    for damage in await find_damage(store, RUN):
        await mend(store, RUN, damage)
    return await violations(world.site, await commit_chain(store, RUN), store)


def _errors(world: World) -> list[str]:
    """Return what has ended services that should not have."""
    return [
        f"{name} ended: {error}"
        for name, each in world.services.items()
        for error in each.errors
        if REFUSED not in error and not error.startswith(GONE)
    ]


def _trouble(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return repr(error) if error is not None else str(context.get("message", ""))
