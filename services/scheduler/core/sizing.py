"""Chooses how many samples a fragment has, once per batch, by what was learned of their cost.

A fragment of n samples takes o + c n seconds: `tag.estimates.Overhead` learns o / c from fragments
of several sizes, and `tag.forecast` tells what a batch takes in fragments of each. The planner
chooses by the same formula. Until enough is known, `supply.full_size` divides by the devices alone.
"""

import math
from collections import Counter
from dataclasses import replace

from services.scheduler.core.gradients import gradient_seconds
from services.scheduler.core.lending import tag_inputs
from services.scheduler.core.state import Plan, Sizing, State, WorkerState
from services.scheduler.core.supply import fragment_sizes
from services.scheduler.core.tag.fluid import IndependentPool
from services.scheduler.core.tag.forecast import Situation, forecast, last_piece
from services.scheduler.core.tag.makespan import TagInputs

ALIKE = 1.1
"""Devices whose seconds differ by no more than this factor count as alike."""
MOST_GROUPS = 128
"""Number of groups, and of devices in proportion, that a batch is forecast with at most."""
FEWEST = 4
"""Number of alike devices that must be left of them."""
AS_GOOD = 1.003
"""Factor of seconds within which sizes count as equally good: forecasts tell no less."""
MAX_FRAGMENTS = 6
"""Number of fragments of a group up to which smaller ones are better where they cost nothing: a
slow device holds less, and results come less in bursts. More would be messages only."""


def size_fragments(plan: Plan, state: State) -> State:
    """Choose for the current batch, as soon as costs are known; once, so that it is the same for
    all of the batch."""
    batch, sizing = state.batch, state.sizing
    if batch is None or (sizing is not None and sizing.batch == batch.index):
        return state
    trainer = state.trainer
    if plan.schedule.fixed_fragment is not None or plan.schedule.mode == "colocated":
        return state
    if trainer is None or not _is_known(state):
        return state
    return replace(state, sizing=Sizing(batch.index, best_size(plan, state, trainer)))


def best_size(plan: Plan, state: State, trainer: WorkerState) -> int:
    """Return the samples per fragment by which a batch like the current one takes least; of those
    that are as good, the smallest that makes no more than `MAX_FRAGMENTS` of a group."""
    seconds = {
        size: forecast(situation(plan, state, trainer, size), plan.schedule).seconds
        for size in fragment_sizes(plan.group_size)
    }
    least = min(seconds.values())
    good = [size for size, each in seconds.items() if each <= AS_GOOD * least]
    few = [size for size in good if size * MAX_FRAGMENTS >= plan.group_size]
    return min(few) if few else max(good)


def situation(plan: Plan, state: State, trainer: WorkerState, size: int) -> Situation:
    """Return the current batch in fragments of such a size, as far as devices are known."""
    seen, factor = _thinned(_alike(tag_inputs(plan, state, trainer, size)))
    if not trainer.independent_devices:
        return Situation(seen)
    number = max(1, seen.trainer_queues)
    last = last_piece(plan.group_size, plan.trained_steps, plan.merged_steps, 0.0)
    helps = plan.schedule.gradient_help and factor == 1
    gradient = [
        gradient_seconds(state, worker) if helps and worker.can_train else math.inf
        for worker in state.rollout
        for _ in range(worker.concurrency)
    ]
    return Situation(seen, IndependentPool(
        tag_inputs=seen,
        num_trainer=number,
        last=seen.train * number * last,
        gradient=tuple(gradient) if helps else (math.inf,) * len(seen.rollout),
    ))  # fmt: skip


def _is_known(state: State) -> bool:
    costs = state.costs
    overhead = costs.overhead.is_known or costs.shared_share > 0
    return overhead and bool(costs.rollout) and costs.train.value is not None


def _alike(seen: TagInputs) -> TagInputs:
    """Take devices that are nearly as fast as another for equal: a class of them is forecast in the
    time of one."""
    levels: dict[float, float] = {}
    first = 0.0
    for seconds in sorted(seen.rollout):
        if seconds > first * ALIKE:
            first = seconds
        levels[seconds] = first
    rates: dict[float, list[float]] = {}
    for seconds in seen.rollout:
        rates.setdefault(levels[seconds], []).append(1 / seconds)
    mean = {level: len(each) / sum(each) for level, each in rates.items()}
    return replace(seen, rollout=tuple(mean[levels[seconds]] for seconds in seen.rollout))


def _thinned(seen: TagInputs) -> tuple[TagInputs, int]:
    """Take a part of groups and devices for all of them, where there are very many of both; also
    return by which factor they are fewer."""
    factor = seen.groups // MOST_GROUPS
    classes = Counter(seen.rollout)
    counts = [*classes.values(), *([seen.trainer_queues] if seen.trainer_queues else [])]
    if factor < 2 or min(counts, default=0) < FEWEST * factor:
        return seen, 1
    rollout = [s for s, count in classes.items() for _ in range(round(count / factor))]
    return replace(
        seen,
        groups=round(seen.groups / factor),
        rollout=tuple(rollout),
        trainer_queues=round(seen.trainer_queues / factor),
        train=seen.train * factor,
    ), factor
