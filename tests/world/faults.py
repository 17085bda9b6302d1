"""Faults that strike a world at random moments, and the peace in which all of them are mended.

A fault of a process strikes between two of its callbacks, after a drawn number of them: that is
every await of every service. Each fault takes its target and its length from the world's seed; a
schedule lists them, so that a shorter one can be tried (`tests.world.shrink`).
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.world.draws import RUN, SHARES, Draw
from tests.world.loop import Process
from tests.world.nats_transport import Connection
from tests.world.world import World

SOON = 400
"""Callbacks of its process before which a fault strikes, at most."""
JUMP_S = 86_400.0
ZOMBIE_S = 9.0
"""A process that has a successor lives on for so long at most."""
DAMAGED = ("files/", "recipe.json", "commits/", "chain/", "log/", "states/", "usage/", "epochs/")
"""Objects of which a byte may be flipped: what the run can make good."""
OF_LETTERS = b'"dead_letter"', b'"settled"'
"""Are in entries of the log that nobody can make good."""


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    at: float
    """Seconds of the world."""
    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind} {self.target}".strip()


Strike = Callable[["Nemesis", Random, str], None]


@dataclass(slots=True)
class Nemesis:
    world: World
    kept: frozenset[int] | None = None
    """Numbers of the faults that strike; None: all."""
    kinds: "Mapping[str, tuple[Strike, str]]" = field(default_factory=lambda: FAULTS)
    name: str = "nemesis"
    first: int = 0
    """Number of its first fault."""
    between: float = 0.0
    """Mean seconds between two faults; 0: the seed's."""
    struck: list[Fault] = field(default_factory=list)
    _mending: list[Callable[[], None]] = field(default_factory=list)

    async def strike(self) -> None:
        """Let faults strike until the seed's time of peace, then mend all."""
        drawn, random = self.world.drawn, self.world.random_of(self.name)
        weights, kinds, number = favoured(random, self.kinds), list(self.kinds), self.first
        between = self.between or drawn.between_faults
        while True:
            await asyncio.sleep(random.expovariate(1 / between))
            if self.world.loop.now > drawn.fault_seconds or self.world.is_finished:
                break
            [kind] = random.choices(kinds, weights)
            self._one(number, kind, Random(f"{drawn.seed}/fault/{number}"))
            number += 1
        self.make_peace()

    def _one(self, number: int, kind: str, random: Random) -> None:
        targets = self._targets(kind)
        if not targets or (self.kept is not None and number not in self.kept):
            return
        target = random.choice(targets)
        fault = Fault(number, self.world.loop.now, kind, target)
        self.struck.append(fault)
        self.world.say(f"fault {fault}")
        self.kinds[kind][0](self, random, target)

    def _targets(self, kind: str) -> Sequence[str]:
        what = self.kinds[kind][1]
        world = self.world
        if what == "service":
            return [name for name, each in world.services.items() if each.is_up]
        if what == "client":
            return sorted(world.handles)
        if what == "object":
            return [key for key in world.bucket.objects.under(f"{RUN}/") if self._is_spare(key)]
        return [what]

    def _is_spare(self, key: str) -> bool:
        """Whether the run can make an object good; a commit record has a copy soon, which does."""
        folder, _, name = key.removeprefix(f"{RUN}/").partition("/")
        copies = f"{RUN}/copies/{name.removesuffix('.json')}/"
        objects = self.world.bucket.objects
        if folder == "log" and any(each in objects.now[key].data for each in OF_LETTERS):
            return False
        return f"{folder}/{name}".rstrip("/").startswith(DAMAGED) and (
            folder != "commits" or bool(objects.under(copies))
        )

    def make_peace(self) -> None:
        self.world.say("peace")
        while self._mending:
            self._mending.pop()()

    def mend_after(self, seconds: float, mend: Callable[[], None]) -> None:
        """Mend a fault after its time, or when there is peace."""
        mended = False

        def once() -> None:
            nonlocal mended
            if not mended:
                mended = True
                mend()

        self._mending.append(once)
        asyncio.get_running_loop().call_later(seconds, once)

    def _process(self, name: str) -> Process | None:
        return self.world.services[name].process

    # --- of processes ---

    def kill(self, random: Random, name: str) -> None:
        self._soon(random, name, Process.kill)

    def hang(self, random: Random, name: str) -> None:
        """It is stopped, and goes on where it was: for longer than a lease, now and then."""
        seconds = duration(random)

        def hang(process: Process) -> None:
            process.hang()
            self.mend_after(seconds, process.go_on)

        self._soon(random, name, hang)

    def _soon(self, random: Random, name: str, fail: Callable[[Process], None]) -> None:
        process = self._process(name)
        if process is not None:
            process.failing = (random.randrange(SOON), fail)

    def succeed(self, random: Random, name: str) -> None:
        """It hangs, another is started in its place, and then it goes on beside it."""
        process, service = self._process(name), self.world.services[name]
        if process is None or service.role == "scheduler":
            return
        process.hang()
        [gone, *_] = process.at_death
        gone()  # it is given up, and lives
        self.mend_after(duration(random), process.go_on)
        self.mend_after(ZOMBIE_S, process.kill)

    def set_clock(self, random: Random, name: str) -> None:
        process = self._process(name)
        if process is not None:
            process.clock_offset = random.uniform(-JUMP_S, JUMP_S)

    # --- of lines ---

    def cut(self, random: Random, name: str) -> None:
        """Bytes of one direction, or of both, do not arrive."""
        which = random.choice(("there", "back", "both"))
        for connection in self._connections(name):
            ways = {"there": [connection.to_server], "back": [connection.to_client]}
            for way in ways.get(which, [connection.to_server, connection.to_client]):
                way.cut()
                self.mend_after(duration(random), way.mend)

    def drop(self, random: Random, name: str) -> None:
        for connection in self._connections(name):
            connection.drop()

    def _connections(self, name: str) -> list[Connection]:
        return [each for each in self.world.network.connections if each.name == name]

    # --- of brokers ---

    def kill_nats(self, random: Random, _: str) -> None:
        self.world.nats.kill()
        self.mend_after(random.uniform(0.1, 3.0), self._start_nats)

    def wipe_nats(self, random: Random, _: str) -> None:
        self.world.nats.kill()
        self.world.nats.wipe()
        self.mend_after(random.uniform(0.1, 3.0), self._start_nats)

    def _start_nats(self) -> None:
        if not self.world.nats.is_up:
            self.world.nats.start()

    def hang_nats(self, random: Random, _: str) -> None:
        self.world.nats.hang()
        self.mend_after(duration(random), self.world.nats.go_on)

    def stop_valkey(self, random: Random, _: str) -> None:
        if random.random() < 0.5:
            self.world.valkey.lose_unsynced(math.inf)
        self.world.valkey.stop()
        self.mend_after(duration(random), self.world.valkey.start)

    # --- of the store ---

    def stop_store(self, random: Random, _: str) -> None:
        self.world.bucket.stop()
        self.mend_after(duration(random), self.world.bucket.start)

    def fill_store(self, random: Random, _: str) -> None:
        self.world.bucket.is_full = True
        self.mend_after(duration(random), lambda: setattr(self.world.bucket, "is_full", False))

    def slow_store(self, random: Random, _: str) -> None:
        self.world.bucket.slow_s = random.uniform(0.1, 2.0)
        self.mend_after(duration(random), lambda: setattr(self.world.bucket, "slow_s", 0.0))

    def cut_store(self, random: Random, name: str) -> None:
        handle = self.world.handles[name]
        handle.cut = random.choice(("requests", "answers"))
        self.mend_after(duration(random), lambda: setattr(handle, "cut", ""))

    def flip(self, random: Random, key: str) -> None:
        self.world.bucket.flip(key)


