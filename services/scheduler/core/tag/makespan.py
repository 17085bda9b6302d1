"""Models how long a batch takes if the trainer generates some of its groups.

    rollout  |frag|frag|frag|frag|frag|frag| ...      the first P - k groups, group by group
    trainer  |switch|frag|frag|frag|train|train|train| ... |train|commit|
                     the last k groups, then all P, in the order in which they are ready

The trainer generates in one block at the batch's opening. For a given k nothing is faster. No
group of its own is ready earlier in any other arrangement, and every further block would pay the
switch again. So either it never idles, and has the least possible work; or its last stretch
without a pause begins when a group becomes ready, and neither that group nor any that it trains
after it could be ready sooner.

With single-fragment groups, one rollout queue and one trainer queue this is the C(k) of the cost
model, max(s + k h + P τ, g + ρ + (P - k) τ, (P - k) g + ρ + τ) plus the commit, except that C(k)
lets the trainer's own groups be trained without waiting ρ for their rewards: where little else is
ready at the end of the block, this model is up to ρ longer.
"""

import math
from collections import Counter
from dataclasses import dataclass

from services.scheduler.core.tag.list_schedule import generate

STEPS = 64
"""Number of steps in which the groups of a batch are looked at, where there are many: then those
around the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagInputs:
    """Describes a batch to be planned."""

    groups: int
    """Groups of the batch: P."""
    fragments_per_group: int
    """Fragments of a group: F."""
    rollout: tuple[float, ...]
    """Seconds per fragment of every rollout queue; they may differ."""
    trainer_queues: int
    """Fragments that members generate at the same time; 0: they cannot."""
    help: float
    """Seconds per fragment on a queue of a member."""
    train: float
    """Seconds to train a group."""
    switch: float
    """Seconds to switch to generation and back, paid before the block."""
    ready: float
    """Seconds from a group's last fragment until it can be trained: scoring and hand-over."""
    commit: float
    """Seconds from the last group's training to the commit."""


def makespan(tag_inputs: TagInputs, k: int) -> float:
    """Seconds from opening to commit if the trainer generates ``k`` groups.

    Infinite if no device could generate. ValueError if the batch has no ``k`` groups.

    >>> pool = TagInputs(groups=4, fragments_per_group=1, rollout=(10.0,), trainer_queues=1,
    ...                  help=12.0, train=2.0, switch=1.0, ready=0.0, commit=0.0)
    >>> [makespan(pool, k) for k in range(4)]
    [42.0, 32.0, 33.0, 45.0]
    """
    if not 0 <= k <= tag_inputs.groups:
        raise ValueError(f"{k} of {tag_inputs.groups} groups")
    return _trained(tag_inputs, _ready_by_rollout(tag_inputs, tag_inputs.groups - k), k)


def best_groups(tag_inputs: TagInputs) -> int:
    """The smallest number of groups that makes the batch shortest."""
    ready = _ready_by_rollout(tag_inputs, tag_inputs.groups)
    last = tag_inputs.groups if tag_inputs.trainer_queues else 0
    step = -(-tag_inputs.groups // STEPS)
    best, least = _smallest_best(tag_inputs, ready, range(0, last + 1, step))
    if step == 1:
        return best
    near = range(max(0, best - step + 1), min(last, best + step - 1) + 1)
    closer, seconds = _smallest_best(tag_inputs, ready, near)
    return closer if seconds < least else best


def _smallest_best(
    tag_inputs: TagInputs, ready_by_rollout: list[float], numbers: range
) -> tuple[int, float]:
    """The smallest of these ascending numbers of groups that makes the batch shortest, and its
    seconds."""
    training = tag_inputs.groups * tag_inputs.train + tag_inputs.commit
    best, least = numbers[0], math.inf
    for k in numbers:
        if _generating(tag_inputs, k) + training >= least:
            break  # all is trained after the block, which only grows with k
        seconds = _trained(tag_inputs, ready_by_rollout[: tag_inputs.groups - k], k)
        if seconds < least:
            best, least = k, seconds
    return best, least


def generation_seconds(tag_inputs: TagInputs) -> float:
    """Seconds until the last group can be trained, if rollout devices generate all of them."""
    return _ready_by_rollout(tag_inputs, tag_inputs.groups)[-1]


def _ready_by_rollout(tag_inputs: TagInputs, num_groups: int) -> list[float]:
    """When each of the first groups can be trained, in order.

    List scheduling by earliest completion: a slow slot gets no fragment that a fast one would
    finish sooner. Fragments are thus finished in the order of issue, and a group with its last.
    """
    if not tag_inputs.rollout:
        return [math.inf] * num_groups
    classes = tuple(Counter(tag_inputs.rollout).items())
    generated = generate(classes, num_groups, tag_inputs.fragments_per_group)
    return [done + tag_inputs.ready for done in generated.ready]


def _generating(tag_inputs: TagInputs, num_groups: int) -> float:
    """When the trainer's queues have generated this many groups."""
    if not num_groups:
        return 0.0
    if not tag_inputs.trainer_queues:
        return math.inf
    makespan = -(-num_groups * tag_inputs.fragments_per_group // tag_inputs.trainer_queues)
    return tag_inputs.switch + makespan * tag_inputs.help


def _trained(tag_inputs: TagInputs, ready_by_rollout: list[float], k: int) -> float:
    """Seconds to the commit: once its block is done, the trainer trains in order of readiness."""
    helped = [_generating(tag_inputs, group + 1) + tag_inputs.ready for group in range(k)]
    now = _generating(tag_inputs, k)
    for ready in sorted(ready_by_rollout + helped):
        now = max(now, ready) + tag_inputs.train
    return now + tag_inputs.commit


def member_share(tag_inputs: TagInputs, *, one_step: bool) -> int:
    """Groups that several members generate in the batch that opens.

    Each device changes over on its own, at no cost, so help needs no guard and no probe. If nothing
    is learned yet, the share is in proportion to the devices.
    """
    queues = len(tag_inputs.rollout)
    if not tag_inputs.rollout:
        return tag_inputs.groups
    if not tag_inputs.train:
        return tag_inputs.groups * tag_inputs.trainer_queues // (tag_inputs.trainer_queues + queues)
    return _twice_the_balance(tag_inputs) if one_step else best_groups(tag_inputs)


def _twice_the_balance(tag_inputs: TagInputs) -> int:
    """Twice the balanced share, for one-step asynchrony.

    In balance, P - k groups take the rollout devices as long as k groups and all training take the
    trainer's. Help finds unissued work only in every second batch, so it may be twice as much; with
    more, rollout would get a whole batch ahead and wait.
    """
    fragments, groups = tag_inputs.fragments_per_group, tag_inputs.groups
    generate = fragments / sum(1 / seconds for seconds in tag_inputs.rollout)
    helped = fragments * tag_inputs.help / max(1, tag_inputs.trainer_queues)
    balanced = groups * (generate - tag_inputs.train) - tag_inputs.commit
    return min(groups, math.ceil(2 * max(0.0, balanced / (generate + helped))) + 1)
