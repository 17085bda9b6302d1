"""Predicts when each device is free, as far as its speed is known."""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from services.scheduler import limits
from services.scheduler.core.fluid.fluid_state import FluidState
from services.scheduler.core.fluid.links import VERSION_PARTS
from services.scheduler.core.state import State, WorkerState
from services.scheduler.core.unissued import fragment_sizes


class DeviceQueue(NamedTuple):
    """Queue of fragments of a device, with one or several places."""

    free: Sequence[float]
    """When each place is free, in seconds."""
    seconds: float
    """Seconds per sample of a whole group, generated or on the way up, whichever takes longer."""
    address: str
    after: float = 0.0
    """The other one of the two, by which a fragment is there later."""
    max_samples: float = math.inf
    """Samples of a fragment beyond which its generation takes no longer than its way up."""

    @property
    def free_at(self) -> float:
        """When the device can begin another fragment."""
        return self.free[0] if len(self.free) == 1 else min(self.free)


def forecast_queue(
    state: State,
    worker: WorkerState,
    now: float,
    seconds: float | None = None,
    whole: dict[int, float] | None = None,
) -> DeviceQueue:
    """Predicts when each place of a device is free.

    Args:
        seconds: per sample, if known.
        whole: cache of `Costs.whole_samples` by fragment size, which is extended: the function is
            called for thousands of devices at a time.
    """
    if seconds is None:
        seconds = sample_seconds(state, worker)
    whole = {} if whole is None else whole
    for assigned in worker.assigned:
        if assigned.num_samples not in whole:
            whole[assigned.num_samples] = state.costs.whole_samples(assigned.num_samples)
    if worker.concurrency == 1:
        return DeviceQueue((_free_at(worker, now, seconds, whole),), seconds, worker.address)
    needed = {samples: factor * seconds for samples, factor in whole.items()}
    places = worker.concurrency
    begun, waiting = worker.assigned[:places], worker.assigned[places:]
    left_of = [needed[assigned.num_samples] - (now - assigned.since) for assigned in begun]
    free = [now + left if left > 0 else now for left in left_of] + [now] * (places - len(begun))
    if waiting:
        heapq.heapify(free)
        for assigned in waiting:
            heapq.heapreplace(free, free[0] + needed[assigned.num_samples])
    return DeviceQueue(free, seconds, worker.address)


def _free_at(worker: WorkerState, now: float, seconds: float, whole: Mapping[int, float]) -> float:
    """When a device is free that has one place; ``whole``: as in `forecast_queue`."""
    free_at, is_first = now, True
    for assigned in worker.assigned:
        left = whole[assigned.num_samples] * seconds
        if is_first:
            left, is_first = left - (now - assigned.since), False
        free_at += left if left > 0 else 0.0
    return free_at


def sample_seconds(state: State, worker: WorkerState) -> float:
    """Seconds per sample of a whole group: as learned, else as the other devices take, else 1."""
    return state.costs.rollout_seconds(worker.address) or 1.0


