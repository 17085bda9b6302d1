"""Seeded fault schedules in virtual time: a small run, a nemesis, then peace, then the verdict.

    python -m tests.faults SEED            prints what happened
    python -m tests.faults FIRST COUNT     names the seeds that went wrong

The same seed gives the same history, on every machine. While faults are made, nothing may go
wrong (safety); once they have ended and everything that died is started again, the run must finish
within bounded time (liveness).
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random

from services.scheduler.core.state import LoanState, State
from services.scheduler.sim.cluster import Cluster, build
from tests.faults.check import violations
from tests.faults.coverage import coverage
from tests.faults.nemesis import Nemesis
from tests.faults.schedules import Schedule, draw, handling_seconds

LIVENESS_S = 200.0
"""Seconds of peace: many times what a run takes without faults."""
AFTERMATH_S = 1.0
"""Seconds after the end, for what zombies may still do."""
TICK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    violations: tuple[str, ...]
    finished: bool
    history_hash: str
    coverage: Mapping[str, int]
    """How often each fault and each interesting branch was met."""


def run_schedule(seed: int, mutant: AbstractContextManager[None] | None = None) -> Outcome:
    """One run under faults. ``mutant``: a bug planted for as long as it goes on."""
    with mutant or nullcontext():
        return simulate(seed)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Many schedules."""

    failures: tuple[str, ...]
    """A line per schedule that went wrong, with its seed."""
    coverage: Counter[str]


def sweep(first: int, count: int) -> Sweep:
    failures, met = [], Counter[str]()
    for seed in range(first, first + count):
        outcome = run_schedule(seed)
        met.update(outcome.coverage)
        if outcome.violations or not outcome.finished:
            reason = "; ".join(outcome.violations) or "it did not finish"
            failures.append(f"seed {seed}: {reason}")
    return Sweep(failures=tuple(failures), coverage=met)


def simulate(seed: int) -> tuple[Cluster, Outcome]:
    schedule = draw(seed)
    cluster = _cluster(schedule)
    found: list[str] = []
    finished = False
    try:
        finished = _go(cluster, schedule)
    except Exception as error:  # whatever is raised in the scheduler would have ended it
        found = [f"raised {error!r}"]
    found += violations(schedule.plan, cluster.history, cluster.commits.versions)
    if finished and len(cluster.commits.versions) != schedule.plan.num_batches + 1:
        found.append(f"finished with {len(cluster.commits.versions)} versions")
    return cluster, Outcome(
        violations=tuple(found),
        finished=finished,
        history_hash=cluster.history.hash(),
        coverage=coverage(cluster.history, cluster.commits.versions),
    )


def _cluster(schedule: Schedule) -> Cluster:
    random = Random(~schedule.seed)
    cluster = build(
        schedule.plan,
        schedule.timing,
        rollout=schedule.rollout,
        trainer_slots=schedule.trainer_slots,
        lanes=schedule.lanes,
        can_train=schedule.can_train,
        seed=schedule.seed,
        delay=lambda: random.random() * schedule.slowest_message,
        first_state=State(recovering=True, tag=LoanState(controller=schedule.tag)),
        tick=TICK_S,
        keep_intervals=True,
        leases=True,
    )
    cluster.broker.repeat = schedule.repeat
    cluster.broker.ack_wait = 4.0
    cluster.broker.slowest_return = schedule.slowest_return
    cluster.broker.poison = schedule.poison
    cluster.reward.failure = schedule.failure
    cluster.scheduler.read_seconds = lambda: random.random() * 0.3
    cluster.scheduler.handling_seconds = handling_seconds(schedule.seed)
    return cluster


def _go(cluster: Cluster, schedule: Schedule) -> bool:
    nemesis = Nemesis(cluster, schedule)
    nemesis.start()
    if not cluster.world.run(schedule.fault_seconds, lambda: cluster.finished):
        nemesis.make_peace()
        if not cluster.world.run(schedule.fault_seconds + LIVENESS_S, lambda: cluster.finished):
            return False
    cluster.world.run(cluster.world.now + AFTERMATH_S, lambda: False)
    return True
