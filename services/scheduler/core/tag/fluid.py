"""Forecasts several members: each generates what it was given, then trains.

strict     one unbroken block of generation on members, then training as in fluid mode: groups bring
           work when they are ready, devices take it once their block has ended
one-step   generation and training overlap fully, and an idle side helps the other, so that both
           take the same time: all work over all devices, if only that kind of help is given, and at
           least the time that staleness allows (`least_period`)
"""

import math
from collections import Counter
from dataclasses import dataclass

from services.scheduler.core.tag.list_schedule import generate
from services.scheduler.core.tag.makespan import TagInputs, best_groups, member_share

CANDIDATE_OFFSETS = (-1, 0, 1, 2, 3)
"""Groups around the wave model's choice, in which the whole trainer waits for the end of the block;
with many groups, multiples of a share of the groups."""
STEPS = 64
"""Number of steps in which the groups of a batch are looked at, where there are many."""
LATE_SHARE = 0.05
"""Share of a fragment that a batch loses with one-step asynchrony, times its share of the batch's
seconds: how often the others wait for a member at a fragment. Fitted to the simulator."""
LATE_SHARE_WITH_LOANS = 0.45
"""The same where members are lent, which generate in every second batch and then train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPool:
    tag_inputs: TagInputs
    num_trainer: int
    """Devices, of which `tag_inputs.trainer_queues` can generate."""
    last: float
    """Seconds of a piece of a group: at a batch's end some devices train one and others none."""
    lanes: tuple[tuple[float, float], ...] = ()
    """Seconds of a fragment and of a group's gradient on each member, if members differ; else
    `tag_inputs` applies to all."""


