"""Which device generates which fragment.

Fragments are issued group-major, so that groups complete early and the trainer has work. While
there is plenty, a device that has room takes the next one. Towards the end of a batch a fragment
goes where it is finished first (list scheduling by earliest completion): a slow device takes none
that a fast one would finish before it. The trainer's device, while it is lent, takes from the
other end: what it has begun may have to wait for training, and the last groups wait best.

With one-step asynchrony the next batch follows as soon as the current one has nothing to issue.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.scheduler.colocated import devices_of
from services.scheduler.facts import new_batch, slot_of
from services.scheduler.state import (
    BatchState,
    FragmentState,
    GroupState,
    InHand,
    Plan,
    State,
    WorkerState,
)
from shared.contracts import MAX_FRAGMENTS_PER_GROUP, Fragment, GenerateFragment, Policy

FRAGMENTS_PER_DEVICE = 5
"""Of a batch: enough for the first groups to be early, and few enough to use the device well."""
SMALLEST_PART = 4
"""Fragments shrink to this part of their full size at the end of a batch, not below."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One place where fragments are generated, one after the other."""

    free_at: float
    seconds: float
    """Per sample."""
    address: str


@dataclass(frozen=True, slots=True)
class Work:
    """A fragment that could be issued now."""

    batch: int
    group: int
    fragment: FragmentState


Issued = tuple[State, list[GenerateFragment]]


def assign(plan: Plan, state: State, now: float) -> Issued:
    """Give devices work while they have room and there is some."""
    tasks: list[GenerateFragment] = []
    while True:
        choice = _choose(plan, state, now)
        if choice is None:
            return state, tasks
        worker, work = choice
        state, task = _issue(plan, state, worker, work, now)
        tasks.append(task)


def _choose(plan: Plan, state: State, now: float) -> tuple[WorkerState, Work] | None:
    """The next device and its fragment; None if none is to be issued now."""
    lent = _lent(plan, state)
    if not any(_has_room(plan, w) for w in (*state.rollout, *lent)):
        return None
    if plan.mode == "colocated":
        return _choose_own(plan, state, now)
    supply = _supply(plan, state)
    if supply is None:
        return None
    batch, limit = supply
    samples = _num_samples(plan, batch, limit)
    help_work = _help(plan, state, batch, samples)
    devices = [*state.rollout, *lent] if help_work is not None else state.rollout
    lanes_by = {w.address: lanes_of(state, w, now) for w in devices}
    lanes = [lane for each in lanes_by.values() for lane in each]
    n = next_size(plan, full_size(plan, len(lanes)), samples, len(lanes))
    open_to = [w for w in devices if _has_room(plan, w)]
    for worker in sorted(open_to, key=lambda w: _free_at(lanes_by[w.address])):
        if _is_first_to_finish(state, worker, lanes, n, samples, now):
            helps = worker.service == "trainer"
            work = help_work if helps else _next_work(plan, batch, limit, n, last=False)
            if work is not None:
                return worker, work
    return None


def _choose_own(plan: Plan, state: State, now: float) -> tuple[WorkerState, Work] | None:
    """Colocated: of the groups that are a device's share."""
    batch = state.batch
    if batch is None:
        return None
    devices = devices_of(state)
    able = [w for w in (*state.rollout, *_lent(plan, state)) if _has_room(plan, w) and w in devices]
    for worker in sorted(able, key=lambda w: _free_at(lanes_of(state, w, now))):
        place, step = devices.index(worker), len(devices)
        own = range(place, len(batch.groups), step)
        size = plan.fragment_size or full_size(plan, worker.slots * step)
        if worker.slots == 1 and plan.fragment_size is None:
            size = plan.group_size
        for index in own:
            for fragment in _fragments_of(plan, batch.groups[index], size):
                return worker, Work(batch.index, index, fragment)
    return None


def _help(plan: Plan, state: State, batch: BatchState, samples: int) -> Work | None:
    """What the trainer's device takes next, if it is lent, from the end of the batch.

    None if there is nothing that it may take. Then nothing may be left for it either: neither of
    the next batch, for its weights change before that were done, nor what exceeds its share.
    """
    lent = _lent(plan, state)
    if not lent or batch is not state.batch:
        return None
    num_lanes = sum(worker.slots for worker in (*state.rollout, *lent))
    n = next_size(plan, full_size(plan, num_lanes), samples, num_lanes)
    work = _next_work(plan, batch, plan.num_groups, n, last=True)
    return None if work is None or work.fragment.num_samples > state.tag.samples_left else work


