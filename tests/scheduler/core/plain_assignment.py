"""Assignment as it is defined: everything is looked at anew for each fragment. Slow, and short."""

import heapq
import math

from services.scheduler.core.assign import (
    Work,
    _has_room,
    _issue,
    _lent,
    _next_work,
    _num_samples,
    _supply,
    full_size,
    next_size,
)
from services.scheduler.core.device_queues import Lane, lanes_of
from services.scheduler.core.state import BatchState, Plan, State, WorkerState
from shared.messages.contracts import GenerateFragment


def assign(plan: Plan, state: State, now: float) -> tuple[State, list[GenerateFragment]]:
    tasks: list[GenerateFragment] = []
    while True:
        choice = _choose(plan, state, now)
        if choice is None:
            return state, tasks
        worker, work = choice
        state, task = _issue(plan, state, worker, work, now)
        tasks.append(task)


def _choose(plan: Plan, state: State, now: float) -> tuple[WorkerState, Work] | None:
    supply = _supply(plan, state)
    if supply is None:
        return None
    batch, limit = supply
    samples = _num_samples(plan, batch, limit)
    help_work = _help(plan, state, batch, samples)
    devices = [*state.rollout, *_lent(plan, state)] if help_work is not None else state.rollout
    lanes_by = {w.address: lanes_of(state, w, now) for w in devices}
    lanes = [lane for each in lanes_by.values() for lane in each]
    size = next_size(plan, full_size(plan, len(lanes)), samples, len(lanes))
    open_to = [w for w in devices if _has_room(plan, w)]
    for worker in sorted(open_to, key=lambda w: min(x.free_at for x in lanes_by[w.address])):
        if _takes_part(lanes, worker.address, size, samples):
            helps = worker.service == "trainer"
            groups = range(min(limit, len(batch.groups)))
            work = help_work if helps else _next_work(plan, batch, groups, size)
            if work is not None:
                return worker, work
    return None


def _help(plan: Plan, state: State, batch: BatchState, samples: int) -> Work | None:
    lent = _lent(plan, state)
    if not lent or batch is not state.batch:
        return None
    num_lanes = sum(worker.slots for worker in (*state.rollout, *lent))
    size = next_size(plan, full_size(plan, num_lanes), samples, num_lanes)
    work = _next_work(plan, batch, range(plan.num_groups - 1, -1, -1), size)
    return None if work is None or work.fragment.num_samples > state.tag.samples_left else work


def _takes_part(lanes: list[Lane], address: str, size: int, samples: int) -> bool:
    """Whether list scheduling of what is left gives ``address`` a fragment at all; first by flow:
    what the others can do until it would be done, as if samples were a fluid."""
    mine = [lane for lane in lanes if lane.address == address]
    others = [lane for lane in lanes if lane.address != address]
    finish = min(lane.free_at for lane in mine) + mine[0].seconds * size
    done = sum(max(0.0, finish - lane.free_at) / lane.seconds for lane in others)
    if not others or done <= samples - size:
        return True
    ends = [(lane.free_at + lane.seconds * size, index) for index, lane in enumerate(lanes)]
    heapq.heapify(ends)
    for _ in range(math.ceil(samples / size)):
        end, index = ends[0]
        if lanes[index].address == address:
            return True
        heapq.heapreplace(ends, (end + lanes[index].seconds * size, index))
    return False
