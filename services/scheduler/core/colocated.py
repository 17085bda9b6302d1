"""Assigns fragments where devices are colocated: each generates its share, and then trains it."""

import heapq

from services.scheduler.core.device_queues import DeviceQueues
from services.scheduler.core.draft import Draft
from services.scheduler.core.issuing import Choice, lent_trainer
from services.scheduler.core.state import BatchState, WorkerState
from services.scheduler.core.supply import NextFragment, fragments_left, full_size


class ColocatedAssigner:
    """Colocated: every device generates the groups that are its share."""

    def __init__(self, draft: Draft, batch: BatchState) -> None:
        state, plan = draft.state, draft.plan
        self.first: dict[int, int] = {}
        self.looked_at = 0
        self._draft = draft
        self._batch = batch
        self._queues = DeviceQueues(draft.now)
        devices = state.training_devices
        self._step = len(devices)
        self._places = {worker.address: place for place, worker in enumerate(devices)}
        self._begun = dict(self._places)
        """Index of the group that a device is at, by its address."""
        lent = lent_trainer(plan, state)
        able = [w for w in (*state.rollout, *([lent] if lent is not None else []))
                if w.address in self._places and w.has_room(plan.queue_depth)]  # fmt: skip
        self._order = [worker.address for worker in able]
        self._free = [(self._queues.free_at(state, w), n) for n, w in enumerate(able)]
        heapq.heapify(self._free)
        self._last: int | None = None
        """Place in the order of the device that was chosen last."""

    def choose(self) -> Choice | None:
        draft, last = self._draft, self._last
        if last is not None:
            worker = draft.worker(self._order[last])
            if worker.has_room(draft.plan.queue_depth):
                heapq.heappush(self._free, (self._queues.free_at(draft.state, worker), last))
        while self._free:
            _, number = heapq.heappop(self._free)
            worker = draft.worker(self._order[number])
            found = self._next_of(worker)
            if found is not None:
                self._last = number
                return worker, found
        return None

    def _next_of(self, worker: WorkerState) -> NextFragment | None:
        """The next fragment of the groups that are this device's share."""
        draft, plan, address = self._draft, self._draft.plan, worker.address
        size = plan.schedule.fixed_fragment or full_size(plan, worker.concurrency * self._step)
        if worker.concurrency == 1 and plan.schedule.fixed_fragment is None:
            size = plan.group_size
        for index in range(self._begun[address], len(self._batch.groups), self._step):
            self._begun[address] = index
            for fragment in fragments_left(plan, draft.group(self._batch, index), size):
                return NextFragment(self._batch.index, index, fragment)
        return None
