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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.scheduler.core.device_queues import DeviceQueues, ListSchedule, devices_of
from services.scheduler.core.state import (
    AssignedFragment,
    BatchState,
    FragmentState,
    GroupState,
    Plan,
    State,
    WorkerState,
    new_batch,
)
from shared.messages.contracts import MAX_FRAGMENTS_PER_GROUP, Fragment, GenerateFragment, Policy

FRAGMENTS_PER_DEVICE = 5
"""Of a batch: enough for the first groups to be early, and few enough to use the device well."""
MIN_PART = 4
"""Fragments shrink to this part of their full size at the end of a batch, not below."""


@dataclass(frozen=True, slots=True)
class Work:
    """A fragment that could be issued now."""

    batch: int
    group: int
    fragment: FragmentState


Choice = tuple[WorkerState, Work]
Issued = tuple[State, list[GenerateFragment]]


def assign(plan: Plan, state: State, now: float) -> Issued:
    """Give devices work while they have room and there is some."""
    tasks: list[GenerateFragment] = []
    rollout = state.rollout
    if not any(_has_room(plan, worker) for worker in (*rollout, *_lent(plan, state))):
        return state, tasks
    market = Shares(plan, now) if plan.mode == "colocated" else Market(plan, state, rollout, now)
    while True:
        choice = market.choose(state)
        if choice is None:
            return state, tasks
        worker, work = choice
        state, task = _issue(plan, state, worker, work, now)
        tasks.append(task)


class Shares:
    """Colocated: of the groups that are a device's share."""

    def __init__(self, plan: Plan, now: float) -> None:
        self._plan = plan
        self._queues = DeviceQueues(now)

    def choose(self, state: State) -> Choice | None:
        batch, plan = state.batch, self._plan
        if batch is None:
            return None
        devices = devices_of(state)
        places = {worker.address: place for place, worker in enumerate(devices)}
        able = [w for w in (*state.rollout, *_lent(plan, state)) if _has_room(plan, w)]
        for worker in sorted(able, key=lambda w: self._queues.free_at(state, w)):
            place, step = places.get(worker.address), len(devices)
            if place is None:
                continue
            size = plan.fragment_size or full_size(plan, worker.concurrency * step)
            if worker.concurrency == 1 and plan.fragment_size is None:
                size = plan.group_size
            for index in range(place, len(batch.groups), step):
                for fragment in _fragments_of(plan, batch.groups[index], size):
                    return worker, Work(batch.index, index, fragment)
        return None


@dataclass(slots=True)
class Round:
    """Choices in which nothing changes but that devices have more and less is left."""

    batch: int
    size: int
    """Samples of a fragment."""
    helps: bool
    """Whether the trainer's device is one of them."""
    open_to: list[tuple[float, int]]
    """A heap of devices that have room: when each is free, and its place."""
    shares: ListSchedule | None = None
    """Not needed yet, if None."""


