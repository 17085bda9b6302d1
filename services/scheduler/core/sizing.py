"""Chooses how many samples a fragment has, once per batch, by what was learned of their cost.

A fragment of n samples takes o + c n seconds: `tag.estimates.Overhead` learns o / c from fragments
of several sizes, and `tag.forecast` forecasts a batch for each size. The planner chooses by the
same formula. Until enough is known, `supply.full_size` divides by the devices alone.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from services.scheduler.core.device_queues import kept_busy, sample_seconds
from services.scheduler.core.fluid.modes import has_loans
from services.scheduler.core.lending import lendable, tag_inputs
from services.scheduler.core.state import Plan, Sizing, State, WorkerState
from services.scheduler.core.tag.fluid import MemberPool
from services.scheduler.core.tag.forecast import Situation, forecast, last_piece
from services.scheduler.core.tag.makespan import TagInputs
from services.scheduler.core.unissued import fragment_sizes

SAME_SPEED_FACTOR = 1.1
"""Devices whose seconds differ by no more than this factor count as alike."""
MAX_FORECAST_GROUPS = 128
"""Number of groups, and of devices in proportion, that a batch is forecast with at most."""
MIN_ALIKE_DEVICES = 4
"""Number of alike devices that must be left of them."""
TIE_FACTOR = 1.003
"""Factor of seconds within which sizes count as equally good: the precision of forecasts."""
MAX_FRAGMENTS = 6
"""Number of fragments of a group up to which smaller ones are better where they cost nothing: a
slow device holds less, and results come less in bursts. More would be messages only."""


def size_fragments(plan: Plan, state: State) -> State:
    """Choose for the current batch, as soon as costs are known; once, so that it is the same for
    all of the batch."""
    batch, sizing = state.batch, state.sizing
    if batch is None or (sizing is not None and sizing.batch == batch.index):
        return state
    if plan.schedule.fixed_fragment is not None:
        return state
    if not state.members or not _is_known(state):
        return state
    size = best_size(plan, state)
    return state if size is None else replace(state, sizing=Sizing(batch.index, size))


def best_size(plan: Plan, state: State) -> int | None:
    """Return the samples per fragment by which a batch like the current one takes least; of those
    that are as good, the smallest that makes no more than `MAX_FRAGMENTS` of a group. None if no
    device is there to generate."""
    seconds = {
        size: forecast(situation(plan, state, size), plan.schedule).seconds
        for size in fragment_sizes(plan.group_size)
    }
    return chosen_size(seconds, plan.group_size)


def chosen_size(seconds: Mapping[int, float], group_size: int) -> int | None:
    """Return the size of fragments with the shortest forecast batch; None if every forecast is
    infinite."""
    seconds = {size: each for size, each in seconds.items() if math.isfinite(each)}
    least = min(seconds.values(), default=math.inf)
    good = [size for size, each in seconds.items() if each <= TIE_FACTOR * least]
    few = [size for size in good if size * MAX_FRAGMENTS >= group_size]
    return min(few) if few else max(good, default=None)


def situation(plan: Plan, state: State, size: int) -> Situation:
    """Return the current batch in fragments of such a size, as far as devices are known."""
    members = state.members
    if not has_loans(plan):
        return _forecast_members(plan, state, members, size)
    lent = lendable(state) or members
    inputs = _thinned(_alike(tag_inputs(plan, state, lent, size)))
    if len(lent) < 2:
        return Situation(inputs)
    number = max(1, inputs.trainer_queues)
    last = last_piece(plan.group_size, plan.trained_steps, plan.merged_steps, 0.0)
    pool = MemberPool(tag_inputs=inputs, num_trainer=number, last=inputs.train * number * last)
    return Situation(inputs, pool)


def _forecast_members(plan: Plan, state: State, members: list[WorkerState], size: int) -> Situation:
    """Return the same where no member is lent: members generate and then train, or only train."""
    costs, samples = state.costs, state.costs.whole_samples(size)
    rollout = kept_busy(state, state.only_generate)
    members = sorted(members, key=lambda each: not each.concurrency)  # those last that only train
    gradient = [costs.gradient_seconds(w.address) or 1.0 for w in members]
    members = [each for each in members if each.concurrency]
    seconds = [sample_seconds(state, w) * samples for w in (*members, *rollout)]
    levels = _levels(seconds), _levels(gradient)
    both = zip(seconds[: len(members)], gradient, strict=False)
    lanes = tuple((levels[0][a], levels[1][b]) for a, b in both)
    train = 1 / sum(1 / levels[1][each] for each in gradient)
    alike = len(lanes) / sum(1 / each for each, _ in lanes) if lanes else 1.0
    last = last_piece(plan.group_size, plan.trained_steps, plan.merged_steps, 0.0)
    others = tuple(levels[0][each] for each in seconds[len(members) :])
    inputs = TagInputs(
        groups=plan.num_groups,
        fragments_per_group=-(-plan.group_size // size),
        rollout=others,
        trainer_queues=len(members),
        help=alike,
        train=train,
        switch=0.0,
        ready=costs.ready.seconds,
        commit=costs.commit.seconds,
    )
    if not lanes:
        return Situation(inputs)
    return Situation(inputs, MemberPool(
        tag_inputs=inputs,
        num_trainer=len(members),
        last=train * len(members) * last,
        lanes=lanes,
    ))  # fmt: skip


def _is_known(state: State) -> bool:
    costs = state.costs
    overhead = costs.overhead.is_known or costs.shared_share > 0
    return overhead and bool(costs.rollout) and bool(costs.gradient)


def _alike(inputs: TagInputs) -> TagInputs:
    """Treat devices of nearly equal speed as one class, which is forecast in the time of one
    device."""
    mean = _levels(inputs.rollout)
    return replace(inputs, rollout=tuple(mean[seconds] for seconds in inputs.rollout))


def _levels(all_seconds: Collection[float]) -> dict[float, float]:
    """Return seconds -> mean of those that are alike."""
    levels: dict[float, float] = {}
    first = 0.0
    for seconds in sorted(all_seconds):
        if seconds > first * SAME_SPEED_FACTOR:
            first = seconds
        levels[seconds] = first
    rates: dict[float, list[float]] = {}
    for seconds in all_seconds:
        rates.setdefault(levels[seconds], []).append(1 / seconds)
    mean = {level: len(each) / sum(each) for level, each in rates.items()}
    return {seconds: mean[level] for seconds, level in levels.items()}


def _thinned(inputs: TagInputs) -> TagInputs:
    """Take a part of groups and devices for all of them, where there are very many of both."""
    factor = inputs.groups // MAX_FORECAST_GROUPS
    classes = Counter(inputs.rollout)
    counts = [*classes.values(), *([inputs.trainer_queues] if inputs.trainer_queues else [])]
    if factor < 2 or min(counts, default=0) < MIN_ALIKE_DEVICES * factor:
        return inputs
    rollout = [s for s, count in classes.items() for _ in range(round(count / factor))]
    return replace(
        inputs,
        groups=round(inputs.groups / factor),
        rollout=tuple(rollout),
        trainer_queues=round(inputs.trainer_queues / factor),
        train=inputs.train * factor,
    )
