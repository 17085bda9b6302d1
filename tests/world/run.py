"""Runs one seed from its beginning to its verdict."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import services.scheduler.shell.service
import shared.process.worker_process
from shared.run.commits import commit_chain
from shared.run.log import Log
from shared.run.log_entries import PhaseChange
from shared.run.repair import apply_remedy, find_damage
from tests.storm.small import known
from tests.world.companions import companions_installed
from tests.world.draws import RUN, draw
from tests.world.faults import Fault, Nemesis
from tests.world.intruder import intrusion
from tests.world.invariants import Invariants
from tests.world.judge import violations
from tests.world.liveness import Liveness
from tests.world.loop import Killed, WorldLoop
from tests.world.nats_streams import StoredMessage, Stream
from tests.world.nats_transport import installed
from tests.world.nature import in_world
from tests.world.rare_faults import BEYOND, rare_nemeses
from tests.world.watch import Watch
from tests.world.world import World

INTRUDER = -1
"""Number of the intruder among the faults of a schedule."""
FINISHES_S = 240.0
"""Seconds after peace within which a run ends."""
LOOK_S = 0.5
MOST_ENDS = 20
"""So many ends of services are enough to know that they do not come to life."""
_ended: list[World] = []
"""Worlds that are not freed: that takes as long as a tenth of their life."""
GONE = "Unavailable("
"""Begins what ends a process that cannot reach what it starts with."""
REFUSED = "another worker is named"
"""What ends a worker in whose place another one lives on."""
REPAIR = "digenrl repair"
"""Names what puts right that somebody has damaged an object and its copy."""
FAILS_WHEN_REPEATED = ("lose objects", "no memory trainer")
"""Faults that may fail a run once they have struck `REPEATS`: a fragment or a group fails with
each."""
REPEATS = 3
OF_OTHERS = "are not trained once"
"""What a device says that was given samples of another fragment, by whoever may answer for it."""
OF_OTHER_BYTES = "does not match its reference"
"""What ends a service that starts, if the store gives it another object's bytes."""
OF_FAILED = (" ended at ", " after the commit of ")
"""Are in what is said of a follower that ended, and of a step that nobody told the scheduler."""
UNSCORED = "clock of nats"
"""After this fault nobody may score a fragment: NATS gives what a dead worker had to others by its
own clock."""
UNREWARDED = "fragments without a reward"
"""Is in an alarm of a run that waits for them."""
TRIED = 5
"""Times that a service has ended by such damage until it is seen that it does not get further."""


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