class Market:
    """Who takes the next fragment: the first to be free that would not be the last to be done.

    A device takes part if list scheduling of all that is left gives it a fragment. Issued to it,
    that fragment leaves the others' as they were: so the schedule is made once for many choices,
    and not at all while so much is left that everybody takes part.
    """

    def __init__(
        self, plan: Plan, state: State, rollout: Sequence[WorkerState], now: float
    ) -> None:
        self._plan = plan
        self._now = now
        self._queues = DeviceQueues(now)
        trainer = state.trainer
        self._addresses = [worker.address for worker in rollout]
        self._trainer = trainer.address if trainer is not None and trainer.concurrency else None
        self._num_queues = sum(worker.concurrency for worker in rollout)
        self._rate: float | None = None
        """Samples per second of the rollout devices."""
        most = plan.queue_depth
        self._room = [n for n, w in enumerate(rollout) if len(w.assigned) < most * w.concurrency]
        """Places of those that had room when the round began."""
        self._supply: tuple[BatchState, int] | None = None
        self._samples = 0
        """Left of the supply."""
        self._first = 0
        """Groups of the supply's batch before this one have nothing to issue."""
        self._round: Round | None = None
        self._last: tuple[int, int] | None = None
        """Place of the device that was chosen last, and its samples."""

    def choose(self, state: State) -> Choice | None:
        self._note_last(state)
        if not self._samples and not self._next_supply(state):
            return None
        assert self._supply is not None
        batch, limit = self._supply
        batch = state.find_batch(batch.index) or batch
        help_work = self._help(state, batch)
        now = self._round_of(state, batch, help_work is not None)
        while now.open_to:
            _, place = heapq.heappop(now.open_to)
            worker = self._device(state, place)
            if self._takes_part(state, worker, now):
                helps = place == len(self._addresses)
                work = help_work if helps else self._next_work(batch, limit, now.size)
                if work is not None:
                    self._last = place, work.fragment.num_samples
                    return worker, work
        return None

    def _device(self, state: State, place: int) -> WorkerState:
        """The trainer's comes last."""
        if place < len(self._addresses):
            return state.workers[self._addresses[place]]
        assert self._trainer is not None
        return state.workers[self._trainer]

    def _note_last(self, state: State) -> None:
        """The device that was chosen has its fragment."""
        if self._last is None or self._round is None:
            return
        (place, samples), self._last, now = self._last, None, self._round
        self._samples -= samples
        if samples != now.size:
            self._round = None  # who took no part may do so now
            return
        worker = self._device(state, place)
        if now.shares is not None:
            now.shares.take(worker.address)
        if _has_room(self._plan, worker):
            heapq.heappush(now.open_to, (self._queues.free_at(state, worker), place))

    def _next_supply(self, state: State) -> bool:
        self._supply, self._first, self._round = _supply(self._plan, state), 0, None
        if self._supply is None:
            return False
        self._samples = _num_samples(self._plan, *self._supply)
        return True

    def _round_of(self, state: State, batch: BatchState, helps: bool) -> Round:
        """The one that goes on, or another one."""
        plan = self._plan
        num_queues = self._num_queues
        if helps:
            num_queues += self._device(state, len(self._addresses)).concurrency
        size = next_size(plan, full_size(plan, num_queues), self._samples, num_queues)
        now = self._round
        if now is None or (now.batch, now.size, now.helps) != (batch.index, size, helps):
            self._room = [n for n in self._room if _has_room(plan, self._device(state, n))]
            trainers = [len(self._addresses)] * helps
            places = [
                *self._room,
                *(n for n in trainers if _has_room(plan, self._device(state, n))),
            ]
            open_to = [(self._queues.free_at(state, self._device(state, n)), n) for n in places]
            heapq.heapify(open_to)
            now = self._round = Round(batch.index, size, helps, open_to)
        return now

    def _takes_part(self, state: State, worker: WorkerState, now: Round) -> bool:
        """Whether the others would not have done everything before ``worker`` is done with this."""
        finish = (
            self._queues.free_at(state, worker) + self._queues.seconds(state, worker) * now.size
        )
        rate = self._rate_of(state, now)
        if (finish - self._now) * rate < 0.999 * (self._samples - now.size):
            return True  # not even if they had nothing in hand
        if now.shares is None:
            places = range(len(self._addresses) + now.helps)
            queues = [
                queue for n in places for queue in self._queues.of(state, self._device(state, n))
            ]
            now.shares = ListSchedule(queues, now.size, math.ceil(self._samples / now.size))
        return now.shares.has(worker.address)

    def _rate_of(self, state: State, now: Round) -> float:
        """Samples per second of all devices, however much they have in hand."""
        if self._rate is None:
            self._rate = self._queues.rate(state, [state.workers[a] for a in self._addresses])
        if not now.helps:
            return self._rate
        return self._rate + self._queues.rate(state, [self._device(state, len(self._addresses))])

    def _next_work(self, batch: BatchState, limit: int, size: int) -> Work | None:
        work = _next_work(
            self._plan, batch, range(self._first, min(limit, len(batch.groups))), size
        )
        if work is not None:
            self._first = work.group
        return work

    def _help(self, state: State, batch: BatchState) -> Work | None:
        """What the trainer's device takes next, if it is lent, from the end of the batch.

        None if there is nothing that it may take. Then nothing may be left for it either: neither
        of the next batch, for its weights change before that were done, nor what exceeds its share.
        """
        tag, plan = state.tag, self._plan
        if self._trainer is None or tag.mode != "generate" or not tag.samples_left:
            return None
        if state.batch is None or batch.index != state.batch.index:
            return None
        num_queues = self._num_queues + state.workers[self._trainer].concurrency
        size = next_size(plan, full_size(plan, num_queues), self._samples, num_queues)
        work = _next_work(plan, batch, range(len(batch.groups) - 1, -1, -1), size)
        return None if work is None or work.fragment.num_samples > tag.samples_left else work


def _lent(plan: Plan, state: State) -> list[WorkerState]:
    trainer = state.trainer
    has_share = plan.mode == "colocated" or state.tag.samples_left > 0
    lent = state.tag.mode == "generate" and has_share
    return [trainer] if trainer is not None and trainer.concurrency and lent else []


def _has_room(plan: Plan, worker: WorkerState) -> bool:
    return len(worker.assigned) < plan.queue_depth * worker.concurrency


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
    size = plan.group_size
    return sum(
        size - group.num_cut + (group.num_pending if group.fragments else 0)
        for group in batch.groups[:limit]
        if group.num_scored < size
    )


def full_size(plan: Plan, num_queues: int) -> int:
    """Samples per fragment while there is plenty: a divisor of the group."""
    if plan.fragment_size is not None:
        return plan.fragment_size
    share = plan.num_groups * plan.group_size // (FRAGMENTS_PER_DEVICE * max(1, num_queues))
    most = max(_smallest(plan), min(share, plan.group_size))
    divisors = [n for n in range(1, plan.group_size + 1) if plan.group_size % n == 0]
    fitting = [n for n in divisors if _smallest(plan) <= n <= most]
    return max(fitting) if fitting else min(n for n in divisors if n >= most)


def _smallest(plan: Plan) -> int:
    """Samples of a fragment, so that one message can name all of a group."""
    return math.ceil(plan.group_size / MAX_FRAGMENTS_PER_GROUP)


def next_size(plan: Plan, full: int, samples: int, num_queues: int) -> int:
    """Smaller towards the end of a batch: half a fair share of what is left. Not where the next
    batch follows at once: there is no tail, and small fragments cost more per sample."""
    if plan.fragment_size is not None or (plan.max_staleness and plan.early_groups):
        return full
    share = math.ceil(samples / (2 * max(1, num_queues)))
    return max(_smallest(plan), full // MIN_PART, min(full, share))


def _next_work(plan: Plan, batch: BatchState, groups: range, size: int) -> Work | None:
    for index in groups:
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
    slot = fragment.slot_in(work.batch, work.group)
    held = AssignedFragment(slot, fragment.num_samples, now)
    state = state.with_group(work.batch, work.group, _with_issued(group, fragment, policy))
    state = state.with_worker(replace(worker, assigned=(*worker.assigned, held)))
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
