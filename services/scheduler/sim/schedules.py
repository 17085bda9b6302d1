"""What a seed stands for: a small run, how long its work takes, and how often something fails."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from services.scheduler.sim.timing import Timing
from services.scheduler.state import Plan
from services.scheduler.tag.controller import Controller, Mode
from shared.contracts import Prompt
from shared.prompts import PromptOrder

PROMPTS = PromptOrder((Prompt(text="a digit"), Prompt(text="another")), seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    seed: int
    plan: Plan
    timing: Timing
    rollout: Mapping[str, int]
    """Devices by kind; every device has a speed of its own."""
    trainer_slots: int
    tag: Controller
    slowest_message: float
    """Seconds; messages take anything up to this, and overtake each other."""
    slowest_return: float
    """Seconds in which a connection is back after a cut; each stream takes its own time."""
    repeat: float
    failure: float
    poison: float
    wrong_weights: float
    """Probability that a rollout worker starts with weights that it should not have."""
    fault_seconds: float
    between_faults: float
    """Mean seconds."""


def draw(seed: int) -> Schedule:
    random = Random(seed)
    plan = _plan(random)
    rollout = {f"kind{number}": 1 for number in range(random.choice((1, 1, 2, 2, 3)))}
    return Schedule(
        seed=seed,
        plan=plan,
        timing=_timing(random, rollout),
        rollout=rollout,
        trainer_slots=random.choice((0, 1, 1, 1, 1, 1, 2, 2)),
        tag=_tag(random, plan.num_groups),
        slowest_message=random.choice((0.02, 0.1, 0.4, 1.0)),
        slowest_return=random.choice((0.0, 1.0, 3.0)),
        repeat=random.choice((0.0, 0.1, 0.3)),
        failure=random.choice((0.0, 0.02, 0.1)),
        poison=random.choice((0.0, 0.0, 0.2)),
        wrong_weights=random.choice((0.0, 0.0, 0.2)),
        fault_seconds=random.uniform(2.0, random.choice((10.0, 30.0, 120.0))),
        between_faults=random.uniform(0.3, 3.0),
    )


def _plan(random: Random) -> Plan:
    num_groups, group_size = random.randint(2, 4), random.randint(2, 6)
    max_staleness = random.choice((0, 1, 1))
    return Plan(
        prompts=PROMPTS,
        num_batches=random.choice((2, 2, 3)),
        num_groups=num_groups,
        group_size=group_size,
        window_starts=(0, 2),
        seed=random.randrange(2**31),
        mode=random.choice(("pipelined",) * 6 + ("naive",)),
        trains_in_order=random.random() < 0.25,
        fragment_size=random.choice((None, None, random.randint(1, group_size))),
        max_staleness=max_staleness,
        early_groups=random.randint(1, num_groups) if max_staleness else 0,
        max_attempts=random.choice((2, 4, 50)),
        max_losses=random.choice((2, 4, 50)),
        fragments_per_slot=random.choice((1, 1, 2, 2, 3)),
        loan_seconds=random.choice((0.5, 1.5, 4.0, 10.0)),
    )


def _timing(random: Random, kinds: Mapping[str, int]) -> Timing:
    sample = random.uniform(0.1, 0.4)
    each = {kind: sample * random.uniform(0.5, 4.0) for kind in kinds}
    extra = sample
    help_sample = sample * random.uniform(0.3, 2.0)
    score, train = random.uniform(0.01, 0.2), random.uniform(0.02, 0.2)
    return Timing(
        fragment=lambda kind, samples: each.get(kind, extra) * samples,
        help=lambda samples: help_sample * samples,
        score=lambda samples: score * samples,
        train=lambda samples: train * samples,
        commit=random.uniform(0.05, 0.5),
        adopt=random.choice((0.0, 0.2)),
        steps=random.randint(2, 5),
        switch=random.choice((0.0, 0.0, 0.01, 0.2)),
        noise=0.2,
    )


def _tag(random: Random, num_groups: int) -> Controller:
    modes: tuple[Mode, ...] = ("auto", "off", "fixed", "fixed", "fixed", "fixed", "fixed", "fixed")
    return Controller.of(random.choice(modes), random.randint(1, num_groups))