def live(
    seed: int, folder: Path, kept: frozenset[int] | None = None, *, is_last: bool = False
) -> Outcome:
    """Run a seed in this process.

    Args:
        folder: has what `draws.prepare` writes; gets the seed's profile.
        kept: numbers of the faults that strike; None: all.
        is_last: whether the process ends afterwards: nothing is closed or freed.
    """
    began = time.process_time()
    with known():
        loop, drawn = WorldLoop(seed), draw(seed, folder)
        if kept is not None and INTRUDER not in kept:
            drawn = replace(drawn, intruder=None)
        world = World(drawn, folder, loop)
        invariants, liveness = Invariants(world), Liveness(world)
        nemeses = [Nemesis(world, kept), *rare_nemeses(world, kept)]
        found: list[str] = []

        async def run() -> None:
            found.extend(await _live(world, nemeses, liveness))

        with (
            in_world(loop, seed, world.tell), _connected(world), invariants.watched(),
            liveness.watched(),
        ):  # fmt: skip
            asyncio.set_event_loop(None)
            loop.run(run(), leaves=not is_last)
    if is_last:
        _ended.append(world)
    found += invariants.violations[:3]
    if drawn.intruder != "trainer":  # whose key may hold up every exchange
        found += liveness.violations[:3]
    found += [f"asyncio: {each}" for each in map(_trouble, loop.troubles) if each]
    faults = [fault for each in nemeses for fault in each.struck]
    if drawn.intruder is not None:
        faults.append(Fault(INTRUDER, 0.0, "intruder", drawn.intruder))
    return Outcome(
        seed, tuple(found), tuple(faults), world.digest, loop.now,
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


async def _live(world: World, nemeses: Sequence[Nemesis], liveness: Liveness) -> list[str]:
    keeping = [asyncio.create_task(world.keep(each)) for each in world.services.values()]
    world.nats.start()
    watch = Watch(world)
    watch.start()
    with intrusion(world) as intruder:
        rare = [asyncio.create_task(each.strike()) for each in nemeses[1:]]
        await nemeses[0].strike()
        for each in rare:
            await each
    kinds = {fault.kind for each in nemeses for fault in each.struck}
    is_beyond = not kinds.isdisjoint(BEYOND)
    said = [str(fault) for each in nemeses for fault in each.struck]
    repeats = any(
        sum(each.startswith(fault) for each in said) >= REPEATS for fault in FAILS_WHEN_REPEATED
    )
    may_fail = is_beyond or repeats or (intruder is not None and intruder.as_others)
    has_ended = await _end_of_run(world, liveness, may_fail=may_fail)
    if not has_ended and (is_beyond or UNSCORED in kinds):
        has_ended = await liveness.says_soon("" if is_beyond else UNREWARDED)
    await watch.settle()
    world.is_over = True
    for task in keeping:
        task.cancel()
    for service in world.services.values():
        if service.process is not None:
            service.process.kill()
    found = [
        each
        for each in _errors(world, may_fail=may_fail)
        if not ("misdirect" in kinds and OF_OTHER_BYTES in each)
    ] + await watch.violations()
    has_failed = may_fail and not world.is_finished
    # It was stopped, or has failed for a while, and followers were told so.
    stood = "operate" in kinds or (may_fail and await _has_stood(world))
    excused = OF_FAILED if has_failed else OF_FAILED[:1] if stood else ()
    found = [each for each in found if not any(words in each for words in excused)]
    await _repair(world)
    found += [] if intruder is None else intruder.violations
    if not has_ended:
        found.append(f"not finished {FINISHES_S:.0f} s after peace: {world.num_commits} versions")
    may_be_false = intruder is not None and intruder.is_harmful
    records = await commit_chain(world.judging, RUN)
    if not records and may_fail:
        return found
    return found + await violations(world.site, records, world.judging, may_be_false=may_be_false)


async def _end_of_run(world: World, liveness: Liveness, *, may_fail: bool) -> bool:
    """Wait until the run has finished, or has failed and may; return whether it has."""
    deadline = world.loop.now + FINISHES_S
    liveness.begin()
    while not world.is_finished:
        await liveness.look()
        if may_fail and await _reason(world):
            return True
        if world.loop.now >= deadline or len(_errors(world, may_fail=may_fail)) > MOST_ENDS:
            return False
        await asyncio.sleep(LOOK_S)
    return True


async def _reason(world: World) -> str | None:
    """Return why the run has ended before its last step, if it has."""
    for service in world.services.values():
        if REPAIR in "".join(service.errors[-1:]) and len(service.errors) > TRIED:
            return service.errors[-1]
    changes = await _phase_changes(world)
    return changes[-1].failure if changes and changes[-1].phase == "failed" else None


async def _has_stood(world: World) -> bool:
    """Return whether the run has ever failed."""
    return any(each.phase == "failed" for each in await _phase_changes(world))


async def _phase_changes(world: World) -> list[PhaseChange]:
    log = Log.of_run(world.judging, RUN)
    await log.look()
    return [each for each in log.entries if isinstance(each, PhaseChange)]


async def _repair(world: World) -> None:
    """Mend what can be mended, as whoever runs `digenrl repair`."""
    for damage in await find_damage(world.judging, RUN):
        await apply_remedy(world.judging, RUN, damage)


def _errors(world: World, *, may_fail: bool) -> list[str]:
    """Return what has ended services that should not have."""
    return [
        f"{name} ended: {error}"
        for name, each in world.services.items()
        for error in each.errors
        if REFUSED not in error and not error.startswith(GONE)
        if not (may_fail and (REPAIR in error or OF_OTHERS in error))
    ]


def _trouble(context: dict[str, Any]) -> str:
    error = context.get("exception")
    if isinstance(error, Killed):
        return ""
    return repr(error) if error is not None else str(context.get("message", ""))
