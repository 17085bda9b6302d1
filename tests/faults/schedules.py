"""What a seed stands for: a small run, how long its work takes, and how often something fails."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from services.scheduler.core.state import Plan
from services.scheduler.core.tag.controller import Controller, Mode
from services.scheduler.sim.timing import Timing
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.messages.contracts import Prompt
from shared.recipe.schedule import RunSchedule
from tests.examples import early_fraction

SLOW = 8.0
PlanMode = Literal["pipelined", "sequential", "colocated"]
PROMPTS = PromptOrder((Prompt(text="a digit"), Prompt(text="another")), seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    seed: int
    plan: Plan
    timing: Timing
    rollout: Mapping[str, int]
    """Devices by kind; every device has a speed of its own."""
    trainer_slots: int
    lanes: tuple[str, ...]
    """Kinds of a trainer's independent devices; empty: its devices go together."""
    can_train: tuple[str, ...]
    """Kinds of rollout devices that compute gradients."""
    tag: Controller
    slowest_message: float
    """Seconds; messages take anything up to this, and overtake each other."""
    slowest_return: float
    """Seconds in which a connection is back after a cut; each stream takes its own time."""
    repeat: float
    failure: float
    poison: float
    gradient_failure: float
    wrong_weights: float
    """Probability that a rollout worker starts with weights that it should not have."""
    fault_seconds: float
    between_faults: float
    """Mean seconds."""


def handling_seconds(seed: int) -> Callable[[], float] | None:
    """Return, in every seventh run, for how long the scheduler is busy with what waits, so that it
    handles together what has come meanwhile."""
    if seed % 7 != 3:
        return None
    random = Random(f"busy {seed}")
    slowest = random.choice((0.05, 0.3))
    return lambda: random.random() * slowest


def draw(seed: int) -> Schedule:
    random = Random(seed)
    behind = random.random() < 0.35
    plan = _plan(random, behind)
    rollout = {f"kind{number}": 1 for number in range(random.choice((1, 1, 2, 2, 3)))}
    slots = random.choice((0, 1, 1, 1, 1, 1, 2, 2))
    independent = not plan.schedule.deterministic and random.random() < 0.4
    num_lanes = random.choice((2, 2, 3)) if independent else 0
    lanes = tuple(f"lane{number}" for number in range(num_lanes))
    colocated = plan.schedule.mode == "colocated"
    return Schedule(
        seed=seed,
        plan=plan,
        timing=_timing(random, [*rollout, *lanes], SLOW if behind else 1.0),
        rollout=rollout,
        trainer_slots=len(lanes) or (max(1, slots) if colocated else slots),
        lanes=lanes,
        can_train=_can_train(random, [*rollout, "new"], plan),
        tag=Controller(mode="fixed", groups=plan.num_groups)
        if colocated
        else _tag(random, plan.num_groups),
        slowest_message=random.choice((0.02, 0.1, 0.4, 1.0)),
        slowest_return=random.choice((0.0, 1.0, 3.0)),
        repeat=random.choice((0.0, 0.1, 0.3)),
        failure=random.choice((0.0, 0.02, 0.1)),
        poison=random.choice((0.0, 0.0, 0.2)),
        gradient_failure=random.choice((0.0, 0.0, 0.1)),
        wrong_weights=random.choice((0.0, 0.0, 0.2)),
        fault_seconds=random.uniform(2.0, random.choice((10.0, 30.0, 120.0))),
        between_faults=random.uniform(0.3, 3.0),
    )


def _plan(random: Random, behind: bool) -> Plan:
    """``behind``: the trainer is slow, and has enough groups for others to take some."""
    num_groups, group_size = random.randint(2, 4), random.randint(2, 6)
    if behind:
        num_groups, group_size = random.randint(5, 8), random.randint(2, 3)
    modes: tuple[PlanMode, ...] = (*(("pipelined",) * 10), "sequential", "colocated")
    mode = random.choice(modes)
    max_staleness: Literal[0, 1] = random.choice((0, 1, 1)) if mode != "colocated" else 0
    return Plan(
        prompts=PROMPTS,
        num_batches=random.choice((2, 2, 3)),
        num_groups=num_groups,
        group_size=group_size,
        windows=Windows(first=0, last=2),
        seed=random.randrange(2**31),
        schedule=RunSchedule(
            mode=mode,
            deterministic=random.random() < 0.2,
            fragment_size=random.choice(("auto", "auto", random.randint(1, group_size))),
            max_staleness=max_staleness,
            early_fraction=early_fraction(random.randint(1, num_groups), num_groups)
            if max_staleness
            else "auto",
            slot_deadline_s=random.choice((2.0, 5.0, 5.0, 15.0)),
        ),
        max_attempts=random.choice((2, 4, 50)),
        max_losses=random.choice((2, 4, 50)),
        queue_depth=random.choice((1, 1, 2, 2, 3)),
        loan_seconds=random.choice((0.5, 1.5, 4.0, 10.0)),
        max_returns=random.choice((2, 8, 16)),
    )


def _can_train(random: Random, kinds: list[str], plan: Plan) -> tuple[str, ...]:
    """None, all, or some; groups in order are the trainer's alone."""
    part = random.choice((0.0, 0.5, 1.0, 1.0))
    able = tuple(kind for kind in kinds if random.random() < part)
    return () if plan.schedule.deterministic else able


def _timing(random: Random, kinds: Sequence[str], slow: float) -> Timing:
    """``slow``: how many times longer the trainer takes."""
    sample = random.uniform(0.1, 0.4)
    each = {kind: sample * random.uniform(0.5, 4.0) for kind in kinds}
    extra = sample
    help_sample = sample * random.uniform(0.3, 2.0)
    score, train = random.uniform(0.01, 0.2), random.uniform(0.02, 0.2)
    gradient = {
        kind: train * random.uniform(0.5, 2.0) * (slow if kind.startswith("lane") else 1.0)
        for kind in kinds
    }
    return Timing(
        fragment=lambda kind, samples: each.get(kind, extra) * samples,
        gradient=lambda kind, samples: gradient.get(kind, train) * samples,
        help=lambda samples: help_sample * samples,
        score=lambda samples: score * samples,
        train=lambda samples: slow * train * samples,
        commit=random.uniform(0.05, 0.5),
        publish=random.choice((0.0, 0.1, 1.0)),
        adopt=random.choice((0.0, 0.2)),
        steps=random.randint(2, 5),
        switch=random.choice((0.0, 0.0, 0.01, 0.2)),
        noise=0.2,
    )


def _tag(random: Random, num_groups: int) -> Controller:
    modes: tuple[Mode, ...] = ("auto", "off", "fixed", "fixed", "fixed", "fixed", "fixed", "fixed")
    return Controller(mode=random.choice(modes), groups=random.randint(1, num_groups))