def kept_busy(state: State, workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Return as many of these devices as their lines keep busy: one that sends for four times as
    long as it generates counts as a quarter."""
    kept, share = list[WorkerState](), 0.0
    for worker in workers:
        up = state.costs.sample_up_seconds(worker.address)
        share += min(1.0, sample_seconds(state, worker) / up) if up else 1.0
        if share >= 0.5:
            kept.append(worker)
            share -= 1.0
    return kept


def have_reported(state: State, now: float) -> bool:
    """Return whether all workers have had time to report after a restart of the scheduler."""
    return now >= state.recovered_at + limits.MAX_REPORT_DELAY_S


def weights_wait(state: State, worker: WorkerState, now: float) -> float:
    """Return the seconds until a device has the newest version; infinite if neither its line nor
    its work is known, although the lines of others are, and while others may still report after a
    restart of the scheduler."""
    policy, fluid, costs = state.policy, state.fluid, state.costs
    version, is_member = worker.version, worker.service == "member"
    if policy is None or state.batch is None:
        return 0.0
    if fluid is None:  # no member has reported yet, or there are none
        return (
            math.inf if is_member and policy.version > 0 and not have_reported(state, now) else 0.0
        )
    if is_member:
        held = fluid.holds.get(worker.address)
        version = -1 if held is None else held.version
    if version is None or version >= policy.version:
        return 0.0
    seconds = costs.version_seconds(worker.address, version_bytes(fluid, worker))
    if seconds is None:
        is_new = is_member or version < 0 or worker.address not in costs.rollout
        return math.inf if is_new and policy.version > 0 and (costs.up or costs.down) else 0.0
    if not have_reported(state, now):
        return math.inf
    begins = state.batch.opened_at if policy.version <= fluid.batch else now
    return max(begins + seconds - now, 0.0)


def _by_older_version(state: State, worker: WorkerState) -> WorkerState:
    """Return a device with what it was given before the newest version was published."""
    assert state.batch is not None
    opened_at = state.batch.opened_at
    return replace(worker, assigned=tuple(h for h in worker.assigned if h.since < opened_at))


def version_bytes(fluid: FluidState, worker: WorkerState) -> int:
    """Return the bytes of a version that a device fetches, a member with moments and average."""
    return fluid.sum_bytes * (VERSION_PARTS if worker.service == "member" else 1)


@dataclass(slots=True)
class DeviceQueues:
    """Holds the queues of all devices at one time.

    They are computed again only for a device that has been given something since.
    """

    now: float
    delay: "Callable[[WorkerState], float] | None" = None
    """Returns seconds for which a device has something else to do first; None: nothing."""
    _known: dict[str, tuple[WorkerState, DeviceQueue]] = field(default_factory=dict)
    _whole: dict[int, float] = field(default_factory=dict)
    """Samples of a fragment -> of a whole group that take as long."""
    _others: float | None = None
    """Seconds per sample of a device that has not finished anything yet."""

    def queue(self, state: State, worker: WorkerState) -> DeviceQueue:
        cached = self._known.get(worker.address)
        if cached is None or cached[0] is not worker:
            each = self.seconds(state, worker)
            up, most = self._way_up(state, worker, each)
            wait = weights_wait(state, worker, self.now)
            queue = forecast_queue(
                state, _by_older_version(state, worker) if wait else worker, self.now,
                max(each, up), self._whole,
            )  # fmt: skip
            queue = queue._replace(after=min(each, up), max_samples=most)
            if queue.after and worker.assigned and worker.assigned[0].since == worker.clock_from:
                begun = queue.after * state.costs.whole_samples(worker.assigned[0].num_samples)
                queue = queue._replace(free=[max(self.now, at - begun) for at in queue.free])
            if self.delay is not None and (delay := self.delay(worker)):
                queue = queue._replace(free=[at + delay for at in queue.free])
            if wait:
                queue = self._after_wait(state, worker, queue, self.now + wait)
            cached = self._known[worker.address] = worker, queue
        return cached[1]

    def _way_up(self, state: State, worker: WorkerState, each: float) -> tuple[float, float]:
        """Return a sample's seconds on the way up, as a share of a whole group's, and the smallest
        fragment of which that takes longer than to generate it: a larger one gains nothing."""
        costs = state.costs
        up = costs.sample_up_seconds(worker.address)
        for size in fragment_sizes(costs.group_size) if up > each else ():
            seconds = up * size / costs.whole_samples(size)
            if seconds >= each:
                return seconds, size
        return up, math.inf

    def _after_wait(
        self, state: State, worker: WorkerState, queue: DeviceQueue, begins: float
    ) -> DeviceQueue:
        """Add what a device has and begins only with the newest version."""
        free = [max(at, begins) for at in queue.free]
        for held in worker.assigned[len(_by_older_version(state, worker).assigned) :]:
            size = state.costs.whole_samples(held.num_samples)
            heapq.heapreplace(free, free[0] + size * queue.seconds)
        return queue._replace(free=free)

    def seconds(self, state: State, worker: WorkerState) -> float:
        """The same as `sample_seconds`, which looks at all other devices for each unknown one."""
        cost = state.costs.rollout.get(worker.address)
        if cost is not None:
            return cost.value or 1.0
        if self._others is None:
            self._others = sample_seconds(state, worker)
        return self._others

    def rate(self, state: State, workers: Sequence[WorkerState]) -> float:
        """Samples per second of these devices together."""
        costs, others = state.costs.rollout, list[WorkerState]()
        total = 0.0
        for worker in workers:  # spelt out, being looked at for every fragment that is issued
            cost = costs.get(worker.address)
            if cost is None:
                others.append(worker)
            else:
                total += worker.concurrency / (cost.value or 1.0)
        return total + sum(w.concurrency / self.seconds(state, w) for w in others)


class ListSchedule:
    """Places fragments by list scheduling: each goes where it would be finished first.

    The schedule is computed only as far as it is needed.
    """

    def __init__(
        self, queues: Sequence[DeviceQueue], sizes: Sequence[tuple[int, float]], samples: int
    ) -> None:
        """``sizes``: samples of each queue's fragments, and of a whole group that take as long."""
        self._queues = queues
        self._sizes = sizes
        self._left = samples
        self._ends = [
            (at + (queue.seconds + queue.after) * sizes[n][1], n)
            for n, queue in enumerate(queues)
            for at in queue.free
        ]
        heapq.heapify(self._ends)
        self._shares: dict[str, int] = {}

    def has(self, address: str) -> bool:
        """Whether a fragment goes to this device."""
        while self._left > 0 and not self._shares.get(address):
            end, place = self._ends[0]
            queue, (samples, whole) = self._queues[place], self._sizes[place]
            self._left -= samples
            self._shares[queue.address] = self._shares.get(queue.address, 0) + 1
            heapq.heapreplace(self._ends, (end + queue.seconds * whole, place))
        return self._shares.get(address, 0) > 0

    def take(self, address: str) -> None:
        """Record that the device was given one of its fragments; the others stay where they are."""
        assert self.has(address)
        self._shares[address] -= 1
