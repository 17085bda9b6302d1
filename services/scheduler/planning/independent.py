"""Forecasts trainers of independent devices: each generates what it was given, then trains.

strict     one unbroken block of generation on the trainer's devices, then training as of a fluid:
           groups bring work when they are ready, devices take it off when their block has ended
one-step   generation and training overlap wholly, and whoever would wait helps the other side, so
           that both take the same: all work over all devices, if only help of that kind is given
"""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.core.tag.makespan import TagInputs, best_groups, independent_share

REACH = range(-1, 4)
"""Groups around the wave model's choice, which has the whole trainer wait for the block's end."""
HELD_UP = 0.15
"""Share of a group's gradient that a batch loses because rollout devices take whole groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentPool:
    tag_inputs: TagInputs
    num_trainer: int
    """Devices, of which `tag_inputs.trainer_queues` can generate."""
    last: float
    """Seconds of a piece of a group: at a batch's end some devices train one and others none."""
    gradient: tuple[float, ...]
    """Seconds of a group's gradient on each rollout device; infinite where it does not help."""


@dataclass(frozen=True, slots=True)
class Generated:
    ready: list[float]
    """When each group can be trained."""
    free: list[float]
    """When each device has nothing left to generate."""


def strict(pool: IndependentPool, most: int | None = None) -> tuple[float, int]:
    """Seconds of a batch, and how many groups the trainer generates: the best, or ``most``."""
    tag_inputs = pool.tag_inputs
    if most is not None:
        return makespan(pool, most), most
    around = best_groups(tag_inputs)
    last = tag_inputs.groups if tag_inputs.trainer_queues else 0
    return min((makespan(pool, k), k) for k in {max(0, min(last, around + d)) for d in REACH})


def makespan(pool: IndependentPool, k: int) -> float:
    """Seconds from opening to commit if the trainer generates ``k`` groups."""
    tag_inputs = pool.tag_inputs
    rollout = _generated(tag_inputs.rollout, tag_inputs.groups - k, tag_inputs)
    helped = _generated((tag_inputs.help,) * tag_inputs.trainer_queues, k, tag_inputs)
    ready = [*rollout.ready, *helped.ready]
    if not all(map(math.isfinite, ready)):
        return math.inf
    work = tag_inputs.train * pool.num_trainer  # of a group, on one of the trainer's devices
    always = [0.0] * (pool.num_trainer - tag_inputs.trainer_queues)
    rates = [(time, 1.0) for time in [*helped.free, *always]]
    helpers = [
        (time, seconds)
        for time, seconds in zip(rollout.free, pool.gradient, strict=True)
        if math.isfinite(seconds)
    ]
    end = _worked_off(ready, [*rates, *((time, work / each) for time, each in helpers)], work)
    in_time = [(time, each) for time, each in helpers if time + each <= end]
    if len(in_time) < len(helpers):  # whole groups only
        end = _worked_off(ready, [*rates, *((time, work / each) for time, each in in_time)], work)
    return end + pool.last / 2 + tag_inputs.commit + _held_up(each for _, each in in_time)


def _held_up(gradients: Iterable[float]) -> float:
    """Seconds, if rollout devices compute gradients that take so long."""
    return HELD_UP * max(gradients, default=0.0)


def _generated(devices: tuple[float, ...], num_groups: int, tag_inputs: TagInputs) -> Generated:
    """List scheduling by earliest completion, group by group."""
    slots = [(seconds, index) for index, seconds in enumerate(devices)]
    free = [0.0] * len(devices)
    if not devices:
        return Generated([math.inf] * num_groups, free)
    heapq.heapify(slots)
    ready, done = [], 0.0
    for _ in range(num_groups):
        for _ in range(tag_inputs.fragments_per_group):
            done, index = slots[0]
            free[index] = done
            heapq.heapreplace(slots, (done + devices[index], index))
        ready.append(done + tag_inputs.ready)
    return Generated(ready, free)


def _worked_off(ready: list[float], rates: list[tuple[float, float]], work: float) -> float:
    """When ``work`` seconds per group are done, by devices that take part from a time on."""
    backlog = rate = now = 0.0
    for time, more, faster in sorted(
        [(time, work, 0.0) for time in ready] + [(time, 0.0, each) for time, each in rates]
    ):
        backlog = max(0.0, backlog - rate * (time - now)) + more
        rate, now = rate + faster, time
    return now + backlog / rate


def one_step(pool: IndependentPool, groups: int | None = None) -> tuple[float, int]:
    """Seconds of a batch, and how many groups the trainer had better be allowed to generate: as
    many as is best, or ``groups`` and no more."""
    tag_inputs = pool.tag_inputs
    total = tag_inputs.groups
    generate, help_ = _per_group(tag_inputs)
    training = total * tag_inputs.train + tag_inputs.commit + pool.last / 2
    balanced = (total * generate - training) / (generate + help_)
    most = total if groups is None else groups
    if balanced > 0:
        helped = min(balanced, most)
        allowed = most if groups is not None else independent_share(tag_inputs, one_step=True)
        return (total - helped) * generate, allowed
    allowed = most if groups is not None else int(balanced > -1)
    computed, seconds = _computed(pool, training - total * generate)
    return training - computed * tag_inputs.train + _held_up(seconds), allowed


def _per_group(tag_inputs: TagInputs) -> tuple[float, float]:
    """Seconds of generating a group on all rollout devices, and on all of the trainer's."""
    fragments, slots = tag_inputs.fragments_per_group, tag_inputs.trainer_queues
    rate = sum(1 / seconds for seconds in tag_inputs.rollout)
    return fragments / rate, fragments * tag_inputs.help / slots if slots else math.inf


def _computed(pool: IndependentPool, ahead: float) -> tuple[float, list[float]]:
    """Groups whose gradients rollout devices compute, which are ``ahead`` by so many seconds, and
    the seconds of a gradient on each that does.

    Those devices first that generate least in the time of a gradient; whole groups only.
    """
    tag_inputs = pool.tag_inputs
    rate = sum(1 / seconds for seconds in tag_inputs.rollout)
    costs = sorted(
        (seconds / each / rate, seconds)  # time of all rollout devices
        for seconds, each in zip(pool.gradient, tag_inputs.rollout, strict=True)
        if math.isfinite(seconds)
    )
    batch, groups, helping = tag_inputs.groups * tag_inputs.train, 0.0, []
    for cost, seconds in costs:
        taken = min(batch // seconds, ahead / (tag_inputs.train + cost))
        if taken > 0:
            groups, ahead = groups + taken, ahead - taken * (tag_inputs.train + cost)
            batch -= taken * tag_inputs.train
            helping.append(seconds)
    return groups, helping