def _lent(plan: Plan, state: State) -> list[WorkerState]:
    trainer = state.trainer
    has_share = plan.mode == "colocated" or state.tag.samples_left > 0
    lent = state.tag.mode == "generate" and has_share
    return [trainer] if trainer is not None and trainer.slots and lent else []


def _has_room(plan: Plan, worker: WorkerState) -> bool:
    return len(worker.in_hand) < plan.fragments_per_slot * worker.slots


def _supply(plan: Plan, state: State) -> tuple[BatchState, int] | None:
    """The batch to issue from, and how many of its groups may be begun."""
    batch = state.batch
    if batch is None:
        return None
    if _num_samples(plan, batch, plan.num_groups):
        return batch, plan.num_groups
    following = batch.index + 1
    if not (plan.max_staleness and plan.early_groups) or following >= plan.num_batches:
        return None
    early = state.find_batch(following) or new_batch(plan, following, 0.0)
    return (early, plan.early_groups) if _num_samples(plan, early, plan.early_groups) else None


def num_unissued(plan: Plan, state: State) -> int:
    """Samples that rollout devices may begin before the next version: of the current batch, and
    with one-step asynchrony of the next one."""
    batch = state.batch
    if batch is None:
        return 0
    current = _num_samples(plan, batch, plan.num_groups)
    following = batch.index + 1
    if not (plan.max_staleness and plan.early_groups) or following >= plan.num_batches:
        return current
    early = state.find_batch(following) or new_batch(plan, following, 0.0)
    return current + _num_samples(plan, early, plan.early_groups)


def _num_samples(plan: Plan, batch: BatchState, limit: int) -> int:
    """Samples that no device has yet."""
    return sum(
        plan.group_size - group.num_cut + (group.num_pending if group.fragments else 0)
        for group in batch.groups[:limit]
    )


def _is_first_to_finish(
    state: State, worker: WorkerState, lanes: list[Lane], size: int, samples: int, now: float
) -> bool:
    """Whether the others would not have done everything before ``worker`` is done with this."""
    mine = [lane for lane in lanes if lane.address == worker.address]
    others = [lane for lane in lanes if lane.address != worker.address]
    if not others:
        return True
    finish = min(lane.free_at for lane in mine) + mine[0].seconds * size
    # First by flow: what the others can do until then, as if samples were a fluid.
    done = sum(max(0.0, finish - lane.free_at) / lane.seconds for lane in others)
    if done <= samples - size:
        return True
    return _takes_part(lanes, worker.address, size, samples)


def _takes_part(lanes: list[Lane], address: str, size: int, samples: int) -> bool:
    """Whether list scheduling of what is left gives ``address`` a fragment at all."""
    ends = [(lane.free_at + lane.seconds * size, index) for index, lane in enumerate(lanes)]
    heapq.heapify(ends)
    for _ in range(math.ceil(samples / size)):
        end, index = ends[0]
        if lanes[index].address == address:
            return True
        heapq.heapreplace(ends, (end + lanes[index].seconds * size, index))
    return False


def lanes_of(state: State, worker: WorkerState, now: float) -> list[Lane]:
    """Its slots, each with the time when it is free."""
    seconds = sample_seconds(state, worker)
    free = [now] * worker.slots  # a heap
    for place, held in enumerate(worker.in_hand):
        elapsed = now - held.since if place < worker.slots else 0.0
        heapq.heapreplace(free, free[0] + max(0.0, held.num_samples * seconds - elapsed))
    if worker.computes is not None:
        heapq.heapreplace(free, free[0] + _gradient_left(state, worker, now))
    return [Lane(at, seconds, worker.address) for at in free]


def seconds_left(
    state: State, worker: WorkerState, now: float, *, everything: bool = False
) -> float:
    """Until a device is done with the fragment that it generates, or with all that it has."""
    seconds = sample_seconds(state, worker)
    left = 0.0
    for place, held in enumerate(worker.in_hand if everything else worker.in_hand[: worker.slots]):
        elapsed = now - held.since if place < worker.slots else 0.0
        left += max(0.0, held.num_samples * seconds - elapsed)
    computing = _gradient_left(state, worker, now) if everything and worker.computes else 0.0
    return left / worker.slots + computing


def _gradient_left(state: State, worker: WorkerState, now: float) -> float:
    assert worker.computes is not None
    seconds = state.costs.gradient_seconds(worker.address) or state.costs.train_seconds()
    return max(0.0, seconds - (now - worker.computes.since))


