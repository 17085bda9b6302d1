"""Faults that a part of the worlds has beside those of `tests.world.faults`.

After those that are `BEYOND` what brokers promise, nothing wrong is trained, and the run goes on or
says why it does not. Not among them: a store that loses acknowledged commits, whose readers have
been told of them.
"""

import asyncio
import time
from functools import partial
from random import Random

from digenrl.api.checked_client import CheckedClient, CheckedNoAnswer, CheckedRefusal
from shared.limits import EXIT_TIMEOUT_S
from shared.process import failpoints
from tests.world.blocking import run_blocking
from tests.world.draws import RUN
from tests.world.faults import JUMP_S, Nemesis, Strike, duration
from tests.world.loop import Flaw
from tests.world.nature import begun
from tests.world.world import PORTS, World

SLOWER = 1.5
"""They strike so much more seldom."""
LEAVES_S = 40.0
SHORT_S, SPOILT_S = 5.0, 45.0
"""Longest time of a round where sums are spoilt, and for how long."""
POINTS = (
    "fluid.generates", "fluid.trains",
    "fluid.exchanges", "fluid.holds", "fluid.stepped", "fluid.updated", "fluid.offered",
    "fluid.commits", "scheduler.before-index", "scheduler.after-index", "scheduler.before-cleanup",
    "scheduler.in-cleanup", "scheduler.after-cleanup", "reward.before-publish",
    "reward.before-acknowledgement",
)  # fmt: skip
"""Every named point of the product; docs/reliability.md says what is durable at each."""


def reach_point(nemesis: Nemesis, random: Random, _: str) -> None:
    """Whoever comes to a point for the n-th time from now on dies there."""
    points: dict[str, object] = {
        "_configured": (random.choice(POINTS), random.randrange(1, 4)), "_num_visits": 0
    }  # fmt: skip
    nemesis.world.say(f"dies at {points['_configured']}")
    for name, value in points.items():
        setattr(failpoints, name, value)
    nemesis.mend_after(1e9, lambda: setattr(failpoints, "_configured", None))


def leave(nemesis: Nemesis, random: Random, name: str) -> None:
    """It dies, and its place is empty for a while, or until peace: it has left, or joins late."""
    service = nemesis.world.services[name]
    service.is_away = True
    nemesis.mend_after(random.uniform(1.0, LEAVES_S), lambda: setattr(service, "is_away", False))
    if service.process is not None:
        service.process.kill()


def hang_device(nemesis: Nemesis, _: Random, name: str) -> None:
    """What its device does next never ends, while its process lives on: until its hard deadline,
    which without one of the recipe may be half an hour."""
    process = nemesis.world.services[name].process
    deadline = nemesis.world.drawn.setting.schedule.slot_deadline_s
    if process is not None and not isinstance(deadline, str):
        process.has_hung_device = True


def lose_nats(nemesis: Nemesis, random: Random, _: str) -> None:
    nemesis.world.nats.lose_unsynced(random.uniform(0.01, 3.0))


def fill_nats(nemesis: Nemesis, random: Random, _: str) -> None:
    """Its disk is full until it is started anew with room."""
    nats = nemesis.world.nats
    nats.is_full = True

    def make_room() -> None:
        nats.is_full = False
        if nats.is_up:
            nats.kill()
            nats.start()

    nemesis.mend_after(duration(random), make_room)


def set_clock_of_nats(nemesis: Nemesis, random: Random, _: str) -> None:
    nemesis.world.nats.clock_offset = random.uniform(-JUMP_S, JUMP_S)


def set_clock_of_store(nemesis: Nemesis, random: Random, _: str) -> None:
    nemesis.world.bucket.clock_offset = random.uniform(-JUMP_S, JUMP_S)


def read_stale(nemesis: Nemesis, random: Random, name: str) -> None:
    """But for schedulers, which refuse an announcement whose record they do not see, and readers of
    events, who are told once."""
    if name.startswith(("scheduler", "page")):
        return
    handle = nemesis.world.handles[name]
    handle.stale_s = random.uniform(0.05, 2.0)
    nemesis.mend_after(duration(random), lambda: setattr(handle, "stale_s", 0.0))


def misdirect(nemesis: Nemesis, random: Random, name: str) -> None:
    if name == "page":  # it tells what it reads, once
        return
    handle = nemesis.world.handles[name]
    handle.num_misdirected = random.randrange(1, 4)
    nemesis.mend_after(1e9, lambda: setattr(handle, "num_misdirected", 0))


def break_connections(nemesis: Nemesis, random: Random, name: str) -> None:
    breaks = nemesis.world.handles[name].breaks
    breaks += random.choices(("close", "reset"), k=random.randrange(1, 6))


def tear(nemesis: Nemesis, _: Random, key: str) -> None:
    """But for the run's log: what is left of an entry nobody can tell readers of events."""
    if "/log/" not in key:
        nemesis.world.bucket.tear(key)


def cut_http(nemesis: Nemesis, random: Random, name: str) -> None:
    """Nothing comes from a process over HTTP, or nothing reaches it, as long as it is cut."""
    web, which = nemesis.world.web, random.randrange(2)
    before = web.link

    def link(*ends: str) -> float | None:
        return None if is_cut and ends[which] == name else before(*ends)

    is_cut = True

    def mend() -> None:
        nonlocal is_cut
        is_cut = False

    web.link = link
    nemesis.mend_after(duration(random), mend)


