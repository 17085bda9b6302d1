"""Assigns fragments to devices.

Fragments are issued group by group, so that groups complete early and members have work. While
there is plenty, any device with room takes the next one. Towards the end of a batch a fragment goes
where it is finished first (list scheduling by earliest completion): a slow device takes none that a
fast one would finish before it. Several members that are lent take fragments in order as well; one
alone takes them from the other end of the batch: it may have to wait for training, and the last
groups can best afford it.

With one-step asynchrony the next batch follows as soon as the current one has nothing to issue.
"""

import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from services.scheduler.core.device_queues import (
    DeviceQueues,
    ListSchedule,
    have_reported,
    weights_wait,
)
from services.scheduler.core.draft import StateDraft
from services.scheduler.core.fluid.members import weights_to_fetch
from services.scheduler.core.state import AssignedFragment, BatchState, Plan, State, WorkerState
from services.scheduler.core.unissued import (
    NextFragment,
    fragment_size,
    next_fragment,
    next_fragment_size,
    open_supply,
    unissued_samples,
)
from shared.messages.contracts import Fragment, GenerateFragment

MIN_WAIT_SAMPLES = 2.0
"""A device that fetches a version for longer than it generates this many samples takes fragments of
later groups: the first groups would wait for it."""
DEVICES_PER_EVENT = 64
"""Devices that are looked at per event, on average. The schedule of all devices, which the end of a
batch needs, is rebuilt after that many events. Until then a device that has finished a fragment
continues with its queue."""

WorkerChoice = tuple[WorkerState, NextFragment]
IssuedFragments = tuple[State, list[GenerateFragment]]


def assign(
    plan: Plan,
    state: State,
    now: float,
    able: frozenset[str] | None = None,
    delay: Callable[[WorkerState], float] | None = None,
) -> IssuedFragments:
    """Issue fragments while there are some and devices have room for them.

    Args:
        able: devices that may get some now; None: all. The other devices count when the earliest
            finish of a fragment is computed. delay: returns the seconds for which a device is
            busy with other work.
    """
    if state.batch is None:
        return state, []
    room = state.workers.with_room(plan.queue_depth)
    room = room if able is None else room & able
    if not room:
        return state, []
    supply = open_supply(plan, state)
    if supply is None:
        return state, []
    if state.pause and state.batch.count("issued") > state.pause:  # as many events will come
        return replace(state, pause=state.pause - 1), []
    draft = StateDraft(plan, state, now)
    assigner = PooledAssigner(draft, *supply, room, DeviceQueues(now, delay))
    tasks: list[GenerateFragment] = []
    while (choice := assigner.choose()) is not None:
        tasks.append(issue(draft, *choice))
    pause = assigner.num_scanned // DEVICES_PER_EVENT
    if not tasks and pause == state.pause:
        return state, tasks
    return replace(draft.to_state(assigner.first), pause=pause), tasks


@dataclass(slots=True)
class Round:
    """A run of choices for which batch, fragment size and the set of devices stay the same."""

    batch: int
    size: int
    """Samples per fragment."""
    with_lent: bool
    """Whether members that are lent take part."""
    candidates: list[tuple[float, int]]
    """Heap of the devices with free capacity: when each is free, and its place."""
    schedule: ListSchedule | None = None
    """None until it is needed."""


