"""A run in virtual time: costs are learned, batches planned, and measured against a clairvoyant.

The environment is the model with the true costs and 3 % noise per batch. What the planner
sees of it is one noisy observation of each cost per batch, of help and switch only if the trainer
helped; and priors that are wrong by a factor of two.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from services.scheduler.core.tag.controller import Controller, TagDecision, decide, observe
from services.scheduler.core.tag.estimates import Costs, Estimate
from services.scheduler.core.tag.makespan import TagInputs, best_groups, makespan

NUM_BATCHES = 400
NOISE = 0.03


FLUX = TagInputs(
    groups=16, fragments_per_group=4, rollout=(), trainer_queues=8, help=12.0, train=5.0,
    switch=3.0, ready=1.5, commit=2.0,
)  # fmt: skip
"""Batches of 150 to 200 s without help, like FLUX on 32 devices."""
REGIMES = {
    # gain of the best plan over none: 88 %
    "generator-starved": replace(
        FLUX, rollout=(10.0,) * 2 + (14.0,) * 2, trainer_queues=12, train=4.0
    ),
    # 33 %
    "generator-short": replace(FLUX, rollout=(9.0,) * 2 + (14.0,) * 3),
    # 12 %
    "balanced": replace(FLUX, rollout=(10.0,) * 3 + (15.0,) * 3, train=6.5),
    # none: help only harms
    "trainer-starved": replace(
        FLUX, rollout=(9.0,) * 4 + (13.0,) * 6, trainer_queues=6, help=11.0, train=9.0
    ),
}
STEP_AT = 150
MEMBER = "member"
Scenario = Callable[[TagInputs, int, random.Random], TagInputs]


def _scaled(base: TagInputs, factor: float) -> TagInputs:
    return replace(base, rollout=tuple(factor * each for each in base.rollout))


def _spikes(base: TagInputs, _: int, rng: random.Random) -> TagInputs:
    """Treble one of the costs in one batch of twenty."""
    spike, which = rng.random() < 0.05, rng.choice(("rollout", "help", "train", "switch"))
    if not spike:
        return base
    return (
        _scaled(base, 3)
        if which == "rollout"
        else replace(base, **{which: 3 * getattr(base, which)})
    )


SCENARIOS: dict[str, Scenario] = {
    "stationary": lambda base, *_: base,
    "slower rollout": lambda base, at, _: _scaled(base, 1.6) if at >= STEP_AT else base,
    "faster rollout": lambda base, at, _: _scaled(base, 0.6) if at >= STEP_AT else base,
    "drift": lambda base, at, _: _scaled(base, 1 + 0.5 * math.sin(math.tau * at / NUM_BATCHES)),
    "spikes": _spikes,
    "slow switch": lambda base, at, _: replace(base, switch=40.0 if 100 <= at < 300 else 3.0),
}


@dataclass(frozen=True, slots=True)
class Batch:
    decision: TagDecision
    seconds: float
    without: float
    """Seconds of the same batch, with the same noise, without help."""
    clairvoyant: float
    """With the best number of groups for its true costs."""

    @property
    def regret(self) -> float:
        return self.seconds / self.clairvoyant - 1


@cache
def run(scenario: str, regime: str, seed: int, hidden: float = 1.0) -> tuple[Batch, ...]:
    """``hidden``: factor that help costs beyond what the model knows of."""
    rng = random.Random(f"{scenario} {regime} {seed}")
    base = REGIMES[regime]
    costs, controller = _wrong_priors(base), Controller()
    batches = []
    for index in range(NUM_BATCHES):
        truth = SCENARIOS[scenario](base, index, rng)
        controller, decision = decide(controller, _seen(costs, base))
        noise = _noise(rng)
        without, with_best = _reference(truth, hidden)
        seconds = _seconds(truth, decision.groups, hidden) * noise
        batches.append(Batch(decision, seconds, without * noise, with_best * noise))
        costs = _learned(costs, truth, rng, helped=decision.groups > 0)
        met = _seen(costs.as_measured(), base)
        controller = observe(controller, met, decision.groups, seconds)
    return tuple(batches)


def _noise(rng: random.Random) -> float:
    return 1 + NOISE * rng.gauss(0, 1)


def _seconds(truth: TagInputs, groups: int, hidden: float) -> float:
    return makespan(truth, groups) * (hidden if groups else 1)


@cache
def _reference(truth: TagInputs, hidden: float) -> tuple[float, float]:
    without = makespan(truth, 0)
    return without, min(without, _seconds(truth, best_groups(truth), hidden))


def _wrong_priors(base: TagInputs) -> Costs:
    """Wrong by a factor of two, such that help looks better than it is."""
    return Costs(
        rollout={
            MEMBER: Estimate(value=base.help / 2),
            **{str(i): Estimate(value=2 * each) for i, each in enumerate(base.rollout)},
        },
        gradient={MEMBER: Estimate(value=base.train / 2)},
        switch=Estimate(value=base.switch / 2),
        ready=Estimate(value=base.ready * 2),
        commit=Estimate(value=base.commit * 2),
    )


def _learned(costs: Costs, truth: TagInputs, rng: random.Random, *, helped: bool) -> Costs:
    for worker, seconds in enumerate(truth.rollout):
        costs = costs.observe_rollout(str(worker), seconds * _noise(rng))
    costs = costs.observe_gradient(MEMBER, truth.train * _noise(rng))
    for name in ("ready", "commit"):
        costs = costs.observe(name, getattr(truth, name) * _noise(rng))
    if helped:
        costs = costs.observe_rollout(MEMBER, truth.help * _noise(rng))
        costs = costs.observe("switch", truth.switch * _noise(rng))
    return costs


def _seen(costs: Costs, base: TagInputs) -> TagInputs:
    """One sample per fragment."""
    return replace(
        base,
        rollout=tuple(costs.rollout_seconds(str(i)) or 1.0 for i in range(len(base.rollout))),
        help=costs.rollout_seconds(MEMBER) or 1.0,
        train=costs.train_seconds([MEMBER]) or 0.0,
        switch=costs.switch.seconds,
        ready=costs.ready.seconds,
        commit=costs.commit.seconds,
    )
