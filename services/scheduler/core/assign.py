"""Assigns fragments to devices.

Fragments are issued group by group, so that groups complete early and the trainer has work. While
there is plenty, any device with room takes the next one. Towards the end of a batch a fragment goes
where it is finished first (list scheduling by earliest completion): a slow device takes none that a
fast one would finish before it. The trainer's device, while it is lent, takes fragments from the
other end of the batch: they may have to wait for training, and the last groups can best afford it.

With one-step asynchrony the next batch follows as soon as the current one has nothing to issue.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.scheduler.core.device_queues import DeviceQueues, ListSchedule
from services.scheduler.core.state import (
    AssignedFragment,
    BatchState,
    Plan,
    State,
    WorkerState,
    new_batch,
)
from services.scheduler.core.supply import (
    NextFragment,
    fragments_left,
    full_size,
    next_fragment,
    next_size,
    open_supply,
    unissued_samples,
)
from shared.messages.contracts import Fragment, GenerateFragment

Choice = tuple[WorkerState, NextFragment]
Issued = tuple[State, list[GenerateFragment]]


def assign(plan: Plan, state: State, now: float) -> Issued:
    """Issue fragments while there are some and devices have room for them."""
    tasks: list[GenerateFragment] = []
    rollout = state.rollout
    if not any(_has_room(plan, worker) for worker in (*rollout, *_lent_trainer(plan, state))):
        return state, tasks
    assigner = (
        ColocatedAssigner(plan, now)
        if plan.schedule.mode == "colocated"
        else PooledAssigner(plan, state, rollout, now)
    )
    while True:
        choice = assigner.choose(state)
        if choice is None:
            return state, tasks
        state, task = _issue(plan, state, *choice, now)
        tasks.append(task)


class ColocatedAssigner:
    """Colocated: every device generates the groups that are its share."""

    def __init__(self, plan: Plan, now: float) -> None:
        self._plan = plan
        self._queues = DeviceQueues(now)

    def choose(self, state: State) -> Choice | None:
        batch, plan = state.batch, self._plan
        if batch is None:
            return None
        devices = state.training_devices
        places = {worker.address: place for place, worker in enumerate(devices)}
        able = [w for w in (*state.rollout, *_lent_trainer(plan, state)) if _has_room(plan, w)]
        for worker in sorted(able, key=lambda w: self._queues.free_at(state, w)):
            place, step = places.get(worker.address), len(devices)
            if place is None:
                continue
            size = plan.schedule.fixed_fragment or full_size(plan, worker.concurrency * step)
            if worker.concurrency == 1 and plan.schedule.fixed_fragment is None:
                size = plan.group_size
            for index in range(place, len(batch.groups), step):
                for fragment in fragments_left(plan, batch.groups[index], size):
                    return worker, NextFragment(batch.index, index, fragment)
        return None


@dataclass(slots=True)
class Round:
    """A run of choices for which batch, fragment size and the set of devices stay the same."""

    batch: int
    size: int
    """Samples per fragment."""
    with_trainer: bool
    """Whether the trainer's device takes part."""
    candidates: list[tuple[float, int]]
    """Heap of the devices that have room: when each is free, and its place."""
    schedule: ListSchedule | None = None
    """None until it is needed."""