def strict(
    pool: MemberPool, most: int | None = None, *, near: int | None = None
) -> tuple[float, int]:
    """Seconds of a batch, and how many groups members generate: the best, or ``most``; the search
    starts at ``near``, by default the wave model's number."""
    tag_inputs = pool.tag_inputs
    if most is not None:
        return makespan(pool, most), most
    around = best_groups(tag_inputs) if near is None else near
    last = tag_inputs.groups if tag_inputs.trainer_queues else 0
    step = -(-tag_inputs.groups // STEPS)
    wanted = {max(0, min(last, around + step * each)) for each in CANDIDATE_OFFSETS}
    return min((makespan(pool, k), k) for k in wanted)


def generated_share(tag_inputs: TagInputs, *, one_step: bool) -> int:
    """Groups that several members generate in the batch that opens: on-policy
    those that `strict` finds best, near the wave model's."""
    share = member_share(tag_inputs, one_step=one_step)
    if one_step or not tag_inputs.rollout or not tag_inputs.train:
        return share
    pool = MemberPool(
        tag_inputs=tag_inputs,
        num_trainer=max(1, tag_inputs.trainer_queues),
        last=0.0,  # the same for every number of groups
    )
    return strict(pool, near=share)[1]


def makespan(pool: MemberPool, k: int) -> float:
    """Seconds from opening to commit if the trainer generates ``k`` groups."""
    tag_inputs = pool.tag_inputs
    classes = tuple(Counter(tag_inputs.rollout).items())
    fragments, queues = tag_inputs.fragments_per_group, tag_inputs.trainer_queues
    if (k < tag_inputs.groups and not classes) or (k and not queues):
        return math.inf
    rollout = generate(classes, tag_inputs.groups - k, fragments)
    lanes = list(Counter(pool.lanes).items())
    if lanes:
        helped = generate(tuple((seconds, count) for (seconds, _), count in lanes), k, fragments)
    else:
        helped = generate(((tag_inputs.help, queues),) if queues else (), k, fragments)
    ready = [time + tag_inputs.ready for time in (*rollout.ready, *helped.ready)]
    work = tag_inputs.train * pool.num_trainer  # of a group, on one member
    rates = [(0.0, float(pool.num_trainer - queues))]
    for time, count, place in helped.free:
        rates.append((time, count * (work / lanes[place][0][1] if lanes else 1.0)))
    return _worked_off(ready, rates, work) + pool.last / 2 + tag_inputs.commit


def _worked_off(ready: list[float], rates: list[tuple[float, float]], work: float) -> float:
    """When ``work`` seconds per group are done, by devices that take part from a time on."""
    backlog = rate = now = 0.0
    for time, more, faster in sorted(
        [(time, work, 0.0) for time in ready] + [(time, 0.0, each) for time, each in rates]
    ):
        backlog = max(0.0, backlog - rate * (time - now)) + more
        rate, now = rate + faster, time
    return now + backlog / rate


def one_step(pool: MemberPool, groups: int | None = None) -> tuple[float, int]:
    """Seconds of a batch, and how many groups the trainer had better be allowed to generate: as
    many as is best, or ``groups`` and no more."""
    seconds, allowed = _overlapping(pool, groups)
    tag_inputs = pool.tag_inputs
    least = least_period(tag_inputs, last=pool.last / 2)
    return max(seconds, least), allowed


def members_ahead(pool: MemberPool) -> float:
    """Seconds of a batch on fluid devices that generate one step ahead: hardly a device waits, so
    it is all work over all devices, and what long fragments of slow devices cost the others."""
    seconds = _all_work(pool)
    longest = max((*pool.tag_inputs.rollout, *(fragment for fragment, _ in pool.lanes)))
    return seconds + LATE_SHARE * longest * longest / seconds


def _all_work(pool: MemberPool) -> float:
    """Seconds of all work over all devices, each doing what it does best (as `costs.floor`)."""
    inputs = pool.tag_inputs
    generation = float(inputs.groups * inputs.fragments_per_group)
    training = float(inputs.groups)
    rates = [(1 / fragment, 1 / gradient) for fragment, gradient in pool.lanes]
    front = sum(1 / seconds for seconds in inputs.rollout)
    behind = sum(trains for _, trains in rates)
    for generates, trains in sorted(rates, key=lambda rate: rate[1] / rate[0]):
        behind -= trains
        weight = training * generates + generation * trains
        share = (generation * (trains + behind) - training * front) / weight
        if share <= 1:
            share = max(share, 0.0)
            rest = training / ((1 - share) * trains + behind)
            seconds = max(generation / (front + share * generates or 1e-12), rest)
            return seconds + pool.last / 2 + inputs.commit
        front += generates
    return math.inf


def least_period(tag_inputs: TagInputs, *, last: float) -> float:
    """Seconds of a batch that a step of staleness allows at least, however many devices there are.

    A batch is begun with the version of two commits before its own, at the earliest, and then takes
    a fragment, and the training of the groups that are ready no sooner than its last one: of all
    groups, where every fragment has a device at once.
    """
    if not tag_inputs.rollout:
        return math.inf
    classes = tuple(Counter(tag_inputs.rollout).items())
    alone = generate(classes, tag_inputs.groups, tag_inputs.fragments_per_group).ready[-1]
    mean = len(tag_inputs.rollout) / sum(1 / seconds for seconds in tag_inputs.rollout)
    longest = min(mean, alone)  # slow devices begin what is needed last
    share = min(1.0, longest / alone)  # of the batch that is done with the last fragment
    training = share * tag_inputs.groups * tag_inputs.train
    return (longest + tag_inputs.ready + training + last + tag_inputs.commit) / 2


def _overlapping(pool: MemberPool, groups: int | None) -> tuple[float, int]:
    tag_inputs = pool.tag_inputs
    total = tag_inputs.groups
    generate_, help_ = per_group(tag_inputs)
    training = total * tag_inputs.train + tag_inputs.commit + pool.last / 2
    balanced = (total * generate_ - training) / (generate_ + help_)
    most = total if groups is None else groups
    if balanced > 0:
        helped = min(balanced, most)
        allowed = most if groups is not None else member_share(tag_inputs, one_step=True)
        seconds = (total - helped) * generate_
        return (
            seconds + LATE_SHARE_WITH_LOANS * tag_inputs.help * tag_inputs.help / seconds,
            allowed,
        )
    allowed = most if groups is not None else int(balanced > -1)
    return training, allowed


def per_group(tag_inputs: TagInputs) -> tuple[float, float]:
    """Return seconds of generating a group on all rollout devices, and on all of the trainer's."""
    fragments, slots = tag_inputs.fragments_per_group, tag_inputs.trainer_queues
    rate = sum(1 / seconds for seconds in tag_inputs.rollout)
    generates = fragments / rate if rate else math.inf
    return generates, fragments * tag_inputs.help / slots if slots else math.inf