@dataclass(slots=True)
class PooledAssigner:
    """Gives the next fragment to the first device to be free that would not be the last to finish.

    A device takes part if list scheduling of everything left gives it a fragment. Issuing that
    fragment leaves the others where they were, so one schedule serves many choices; while so much
    is left that every device takes part, none is made at all.
    """

    _draft: StateDraft
    _batch: BatchState
    """The batch to issue from, as it was before."""
    _limit: int
    """How many of its groups may be begun."""
    _able: Collection[str]
    """Devices that have room and may get a fragment now."""
    _queues: DeviceQueues
    first: dict[int, int] = field(default_factory=dict)
    """Names, for a batch, a group before which none has anything to issue."""
    num_scanned: int = 0
    """Devices of which a schedule was made."""
    _addresses: list[str] = field(init=False)
    """Devices by their places; members that are lent come last."""
    _num_others: int = 0
    """Devices that are not lent."""
    _num_queues: int = 0
    """Fragments that those generate at the same time."""
    _num_lent_queues: int = 0
    _is_one_lent: bool = False
    _rates: dict[bool, float] = field(default_factory=dict)
    """Samples per second of all devices; False: without those that are lent."""
    _room: list[int] = field(init=False)
    """Places of the devices that had room when the round began."""
    _samples: int = 0
    """Samples left in the supply."""
    _end: int = 0
    """Lent members find nothing to issue from this group on."""
    _round: Round | None = None
    _last: tuple[int, int] | None = None
    """Place of the device that was chosen last, and the samples that it was given."""
    _sizes: dict[int, int] = field(default_factory=dict)
    """Samples of a fragment while there is plenty, by the number of queues."""

    def __post_init__(self) -> None:
        workers = self._draft.state.workers
        lent = [address for address in workers.roles.lendable if address in workers.roles.places]
        others = [address for address in workers.roles.places if address not in set(lent)]
        self._addresses, self._num_others = others + lent, len(others)
        self._is_one_lent = len(workers.roles.lendable) == 1
        self._num_lent_queues = sum(workers[address].concurrency for address in lent)
        self._num_queues = workers.roles.num_queues - self._num_lent_queues
        places = {address: place for place, address in enumerate(self._addresses)}
        self._room = sorted(places[each] for each in self._able)
        self._take_supply(self._batch, self._limit)

    def choose(self) -> WorkerChoice | None:
        self._account_for_last()
        if not self._samples and not self._next_supply():
            return None
        for_lent = self._next_for_lent()
        now = self._round_of(for_lent is not None)
        while now.candidates:
            _, place = heapq.heappop(now.candidates)
            worker = self._device(place)
            if self._takes_part(worker, now):
                is_lent = place >= self._num_others
                fragment = for_lent if is_lent else self._next_for_rollout(now, worker)
                if fragment is not None:
                    self._last = place, fragment.fragment.num_samples
                    return worker, fragment
        return None

    def _device(self, place: int) -> WorkerState:
        """Return the device at this place."""
        return self._draft.worker(self._addresses[place])

    def _has_room(self, place: int) -> bool:
        return self._device(place).has_room(self._draft.plan.queue_depth)

    def _free_at(self, place: int) -> float:
        return self._queues.queue(self._draft.state, self._device(place)).free_at

    def _account_for_last(self) -> None:
        """Record that the device chosen last has its fragment."""
        if self._last is None or self._round is None:
            return
        (place, samples), self._last, now = self._last, None, self._round
        self._samples -= samples
        if samples != now.size:
            self._round = None  # a device that took no part may do so now
            return
        if now.schedule is not None:
            now.schedule.take(self._device(place).address)
        if self._has_room(place):
            heapq.heappush(now.candidates, (self._free_at(place), place))

    def _take_supply(self, batch: BatchState, limit: int) -> None:
        self._batch, self._limit, self._round = batch, limit, None
        self._samples = unissued_samples(self._draft.plan, batch, limit)
        self.first[batch.index], self._end = batch.tally.first, len(batch.groups)

    def _next_supply(self) -> bool:
        """Continue with the next batch, if it may begin, once the whole current batch is issued."""
        following = open_supply(self._draft.plan, self._draft.state, after=self._batch.index)
        if following is None:
            return False
        self._take_supply(*following)
        return True

    def _round_of(self, with_lent: bool) -> Round:
        """The current round if it still holds, or a new one."""
        size = self._size(self._num_queues + self._num_lent_queues * with_lent)
        now = self._round
        wanted = self._batch.index, size, with_lent
        if now is None or (now.batch, now.size, now.with_lent) != wanted:
            self._room = [place for place in self._room if self._has_room(place)]
            number = self._num_taking_part(with_lent)
            candidates = [(self._free_at(place), place) for place in self._room if place < number]
            heapq.heapify(candidates)
            now = self._round = Round(*wanted, candidates)
        return now

    def _num_taking_part(self, with_lent: bool) -> int:
        return len(self._addresses) if with_lent else self._num_others

    def _size(self, num_queues: int) -> int:
        """Samples of the next fragment."""
        plan, state = self._draft.plan, self._draft.state
        full = self._sizes.get(num_queues)
        if full is None:
            full = self._sizes[num_queues] = fragment_size(plan, state, num_queues)
        return next_fragment_size(plan, state, full, self._samples, num_queues)

    def _takes_part(self, worker: WorkerState, now: Round) -> bool:
        """Whether ``worker`` would finish this fragment before the others finished everything."""
        state = self._draft.state
        samples, size = self._size_for(worker, now)
        queue = self._queues.queue(state, worker)
        if math.isinf(queue.free_at) and not have_reported(state, self._draft.now):
            return False  # others may have the version
        finish = queue.free_at + (queue.seconds + queue.after) * size
        rate = self._rate_of(now)
        left = 0.999 * (self._samples - samples) * size / samples
        if (finish - self._draft.now) * rate < left:
            return True  # even if the others had nothing else to do
        if now.schedule is None:
            self.num_scanned = self._num_taking_part(now.with_lent)
            devices = map(self._device, range(self.num_scanned))
            queues = [self._queues.queue(state, device) for device in devices]
            sizes = [self._size_for(self._device(n), now) for n in range(self.num_scanned)]
            now.schedule = ListSchedule(queues, sizes, self._samples)
        return now.schedule.has(worker.address)

    def _size_for(self, worker: WorkerState, now: Round) -> tuple[int, float]:
        """Samples of a device's fragment, and of a whole group that take as long."""
        costs = self._draft.state.costs
        samples = int(min(now.size, self._queues.queue(self._draft.state, worker).max_samples))
        return samples, costs.whole_samples(samples)

    def _rate_of(self, now: Round) -> float:
        """Samples per second of all that take part, however much they are working on."""
        rate = self._rates.get(now.with_lent)
        if rate is None:
            devices = [self._device(place) for place in range(self._num_taking_part(now.with_lent))]
            rate = self._rates[now.with_lent] = self._queues.rate(self._draft.state, devices)
        return rate

    def _next_for_rollout(
        self, now: Round, worker: WorkerState | None = None
    ) -> NextFragment | None:
        """Return the next fragment; for a device that has yet to fetch the version, of the groups
        that the others will be at by then."""
        first = self.first[self._batch.index]
        groups = range(first, min(self._limit, len(self._batch.groups)))
        later = 0 if worker is None else self._groups_until(now, worker)
        size = now.size if worker is None else self._size_for(worker, now)[0]
        if later:
            last = max(first, groups.stop - 1)
            fragment = self._find(range(min(first + later, last), groups.stop), size)
            return fragment or self._find(groups, size)
        fragment = self._find(groups, size)
        if fragment is not None:
            self.first[self._batch.index] = fragment.group
        return fragment

    def _groups_until(self, now: Round, worker: WorkerState) -> int:
        """Return how many groups the others generate until a device has the version."""
        wait = weights_wait(self._draft.state, worker, self._draft.now)
        if not wait or wait <= MIN_WAIT_SAMPLES * self._queues.seconds(self._draft.state, worker):
            return 0
        rate = self._rate_of(now)
        return int(min(wait * rate, self._samples) / self._draft.plan.group_size)

    def _next_for_lent(self) -> NextFragment | None:
        """Return the next fragment of lent members, from the end of the batch if one member is
        lent alone.

        They generate nothing of the next batch, since their weights change before that would be
        done, and no more than the samples that are left.
        """
        state, left = self._draft.state, self._draft.samples_left
        if not self._num_lent_queues or not left:
            return None
        if state.batch is None or self._batch.index != state.batch.index:
            return None
        size = self._size(self._num_queues + self._num_lent_queues)
        if self._is_one_lent:
            fragment = self._find(range(self._end - 1, -1, -1), size)
        else:
            fragment = self._next_for_rollout(Round(self._batch.index, size, True, []))
        if fragment is None:
            return None
        if self._is_one_lent:
            self._end = fragment.group + 1
        return None if fragment.fragment.num_samples > left else fragment

    def _find(self, groups: range, size: int) -> NextFragment | None:
        return next_fragment(self._draft.plan, self._batch, groups, size, self._draft.group)