def _free_at(lanes: list[Lane]) -> float:
    return min(lane.free_at for lane in lanes)


def sample_seconds(state: State, worker: WorkerState) -> float:
    """Learned, or as fast as the others, or anything if nothing is known yet."""
    costs = state.costs
    known = costs.help_seconds() if worker.service == "trainer" else None
    return known or costs.rollout_seconds(worker.address) or 1.0


def full_size(plan: Plan, num_lanes: int) -> int:
    """Samples per fragment while there is plenty: a divisor of the group."""
    if plan.fragment_size is not None:
        return plan.fragment_size
    share = plan.num_groups * plan.group_size // (FRAGMENTS_PER_DEVICE * max(1, num_lanes))
    most = max(_smallest(plan), min(share, plan.group_size))
    divisors = [n for n in range(1, plan.group_size + 1) if plan.group_size % n == 0]
    fitting = [n for n in divisors if _smallest(plan) <= n <= most]
    return max(fitting) if fitting else min(n for n in divisors if n >= most)


def _smallest(plan: Plan) -> int:
    """Samples of a fragment, so that one message can name all of a group."""
    return math.ceil(plan.group_size / MAX_FRAGMENTS_PER_GROUP)


def next_size(plan: Plan, full: int, samples: int, num_lanes: int) -> int:
    """Smaller towards the end of a batch: half a fair share of what is left. Not where the next
    batch follows at once: there is no tail, and small fragments cost more per sample."""
    if plan.fragment_size is not None or (plan.max_staleness and plan.early_groups):
        return full
    share = math.ceil(samples / (2 * max(1, num_lanes)))
    return max(_smallest(plan), full // SMALLEST_PART, min(full, share))


def _next_work(plan: Plan, batch: BatchState, limit: int, size: int, *, last: bool) -> Work | None:
    groups = range(min(limit, len(batch.groups)))
    for index in reversed(groups) if last else groups:
        for fragment in _fragments_of(plan, batch.groups[index], size):
            return Work(batch.index, index, fragment)
    return None


def _fragments_of(plan: Plan, group: GroupState, size: int) -> Iterator[FragmentState]:
    """Those that were given back, then a new one from what is not cut yet."""
    for fragment in group.fragments:
        if fragment.stage == "pending":
            yield fragment
    left = plan.group_size - group.num_cut
    if left:
        yield FragmentState(
            first_sample=group.num_cut, num_samples=min(size, left), attempt=group.first_attempt
        )


def _issue(
    plan: Plan, state: State, worker: WorkerState, work: Work, now: float
) -> tuple[State, GenerateFragment]:
    batch = state.find_batch(work.batch)
    if batch is None:
        batch = new_batch(plan, work.batch, now)
        state = replace(state, batches=(*state.batches, batch))
    group = batch.groups[work.group]
    policy = group.policy or state.policy
    assert policy is not None
    fragment = replace(work.fragment, stage="issued", worker=worker.address)
    slot = slot_of(work.batch, work.group, fragment)
    held = InHand(slot, fragment.num_samples, now)
    state = state.with_group(work.batch, work.group, _with_issued(group, fragment, policy))
    state = state.with_worker(replace(worker, in_hand=(*worker.in_hand, held)))
    if worker.service == "trainer":
        left = state.tag.samples_left - fragment.num_samples
        state = replace(state, tag=replace(state.tag, samples_left=max(0, left)))
    return state, _task(plan, work.batch, work.group, fragment, policy, worker.address)


def _task(
    plan: Plan, batch: int, group: int, fragment: FragmentState, policy: Policy, worker: str
) -> GenerateFragment:
    return GenerateFragment(
        fragment=Fragment(
            batch=batch,
            group=group,
            first_sample=fragment.first_sample,
            num_samples=fragment.num_samples,
            attempt=fragment.attempt,
        ),
        policy=policy,
        prompt=plan.prompts.of_group(batch, group, plan.num_groups),
        window_start=plan.windows.start(plan.seed, batch, group),
        worker=worker,
    )


def _with_issued(group: GroupState, fragment: FragmentState, policy: Policy) -> GroupState:
    others = [f for f in group.fragments if f.first_sample != fragment.first_sample]
    fragments = tuple(sorted([*others, fragment], key=lambda f: f.first_sample))
    cut = sum(f.num_samples for f in fragments)
    return replace(group, policy=policy, fragments=fragments, num_cut=cut)
