"""Finds the samples that remain to be issued, and the size of their fragments."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.scheduler.core.state import (
    BatchState,
    FragmentState,
    GroupState,
    Plan,
    State,
    new_batch,
)
from shared.limits import MAX_FRAGMENTS_PER_GROUP

FRAGMENTS_PER_DEVICE = 5
"""Fragments of a batch per device: enough for early first groups, few enough to be efficient."""
MAX_SHRINK_FACTOR = 4
"""At the end of a batch, fragments shrink to their full size divided by this at least."""


@dataclass(frozen=True, slots=True)
class NextFragment:
    """A fragment that could be issued now."""

    batch: int
    group: int
    fragment: FragmentState


def open_supply(
    plan: Plan, state: State, *, after: int | None = None
) -> tuple[BatchState, int] | None:
    """The batch to issue from, and how many of its groups may be begun; one behind ``after``."""
    for batch, limit in _open_batches(plan, state):
        if after is not None and batch.index <= after:
            continue
        if unissued_samples(plan, batch, limit):
            return batch, limit
    return None


def num_unissued(plan: Plan, state: State) -> int:
    """Samples that rollout devices may begin before the next version is published."""
    return sum(unissued_samples(plan, batch, limit) for batch, limit in _open_batches(plan, state))


def _open_batches(plan: Plan, state: State) -> Iterator[tuple[BatchState, int]]:
    """The current batch and, with one-step asynchrony, the next one; and how many groups of it."""
    batch = state.batch
    if batch is None:
        return
    yield batch, plan.num_groups
    following = batch.index + 1
    if plan.early_groups and following < plan.num_batches:
        early = state.find_batch(following) or new_batch(plan, following, 0.0)
        yield early, plan.early_groups


def unissued_samples(plan: Plan, batch: BatchState, limit: int) -> int:
    """Samples of the first groups of a batch that no device has yet."""
    size, tally = plan.group_size, batch.tally
    if tally.end <= limit:  # all that was cut is among them
        return min(limit, len(batch.groups)) * size - tally.cut + tally.pending
    return sum(
        size - group.num_cut + (group.num_pending if group.fragments else 0)
        for group in batch.groups[:limit]
        if group.num_scored < size
    )


def fragment_size(plan: Plan, state: State, num_queues: int) -> int:
    """Samples per fragment while there is plenty: as chosen by learned costs, if there are any
    (`core.sizing`)."""
    if plan.schedule.fixed_fragment is not None:
        return plan.schedule.fixed_fragment
    return full_size(plan, num_queues) if state.sizing is None else state.sizing.samples


def next_fragment_size(plan: Plan, state: State, full: int, samples: int, num_queues: int) -> int:
    """Size of the next fragment, given the samples left: the full size (`fragment_size`) for the
    whole batch, once costs are known."""
    if state.sizing is not None:
        return full
    return next_size(plan, full, samples, num_queues, probes=_probes(plan, state))


def fragment_sizes(group_size: int) -> list[int]:
    """Divisors of the group size that one message can name all fragments of."""
    fewest = math.ceil(group_size / MAX_FRAGMENTS_PER_GROUP)
    return [size for size in range(fewest, group_size + 1) if group_size % size == 0]


def _probes(plan: Plan, state: State) -> bool:
    """Whether the size of fragments has to vary, because what they cost is not known yet."""
    is_free = plan.schedule.fixed_fragment is None and not plan.shared_share
    return is_free and plan.group_size > 1 and not state.costs.overhead.is_known


def full_size(plan: Plan, num_queues: int) -> int:
    """Samples per fragment while nothing is known of their cost: a divisor of the group size."""
    if plan.schedule.fixed_fragment is not None:
        return plan.schedule.fixed_fragment
    share = plan.num_groups * plan.group_size // (FRAGMENTS_PER_DEVICE * max(1, num_queues))
    most = max(_min_size(plan), min(share, plan.group_size))
    divisors = [n for n in range(1, plan.group_size + 1) if plan.group_size % n == 0]
    fitting = [n for n in divisors if _min_size(plan) <= n <= most]
    size = max(fitting) if fitting else min(n for n in divisors if n >= most)
    if not plan.shared_share:
        return size
    return min((n for n in divisors if n >= size), key=lambda n: _rounds(plan, n, num_queues))


def _rounds(plan: Plan, size: int, num_queues: int) -> float:
    """Duration of a batch in fragments of this size that share some of their steps, in units of a
    single sample: larger fragments share more, and at the end a device waits for half a fragment.
    """
    each = plan.shared_share + size * (1 - plan.shared_share)
    return plan.num_groups * plan.group_size / size * each / max(1, num_queues) + each / 2


def next_size(plan: Plan, full: int, samples: int, num_queues: int, *, probes: bool = False) -> int:
    """Size of the next fragment: towards the end of a batch, half a fair share of the samples left.

    If the next batch follows at once there is no tail, and small fragments cost more per sample.
    Where samples share steps, a group is cut in equal parts: a small rest would pay them alone.

    Args:
        probes: whether half of the batch is cut otherwise, to learn what that costs.
    """
    if plan.schedule.fixed_fragment is not None:
        return full
    if probes and samples <= plan.num_groups * plan.group_size / 2:
        full = full // 2 if full > max(1, _min_size(plan)) else full + 1
    if plan.early_groups:
        return full
    size = _size_at_end(plan, full, math.ceil(samples / (2 * max(1, num_queues))))
    if not plan.shared_share:
        return size
    return -(-plan.group_size // (plan.group_size // size))  # as equal parts as can be


def _size_at_end(plan: Plan, full: int, share: int) -> int:
    return max(_min_size(plan), full // MAX_SHRINK_FACTOR, min(full, share))


def _min_size(plan: Plan) -> int:
    """Smallest fragment for which one message can name all of a group."""
    return math.ceil(plan.group_size / MAX_FRAGMENTS_PER_GROUP)


def next_fragment(
    plan: Plan,
    batch: BatchState,
    groups: range,
    size: int,
    group_of: Callable[[BatchState, int], GroupState],
) -> NextFragment | None:
    """The first fragment that these groups have to issue; ``group_of``: a group as it is now."""
    for index in groups:
        for fragment in fragments_left(plan, group_of(batch, index), size):
            return NextFragment(batch.index, index, fragment)
    return None


def fragments_left(plan: Plan, group: GroupState, size: int) -> Iterator[FragmentState]:
    """Fragments of a group that were given back, then a new one from its remaining samples."""
    for fragment in group.fragments:
        if fragment.stage == "pending":
            yield fragment
    left = plan.group_size - group.num_cut
    if left:
        yield FragmentState(
            first_sample=group.num_cut, num_samples=min(size, left), attempt=group.first_attempt
        )