def terminate(nemesis: Nemesis, _: Random, name: str) -> None:
    """SIGTERM: it gives back what it has and ends by itself, within the seconds that it says."""
    process = nemesis.world.services[name].process
    if process is None:
        return
    if process.told_to_end is None:  # it has not begun to serve
        process.kill()
    elif not process.told_to_end.done():
        process.told_to_end.set_result(None)
        nemesis.mend_after(EXIT_TIMEOUT_S, process.kill)


def operate(nemesis: Nemesis, random: Random, _: str) -> None:
    """Somebody pauses or stops the run, and then sees to it that it goes on."""
    port = random.choice([port for name, port in PORTS.items() if name in nemesis.world.services])
    todo, seconds = [random.choice(("pause_run", "stop_run"))], duration(random)
    process = begun(nemesis.world.drawn.seed, "operator", len(nemesis.struck))
    process.start(_operate(nemesis.world, f"http://127.0.0.1:{port}", todo, seconds))


async def _operate(world: World, url: str, todo: list[str], seconds: float) -> None:
    def steer() -> None:
        with CheckedClient.at(url) as client:
            if todo:
                getattr(client, todo[0])()
                todo.clear()
            while (phase := client.get_run().phase) != "finished":
                time.sleep(seconds)
                if phase in ("paused", "stopped"):
                    client.resume_run()

    while True:
        try:
            return await run_blocking(steer)
        except (CheckedNoAnswer, CheckedRefusal):
            if world.is_finished:  # a run that is over refuses to pause, and records each request
                return
            await asyncio.sleep(1.0)


def lose_objects(nemesis: Nemesis, random: Random, _: str) -> None:
    """The store is killed, and has lost what it had acknowledged of what is made again."""
    folders = tuple(f"{RUN}/{each}" for each in ("batches/", "chain/", "usage/"))
    nemesis.world.bucket.lose_unsynced(random.uniform(0.01, 3.0), folders)


def lose_stream(nemesis: Nemesis, random: Random, _: str) -> None:
    nats = nemesis.world.nats
    names = [name for name in nats.streams if name.startswith("DG_")]
    if nats.is_up and names:
        name = random.choice(names)
        nemesis.world.say(f"loses {name}")
        nats.lose_stream(name)


def spoil_sums(nemesis: Nemesis, _: Random, name: str) -> None:
    """A member's sums have a wrong byte in the store, in peace as well: for more rounds than may
    come to nothing. Where one may last a minute, the run would not end in time."""
    deadline = nemesis.world.drawn.setting.schedule.slot_deadline_s
    if name.startswith("trainer") and deadline == SHORT_S:
        handle = nemesis.world.handles[name]
        handle.spoils = ".sum.safetensors"
        asyncio.get_running_loop().call_later(SPOILT_S, setattr, handle, "spoils", "nothing")


def flaw(kind: Flaw, nemesis: Nemesis, _: Random, name: str) -> None:
    """A fluid device steps to other bits, or runs out of memory within a piece, once."""
    process = nemesis.world.services[name].process
    if process is not None:
        process.flaw = kind


RARE: dict[str, tuple[Strike, str]] = {
    "failpoint": (reach_point, ""),
    "leave": (leave, "service"),
    "hang device": (hang_device, "service"),
    "lose nats": (lose_nats, ""),
    "fill nats": (fill_nats, ""),
    "clock of nats": (set_clock_of_nats, ""),
    "clock of store": (set_clock_of_store, ""),
    "stale reads": (read_stale, "client"),
    "misdirect": (misdirect, "client"),
    "break": (break_connections, "client"),
    "tear": (tear, "object"),
    "cut http": (cut_http, "service"),
}


LATE: dict[str, tuple[Strike, str]] = {
    "terminate": (terminate, "service"),
    "operate": (operate, ""),
    "lose objects": (lose_objects, ""),
}

SPOILT: dict[str, tuple[Strike, str]] = {"spoil sums": (spoil_sums, "client")}
LOSSES: dict[str, tuple[Strike, str]] = {"lose stream": (lose_stream, "")}
FLAWS: dict[str, tuple[Strike, str]] = {
    "other bits": (partial(flaw, "other bits"), "service"),
    "no memory": (partial(flaw, "no memory"), "service"),
}

BEYOND = ("stale reads", "misdirect", "lose nats")
"""Faults that brokers promise not to have: after them services may end, and the run may fail or
stand still, with a reason."""
SETS = (
    (RARE, "rare faults", "rare 1064", 1000, 0.4),
    (LATE, "late faults", "late 325", 2000, 0.3),
    (LOSSES, "lost streams", "losses", 3000, 0.1),
    (FLAWS, "flawed devices", "flaws", 4000, 0.3),
    (SPOILT, "spoilt sums", "sums", 5000, 0.1),
)
"""Faults, the name by which they are drawn, that by which worlds that have them are drawn, the
number of the first in a schedule, and the share of the worlds that have them. The seeds at which
planted bugs are recorded (`test_plants.py`) have none."""


def rare_nemeses(world: World, kept: frozenset[int] | None) -> list[Nemesis]:
    """Return what strikes with rare faults, if this seed has them."""
    slower = SLOWER * world.drawn.between_faults
    return [
        Nemesis(world, kept, faults, name, first, slower)
        for faults, name, drawn_by, first, share in SETS
        if world.random_of(drawn_by).random() < share
    ]
