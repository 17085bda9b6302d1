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

from services.scheduler.core.tag.controller import Controller, Decision, decide, observe
from services.scheduler.core.tag.estimates import Costs, Estimate
from services.scheduler.core.tag.makespan import TagInputs, best_groups, makespan

NUM_BATCHES = 400
NOISE = 0.03


def tag_inputs(
    rollout: tuple[float, ...], *, trainer_queues: int, help: float, train: float
) -> TagInputs:
    """16 groups of 4 fragments; batches of 150 to 200 s without help, like FLUX on 32 devices."""
    return TagInputs(
        groups=16,
        fragments_per_group=4,
        rollout=rollout,
        trainer_queues=trainer_queues,
        help=help,
        train=train,
        switch=3.0,
        ready=1.5,
        commit=2.0,
    )


REGIMES = {
    # gain of the best plan over none: 88 %
    "generator-starved": tag_inputs((10.0,) * 2 + (14.0,) * 2, trainer_queues=12, help=12, train=4),
    # 33 %
    "generator-short": tag_inputs((9.0,) * 2 + (14.0,) * 3, trainer_queues=8, help=12, train=5),
    # 12 %
    "balanced": tag_inputs((10.0,) * 3 + (15.0,) * 3, trainer_queues=8, help=12, train=6.5),
    # none: help only harms
    "trainer-starved": tag_inputs((9.0,) * 4 + (13.0,) * 6, trainer_queues=6, help=11, train=9),
}

Scenario = Callable[[TagInputs, int, random.Random], TagInputs]


def _rollout_times(base: TagInputs, factor: float) -> TagInputs:
    return replace(base, rollout=tuple(factor * each for each in base.rollout))


def _stationary(base: TagInputs, batch: int, rng: random.Random) -> TagInputs:
    return base


def _slower_rollout(base: TagInputs, batch: int, rng: random.Random) -> TagInputs:
    return _rollout_times(base, 1.6) if batch >= STEP_AT else base


def _faster_rollout(base: TagInputs, batch: int, rng: random.Random) -> TagInputs:
    return _rollout_times(base, 0.6) if batch >= STEP_AT else base


def _drift(base: TagInputs, batch: int, rng: random.Random) -> TagInputs:
    return _rollout_times(base, 1 + 0.5 * math.sin(math.tau * batch / NUM_BATCHES))


def _spikes(base: TagInputs, batch: int, rng: random.Random) -> TagInputs:
    """Treble one of the costs in one batch of twenty."""
    spike, which = rng.random() < 0.05, rng.choice(("rollout", "help", "train", "switch"))
    if not spike:
        return base
    if which == "rollout":
        return _rollout_times(base, 3)
    return replace(base, **{which: 3 * getattr(base, which)})


def _slow_switch(base: TagInputs, batch: int, rng: random.Random) -> TagInputs:
    return replace(base, switch=40.0) if 100 <= batch < 300 else base


STEP_AT = 150
SCENARIOS: dict[str, Scenario] = {
    "stationary": _stationary,
    "slower rollout": _slower_rollout,
    "faster rollout": _faster_rollout,
    "drift": _drift,
    "spikes": _spikes,
    "slow switch": _slow_switch,
}


@dataclass(frozen=True, slots=True)
class Batch:
    decision: Decision
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
        rollout={str(i): Estimate(value=2 * each) for i, each in enumerate(base.rollout)},
        help=Estimate(value=base.help / 2),
        train=Estimate(value=base.train / 2),
        switch=Estimate(value=base.switch / 2),
        ready=Estimate(value=base.ready * 2),
        commit=Estimate(value=base.commit * 2),
    )


def _learned(costs: Costs, truth: TagInputs, rng: random.Random, *, helped: bool) -> Costs:
    for worker, seconds in enumerate(truth.rollout):
        costs = costs.observe_rollout(str(worker), seconds * _noise(rng))
    costs = costs.observe("train", truth.train * _noise(rng))
    costs = costs.observe("ready", truth.ready * _noise(rng))
    costs = costs.observe("commit", truth.commit * _noise(rng))
    if helped:
        costs = costs.observe("help", truth.help * _noise(rng))
        costs = costs.observe("switch", truth.switch * _noise(rng))
    return costs


def _seen(costs: Costs, base: TagInputs) -> TagInputs:
    """One sample per fragment."""
    return replace(
        base,
        rollout=tuple(costs.rollout_seconds(str(i)) or 1.0 for i in range(len(base.rollout))),
        help=costs.help_seconds() or 1.0,
        train=costs.train.seconds,
        switch=costs.switch.seconds,
        ready=costs.ready.seconds,
        commit=costs.commit.seconds,
    )
