"""Two schedulers at a time, under all other faults: one hangs, another takes over, and the first
goes on with what it was about to do."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random

from services.scheduler.sim.broker import Broker
from services.scheduler.sim.cluster import Cluster
from services.scheduler.sim.world import Process
from shared.messages.epochs import Fence
from tests.faults import sweep
from tests.faults.planting import Mutant, built, patched
from tests.faults.schedules import draw
from tests.faults.sweep import Outcome

ZOMBIE_S = 6.0
"""A scheduler that was replaced goes on for so long at most: then it finds the lease taken."""


@dataclass(slots=True)
class Takeovers:
    """Replaces schedulers that live, at random times, until nothing is done any more."""

    cluster: Cluster
    random: Random
    until: float

    def begin(self) -> None:
        self._later(self.random.uniform(0.2, 4.0), self._take_over)

    def _take_over(self) -> None:
        world, old = self.cluster.world, self.cluster.scheduler
        if world.now > self.until:
            return
        if old.process.alive:
            hang = self.random.choice((None, Process.pause, Process.cut_off))
            if hang is not None:
                hang(old.process, self.random.uniform(0.1, 3.0))
            self._later(ZOMBIE_S, old.process.kill)
            self.cluster.history.fault("scheduler replaced", f"epoch {old.epoch}")
            self.cluster.restart_scheduler()
        self.begin()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        world = self.cluster.world
        world.at(world.now + seconds, action)


def run_takeovers(seed: int, mutant: AbstractContextManager[None] | None = None) -> Outcome:
    """One run of two schedulers under faults; ``mutant``: a bug planted meanwhile."""

    def begin(cluster: Cluster) -> None:
        schedule = draw(seed)
        Takeovers(cluster, Random(seed + 77), schedule.fault_seconds).begin()

    with mutant or nullcontext(), built(begin):
        return sweep.simulate(seed)[1]


def commands_of_an_old_epoch_are_heeded() -> AbstractContextManager[None]:
    return patched((Fence, "passes", lambda fence, epoch: True))


def a_scheduler_begins_no_epoch() -> AbstractContextManager[None]:
    return patched((Broker, "begin_epoch", lambda broker, epoch: None))


def a_refused_command_keeps_its_slot() -> AbstractContextManager[None]:
    return patched((Broker, "_free", lambda broker, subject: None))


TAKEOVER_MUTANTS: tuple[Mutant, ...] = (
    commands_of_an_old_epoch_are_heeded,
    a_scheduler_begins_no_epoch,
    a_refused_command_keeps_its_slot,
)