def favoured(random: Random, kinds: Collection[str]) -> list[int]:
    """Return how much a seed favours each kind of fault."""
    weights = [random.choice(SHARES) for _ in kinds]
    return weights if any(weights) else [1] * len(weights)


def promise(drawn: Draw, kind: str) -> float:
    """Return how likely a kind of fault decides a world: it strikes, and others do not hide it."""
    weights, number = favoured(Random(f"{drawn.seed}/nemesis"), FAULTS), faults_of(drawn)
    return weights[list(FAULTS).index(kind)] / sum(weights) * min(1, number / 5, 12 / number)


def faults_of(drawn: Draw) -> float:
    """Return how many faults strike, about."""
    return max(drawn.fault_seconds, 0.1) / drawn.between_faults


def duration(random: Random) -> float:
    """Mostly short; one in three is longer than a lease of a scheduler, or of a worker."""
    return random.uniform(3.5, 9.0) if random.random() < 0.33 else random.uniform(0.05, 3.0)


FAULTS: dict[str, tuple[Strike, str]] = {
    "kill": (Nemesis.kill, "service"),
    "hang": (Nemesis.hang, "service"),
    "succeed": (Nemesis.succeed, "service"),
    "clock": (Nemesis.set_clock, "service"),
    "cut": (Nemesis.cut, "service"),
    "drop": (Nemesis.drop, "service"),
    "kill nats": (Nemesis.kill_nats, ""),
    "wipe nats": (Nemesis.wipe_nats, ""),
    "hang nats": (Nemesis.hang_nats, ""),
    "stop valkey": (Nemesis.stop_valkey, ""),
    "stop store": (Nemesis.stop_store, ""),
    "fill store": (Nemesis.fill_store, ""),
    "slow store": (Nemesis.slow_store, ""),
    "cut store": (Nemesis.cut_store, "client"),
    "flip": (Nemesis.flip, "object"),
}