def issue(draft: StateDraft, worker: WorkerState, next_fragment: NextFragment) -> GenerateFragment:
    """Give a fragment to a device, in the draft."""
    group = draft.group(draft.open_batch(next_fragment.batch), next_fragment.group)
    policy = group.policy or draft.state.policy
    assert policy is not None
    given = (*next_fragment.fragment.given, (next_fragment.fragment.attempt, worker.address))
    fragment = replace(next_fragment.fragment, stage="issued", worker=worker.address, given=given)
    slot = fragment.slot_in(next_fragment.batch, next_fragment.group)
    assigned = AssignedFragment(slot, fragment.num_samples, draft.now)
    group = group.with_fragment(fragment)
    if group.policy is not policy:
        group = replace(group, policy=policy)
    draft.set_group(next_fragment.batch, next_fragment.group, group)
    draft.set_worker(replace(worker, assigned=(*worker.assigned, assigned)))
    if worker.lent_concurrency:
        draft.samples_left = max(0, draft.samples_left - fragment.num_samples)
    prompt, window_start = draft.prompt_and_start(next_fragment.batch, next_fragment.group)
    return GenerateFragment(
        fragment=Fragment(
            batch=slot.batch,
            group=slot.group,
            first_sample=slot.first_sample,
            attempt=slot.attempt,
            num_samples=fragment.num_samples,
        ),
        policy=policy,
        prompt=prompt,
        window_start=window_start,
        worker=worker.address,
        weights=weights_to_fetch(draft.state, worker, policy),
    )
