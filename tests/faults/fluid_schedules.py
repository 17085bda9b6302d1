"""Runs of fluid devices under faults that a seed stands for."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from random import Random

from services.scheduler.core.state import Plan
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.timing import Timing
from shared.learning.advantages import Advantages
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.messages.contracts import Prompt
from shared.recipe.schedule import RunSchedule
from tests.faults.fluid_check import violations
from tests.faults.fluid_nemesis import FluidNemesis
from tests.faults.schedules import handling_seconds

LIVENESS_S = 600.0
AFTERMATH_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidOutcome:
    violations: tuple[str, ...]
    finished: bool
    history_hash: str
    met: Counter[str]
    """How often each fault came about."""


def run_fluid(seed: int, mutant: AbstractContextManager[None] | None = None) -> FluidOutcome:
    """One run under faults. ``mutant``: a bug planted for as long as it goes on."""
    with mutant or nullcontext():
        return simulate(seed)[1]


def simulate(seed: int) -> tuple[Cluster, FluidOutcome]:
    cluster = draw(seed)
    nemesis = FluidNemesis(cluster, Random(seed + 77_003))
    found: list[str] = []
    finished = False
    try:
        finished = _go(cluster, nemesis)
    except Exception as error:  # whatever is raised in the scheduler would have ended it
        found = [f"raised {error!r}"]
    found += violations(cluster.plan, cluster.history, cluster.commits.versions)
    if finished and len(cluster.commits.versions) != cluster.plan.num_batches + 1:
        found.append(f"finished with {len(cluster.commits.versions)} versions")
    return cluster, FluidOutcome(
        violations=tuple(found), finished=finished, history_hash=cluster.history.hash(),
        met=nemesis.met,
    )  # fmt: skip


def is_one_step(seed: int) -> bool:
    """Whether the run of a seed may generate a batch by the version before."""
    return seed % 3 == 2


def num_updates(seed: int, groups: int) -> int:
    """Updates of a batch: two in every other run in which its groups can be halved."""
    return 2 if groups % 2 == 0 and (seed // 4) % 2 else 1


def draw(seed: int) -> Cluster:
    """The cluster of a seed: its members, what work takes, and how messages fare."""
    random = Random(seed)
    plan = Plan(
        prompts=PromptOrder((Prompt(text="simulated"),), 0),
        num_batches=random.choice((2, 3)),
        num_groups=random.randint(2, 4),
        group_size=random.randint(2, 5),
        trained_steps=random.randint(1, 4),
        merged_steps=random.choice((0, 0, 0, 1)),
        windows=Windows(first=0, last=2),
        seed=random.randrange(2**31),
        schedule=RunSchedule(
            mode="fluid", tag=0, deterministic=random.random() < 0.15,
            slot_deadline_s=random.choice((2.0, 5.0, 15.0)),
            max_staleness=1 if is_one_step(seed) else 0,
            early_fraction="auto" if seed % 2 else 0.5,
            fragment_size=1 if seed % 6 == 5 else "auto",  # groups are begun and not done
        ),
        advantages=Advantages(std="batch" if seed % 5 == 4 else "group"),
        max_attempts=random.choice((2, 4, 50)),
        max_losses=random.choice((4, 50)),
    )  # fmt: skip
    plan = replace(plan, updates=num_updates(seed, plan.num_groups))
    sample, train = random.uniform(0.1, 0.4), random.uniform(0.05, 0.3)
    slow = {"member": 1.0, "other": random.uniform(0.5, 3.0), "rollout": 1.0}
    timing = Timing(
        fragment=lambda kind, n: sample * slow[kind] * n,
        gradient=lambda kind, n: train * slow[kind] * n,
        help=lambda n: n, score=lambda n: 0.02 * n, train=lambda n: n, commit=0.1,
        publish=random.choice((0.05, 0.4, 1.5)), states=random.choice((0.0, 0.4, 2.0)),
        adopt=0.1, steps=3,
        trained_steps=plan.trained_steps, merged_steps=plan.merged_steps, noise=0.2,
        exchange=random.choice((0.02, 0.3, 1.0)), step=random.choice((0.01, 0.2)),
        snapshot=random.choice((0.0, 0.2)), adopt_state=random.choice((0.05, 0.5)),
    )  # fmt: skip
    slowest = random.choice((0.02, 0.1, 0.4))
    delays = Random(~seed)
    cluster = build(
        plan, timing, rollout={"rollout": random.choice((0, 0, 1))}, trainer_slots=0,
        members={"member": random.randint(1, 3), "other": random.choice((0, 0, 1))}, seed=seed,
        delay=lambda: delays.random() * slowest, tick=1.0, keep_intervals=True, leases=True,
    )  # fmt: skip
    cluster.broker.repeat = random.choice((0.0, 0.1, 0.3))
    cluster.broker.ack_wait = 4.0
    cluster.broker.slowest_return = random.choice((0.0, 1.0, 3.0))
    cluster.reward.failure = random.choice((0.0, 0.02))
    cluster.scheduler.read_seconds = lambda: delays.random() * 0.3
    cluster.scheduler.handling_seconds = handling_seconds(seed)
    assert cluster.fabric is not None
    cluster.fabric.slowest = random.choice((0.0, 0.3))
    return cluster


def _go(cluster: Cluster, nemesis: FluidNemesis) -> bool:
    nemesis.start()
    seconds = nemesis.random.uniform(5.0, 60.0)
    if not cluster.world.run(seconds, lambda: cluster.finished):
        nemesis.make_peace()
        if not cluster.world.run(seconds + LIVENESS_S, lambda: cluster.finished):
            return False
    cluster.world.run(cluster.world.now + AFTERMATH_S, lambda: False)
    return True