class PooledAssigner:
    """Gives the next fragment to the first device to be free that would not be the last to finish.

    A device takes part if list scheduling of everything left gives it a fragment. Issuing that
    fragment leaves the others where they were, so one schedule serves many choices; while so much
    is left that every device takes part, none is made at all.
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
        """Places of the devices that had room when the round began."""
        self._supply: tuple[BatchState, int] | None = None
        self._samples = 0
        """Samples left in the supply."""
        self._first = 0
        """First group of the supply's batch that may have something to issue."""
        self._round: Round | None = None
        self._last: tuple[int, int] | None = None
        """Place of the device that was chosen last, and the samples that it was given."""

    def choose(self, state: State) -> Choice | None:
        self._account_for_last(state)
        if not self._samples and not self._next_supply(state):
            return None
        assert self._supply is not None
        batch, limit = self._supply
        batch = state.find_batch(batch.index) or batch
        for_trainer = self._next_for_trainer(state, batch)
        now = self._round_of(state, batch, for_trainer is not None)
        while now.candidates:
            _, place = heapq.heappop(now.candidates)
            worker = self._device(state, place)
            if self._takes_part(state, worker, now):
                with_trainer = place == len(self._addresses)
                found = (
                    for_trainer if with_trainer else self._next_for_rollout(batch, limit, now.size)
                )
                if found is not None:
                    self._last = place, found.fragment.num_samples
                    return worker, found
        return None

    def _device(self, state: State, place: int) -> WorkerState:
        """The device at this place; the trainer's comes last."""
        if place < len(self._addresses):
            return state.workers[self._addresses[place]]
        assert self._trainer is not None
        return state.workers[self._trainer]

    def _account_for_last(self, state: State) -> None:
        """Record that the device chosen last has its fragment."""
        if self._last is None or self._round is None:
            return
        (place, samples), self._last, now = self._last, None, self._round
        self._samples -= samples
        if samples != now.size:
            self._round = None  # a device that took no part may do so now
            return
        worker = self._device(state, place)
        if now.schedule is not None:
            now.schedule.take(worker.address)
        if _has_room(self._plan, worker):
            heapq.heappush(now.candidates, (self._queues.free_at(state, worker), place))

    def _next_supply(self, state: State) -> bool:
        self._supply, self._first, self._round = open_supply(self._plan, state), 0, None
        if self._supply is None:
            return False
        self._samples = unissued_samples(self._plan, *self._supply)
        return True

    def _round_of(self, state: State, batch: BatchState, with_trainer: bool) -> Round:
        """The current round if it still holds, or a new one."""
        plan = self._plan
        num_queues = self._num_queues
        if with_trainer:
            num_queues += self._device(state, len(self._addresses)).concurrency
        size = next_size(plan, full_size(plan, num_queues), self._samples, num_queues)
        now = self._round
        wanted = batch.index, size, with_trainer
        if now is None or (now.batch, now.size, now.with_trainer) != wanted:
            self._room = [n for n in self._room if _has_room(plan, self._device(state, n))]
            trainers = [len(self._addresses)] * with_trainer
            places = [
                *self._room,
                *(n for n in trainers if _has_room(plan, self._device(state, n))),
            ]
            candidates = [(self._queues.free_at(state, self._device(state, n)), n) for n in places]
            heapq.heapify(candidates)
            now = self._round = Round(batch.index, size, with_trainer, candidates)
        return now

    def _takes_part(self, state: State, worker: WorkerState, now: Round) -> bool:
        """Whether ``worker`` would finish this fragment before the others finished everything."""
        size = state.costs.whole_samples(now.size)
        seconds = self._queues.seconds(state, worker) * size
        finish = self._queues.free_at(state, worker) + seconds
        rate = self._rate_of(state, now)
        if (finish - self._now) * rate < 0.999 * (self._samples - now.size) * size / now.size:
            return True  # even if the others had nothing else to do
        if now.schedule is None:
            places = range(len(self._addresses) + now.with_trainer)
            devices = [self._device(state, place) for place in places]
            queues = [queue for device in devices for queue in self._queues.of(state, device)]
            now.schedule = ListSchedule(queues, size, math.ceil(self._samples / now.size))
        return now.schedule.has(worker.address)

    def _rate_of(self, state: State, now: Round) -> float:
        """Samples per second of all devices, however much they are working on."""
        if self._rate is None:
            self._rate = self._queues.rate(state, [state.workers[a] for a in self._addresses])
        if not now.with_trainer:
            return self._rate
        return self._rate + self._queues.rate(state, [self._device(state, len(self._addresses))])

    def _next_for_rollout(self, batch: BatchState, limit: int, size: int) -> NextFragment | None:
        groups = range(self._first, min(limit, len(batch.groups)))
        found = next_fragment(self._plan, batch, groups, size)
        if found is not None:
            self._first = found.group
        return found

    def _next_for_trainer(self, state: State, batch: BatchState) -> NextFragment | None:
        """What the lent trainer's device takes next, from the end of the batch; None if nothing.

        It takes nothing of the next batch, since its weights change before that would be done, and
        nothing beyond its share.
        """
        tag, plan = state.tag, self._plan
        if self._trainer is None or tag.mode != "generate" or not tag.samples_left:
            return None
        if state.batch is None or batch.index != state.batch.index:
            return None
        num_queues = self._num_queues + state.workers[self._trainer].concurrency
        size = next_size(plan, full_size(plan, num_queues), self._samples, num_queues)
        found = next_fragment(plan, batch, range(len(batch.groups) - 1, -1, -1), size)
        return None if found is None or found.fragment.num_samples > tag.samples_left else found


def _lent_trainer(plan: Plan, state: State) -> list[WorkerState]:
    trainer = state.trainer
    has_share = plan.schedule.mode == "colocated" or state.tag.samples_left > 0
    lent = state.tag.mode == "generate" and has_share
    return [trainer] if trainer is not None and trainer.concurrency and lent else []


def _has_room(plan: Plan, worker: WorkerState) -> bool:
    return len(worker.assigned) < plan.queue_depth * worker.concurrency


def _issue(
    plan: Plan, state: State, worker: WorkerState, found: NextFragment, now: float
) -> tuple[State, GenerateFragment]:
    batch = state.find_batch(found.batch)
    if batch is None:
        batch = new_batch(plan, found.batch, now)
        state = replace(state, batches=(*state.batches, batch))
    group = batch.groups[found.group]
    policy = group.policy or state.policy
    assert policy is not None
    fragment = replace(found.fragment, stage="issued", worker=worker.address)
    slot = fragment.slot_in(found.batch, found.group)
    held = AssignedFragment(slot, fragment.num_samples, now)
    group = replace(group.with_fragment(fragment), policy=policy)
    state = state.with_group(found.batch, found.group, group)
    state = state.with_worker(replace(worker, assigned=(*worker.assigned, held)))
    if worker.service == "trainer":
        left = state.tag.samples_left - fragment.num_samples
        state = replace(state, tag=replace(state.tag, samples_left=max(0, left)))
    return state, GenerateFragment(
        fragment=Fragment(**slot.model_dump(), num_samples=fragment.num_samples),
        policy=policy,
        prompt=plan.prompts.of_group(slot.batch, slot.group, plan.num_groups, state.saturated),
        window_start=plan.windows.start(plan.seed, slot.batch, slot.group),
        worker=worker.address,
    )
