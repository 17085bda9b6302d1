"""Chooses how many samples a fragment has, once per batch, by what was learned of their cost.

A fragment of n samples takes o + c n seconds: `tag.estimates.Overhead` learns o / c from fragments
of several sizes, and `tag.forecast` tells what a batch takes in fragments of each. The planner
chooses by the same formula. Until enough is known, `supply.full_size` divides by the devices alone.

Of fluid devices that are not alike, slow ones have smaller fragments than fast ones, where that is
better: a fragment of theirs would take several times as long, and what follows waits for it.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.fluid.members import MEMBER
from services.scheduler.core.gradients import gradient_seconds
from services.scheduler.core.lending import tag_inputs
from services.scheduler.core.state import Plan, Sizing, State, WorkerState
from services.scheduler.core.supply import fragment_sizes
from services.scheduler.core.tag.fluid import IndependentPool
from services.scheduler.core.tag.forecast import Situation, forecast, last_piece
from services.scheduler.core.tag.makespan import TagInputs

Kind = TypeVar("Kind")
Sizes = TypeVar("Sizes")

ALIKE = 1.1
"""Devices whose seconds differ by no more than this factor count as alike."""
MOST_GROUPS = 128
"""Number of groups, and of devices in proportion, that a batch is forecast with at most."""
FEWEST = 4
"""Number of alike devices that must be left of them."""
AS_GOOD = 1.003
"""Factor of seconds within which sizes count as equally good: forecasts tell no less."""
PATIENCE = (3.0, 2.0, 1.5, 1.0)
"""How many times as long as a fast device's fragment a slow one's may take."""
WORTH_IT = 1.03
"""Factor of seconds by which sizes that differ by device must be better: forecasts of them err by
as much."""
MAX_FRAGMENTS = 6
"""Number of fragments of a group up to which smaller ones are better where they cost nothing: a
slow device holds less, and results come less in bursts. More would be messages only."""


def size_fragments(plan: Plan, state: State) -> State:
    """Choose for the current batch, as soon as costs are known; once, so that it is the same for
    all of the batch."""
    batch, sizing = state.batch, state.sizing
    if batch is None or (sizing is not None and sizing.batch == batch.index):
        return state
    if plan.schedule.fixed_fragment is not None or plan.schedule.mode == "colocated":
        return state
    trains = _members(state) or state.trainer is not None
    if not trains or not _is_known(state):
        return state
    found = best_sizing(plan, state)
    return state if found is None else replace(state, sizing=found)


def best_sizing(plan: Plan, state: State) -> Sizing | None:
    """Return the samples per fragment by which a batch like the current one takes least; of those
    that are as good, the smallest that makes no more than `MAX_FRAGMENTS` of a group. None if no
    device is there to generate."""
    assert state.batch is not None
    devices = _member_devices(state)
    levels = _levels([sample_seconds(state, worker) for worker in devices])
    whole = state.costs.whole_samples

    def seconds(sizing: Sizing) -> float:
        return forecast(situation(plan, state, sizing), plan.schedule).seconds

    def of(sizes: Mapping[float, int]) -> Sizing:
        """Write sizes of each level as those of its devices."""
        of_device = {w.address: sizes[levels[sample_seconds(state, w)]] for w in devices}
        most = max(of_device.values())
        slower = {address: size for address, size in of_device.items() if size < most}
        return Sizing(batch, most, slower)

    batch, all_sizes = state.batch.index, fragment_sizes(plan.group_size)
    chosen = chosen_size(
        {size: seconds(Sizing(batch, size)) for size in all_sizes}, plan.group_size
    )
    if chosen is None:
        return None
    same = Sizing(batch, chosen)
    unlike = unlike_sizes(
        sorted(set(levels.values())), all_sizes, lambda level, size: level * whole(size)
    )
    return least((of(each) for each in unlike), seconds, same)


def unlike_sizes(
    kinds: Sequence[Kind], sizes: Sequence[int], seconds: Callable[[Kind, int], float]
) -> Iterator[dict[Kind, int]]:
    """List sizes of fragments by kind of device, large ones first: all that the fastest could have,
    and those of the others by which a fragment takes no more than so many times as long
    (`PATIENCE`).

    Args:
        kinds: the fastest first.
        sizes: those that a fragment may have, ascending.
        seconds: of a fragment of such a size on a kind of device.
    """
    known: list[dict[Kind, int]] = []
    for most in reversed(sizes if len(kinds) > 1 else ()):
        for patience in PATIENCE:
            limit = patience * seconds(kinds[0], most)
            found = {
                kind: max(
                    (size for size in sizes if size <= most and seconds(kind, size) <= limit),
                    default=sizes[0],
                )
                for kind in kinds
            }
            if len(set(found.values())) > 1 and found not in known:
                known.append(found)
                yield found


def least(others: Iterator[Sizes], seconds: Callable[[Sizes], float], same: Sizes) -> Sizes:
    """Return the first of the best other sizes, or the same for all devices where that is nearly as
    good."""
    best, allowed = same, seconds(same) / WORTH_IT
    for each in others:
        taken = seconds(each)
        if taken < allowed:
            best, allowed = each, taken / AS_GOOD
    return best


def chosen_size(seconds: Mapping[int, float], group_size: int) -> int | None:
    """Return the size of fragments that is chosen by the seconds of a batch in each; None if all
    take for ever."""
    seconds = {size: each for size, each in seconds.items() if math.isfinite(each)}
    least = min(seconds.values(), default=math.inf)
    good = [size for size, each in seconds.items() if each <= AS_GOOD * least]
    few = [size for size in good if size * MAX_FRAGMENTS >= group_size]
    return min(few) if few else max(good, default=None)


def situation(plan: Plan, state: State, sizing: Sizing) -> Situation:
    """Return the current batch in fragments of such sizes, as far as devices are known."""
    members, trainer = _members(state), state.trainer
    if members:
        return _of_members(plan, state, members, sizing)
    assert trainer is not None
    seen, factor = _thinned(_alike(tag_inputs(plan, state, trainer, sizing.samples)))
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


def _of_members(plan: Plan, state: State, members: list[WorkerState], sizing: Sizing) -> Situation:
    """Return the same for fluid devices, which all generate and then train."""
    costs, devices = state.costs, _member_devices(state)
    sizes = [sizing.of(worker.address) for worker in devices]
    unit = math.gcd(*sizes)
    parts = tuple(size // unit for size in sizes)
    gradient = [costs.gradient_seconds(w.address) or 1.0 for w in members]
    seconds = [
        sample_seconds(state, worker) * costs.whole_samples(size) * unit / size
        for worker, size in zip(devices, sizes, strict=True)
    ]
    levels = _levels(seconds), _levels(gradient)
    lanes = tuple((levels[0][a], levels[1][b]) for a, b in zip(seconds, gradient, strict=False))
    train = 1 / sum(1 / each for _, each in lanes)
    alike = len(lanes) / sum(1 / each for each, _ in lanes)
    last = last_piece(plan.group_size, plan.trained_steps, plan.merged_steps, 0.0)
    others = tuple(levels[0][each] for each in seconds[len(members) :])
    seen = TagInputs(
        groups=plan.num_groups,
        fragments_per_group=-(-plan.group_size // unit),
        rollout=others,
        trainer_queues=len(members),
        help=alike,
        train=train,
        switch=0.0,
        ready=costs.ready.seconds,
        commit=costs.commit.seconds,
    )
    return Situation(seen, IndependentPool(
        tag_inputs=seen,
        num_trainer=len(members),
        last=train * len(members) * last,
        gradient=(math.inf,) * len(others),
        lanes=lanes,
        lane_parts=parts[: len(members)],
        rollout_parts=parts[len(members) :],
    ))  # fmt: skip


def _member_devices(state: State) -> list[WorkerState]:
    """Return all that generate beside fluid devices and these themselves, which come first; none
    where there are no members."""
    members = _members(state)
    rollout = (worker for worker in state.rollout if worker.service == "rollout")
    return [*members, *rollout] if members else []


def _members(state: State) -> list[WorkerState]:
    return [worker for worker in state.rollout if worker.service == MEMBER]


def _is_known(state: State) -> bool:
    costs = state.costs
    overhead = costs.overhead.is_known or costs.shared_share > 0
    trains = costs.train.value is not None or bool(costs.gradient)
    return overhead and bool(costs.rollout) and trains


def _alike(seen: TagInputs) -> TagInputs:
    """Take devices that are nearly as fast as another for equal: a class of them is forecast in the
    time of one."""
    mean = _levels(seen.rollout)
    return replace(seen, rollout=tuple(mean[seconds] for seconds in seen.rollout))


def _levels(all_seconds: Collection[float]) -> dict[float, float]:
    """Return seconds -> mean of those that are alike."""
    levels: dict[float, float] = {}
    first = 0.0
    for seconds in sorted(all_seconds):
        if seconds > first * ALIKE:
            first = seconds
        levels[seconds] = first
    rates: dict[float, list[float]] = {}
    for seconds in all_seconds:
        rates.setdefault(levels[seconds], []).append(1 / seconds)
    mean = {level: len(each) / sum(each) for level, each in rates.items()}
    return {seconds: mean[level] for seconds, level in levels.items()}


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
