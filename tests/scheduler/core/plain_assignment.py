"""Assignment by its definition: everything is looked at again for each fragment. Slow and short."""

import heapq
import math

from services.scheduler.core.assign import issue
from services.scheduler.core.device_queues import DeviceQueue, forecast_queue
from services.scheduler.core.draft import StateDraft
from services.scheduler.core.lending import lendable
from services.scheduler.core.state import BatchState, Plan, State, WorkerState
from services.scheduler.core.unissued import (
    NextFragment,
    fragment_size,
    next_fragment,
    next_fragment_size,
    open_supply,
    unissued_samples,
)
from shared.messages.contracts import GenerateFragment


def assign(plan: Plan, state: State, now: float) -> tuple[State, list[GenerateFragment]]:
    tasks: list[GenerateFragment] = []
    while True:
        choice = _choose(plan, state, now)
        if choice is None:
            return state, tasks
        worker, work = choice
        draft = StateDraft(plan, state, now)
        tasks.append(issue(draft, worker, work))
        state = draft.to_state({})


def _choose(plan: Plan, state: State, now: float) -> tuple[WorkerState, NextFragment] | None:
    supply = open_supply(plan, state)
    if supply is None:
        return None
    batch, limit = supply
    samples = unissued_samples(plan, batch, limit)
    help_work = _help(plan, state, batch, samples)
    lent = _lent(state) if help_work is not None else []
    devices = [*state.only_generate, *lent]
    queues_by = {w.address: forecast_queue(state, w, now) for w in devices}
    queues = [each._replace(free=(at,)) for each in queues_by.values() for at in each.free]
    size = _size(plan, state, samples, len(queues))
    open_to = [w for w in devices if w.has_room(plan.queue_depth)]
    for worker in sorted(open_to, key=lambda w: queues_by[w.address].free_at):
        if _takes_part(queues, worker.address, size, samples):
            helps = worker in lent
            groups = range(min(limit, len(batch.groups)))
            work = help_work if helps else _next(plan, batch, groups, size)
            if work is not None:
                return worker, work
    return None


def _lent(state: State) -> list[WorkerState]:
    return [each for each in lendable(state) if each.concurrency and not each.drained]


def _help(plan: Plan, state: State, batch: BatchState, samples: int) -> NextFragment | None:
    if not _lent(state) or not state.tag.samples_left or batch is not state.batch:
        return None
    num_queues = sum(worker.concurrency for worker in state.rollout)
    size = _size(plan, state, samples, num_queues)
    in_order = range(plan.num_groups)
    work = _next(plan, batch, in_order[::-1] if len(lendable(state)) == 1 else in_order, size)
    return None if work is None or work.fragment.num_samples > state.tag.samples_left else work


def _next(plan: Plan, batch: BatchState, groups: range, size: int) -> NextFragment | None:
    return next_fragment(plan, batch, groups, size, lambda batch, index: batch.groups[index])


def _size(plan: Plan, state: State, samples: int, num_queues: int) -> int:
    full = fragment_size(plan, state, num_queues)
    return next_fragment_size(plan, state, full, samples, num_queues)


def _takes_part(queues: list[DeviceQueue], address: str, size: int, samples: int) -> bool:
    """Whether list scheduling of what is left gives ``address`` a fragment at all; first by flow:
    what the others can do until it would be done, as if samples were a fluid."""
    mine = [queue for queue in queues if queue.address == address]
    others = [queue for queue in queues if queue.address != address]
    finish = min(queue.free_at for queue in mine) + mine[0].seconds * size
    done = sum(max(0.0, finish - queue.free_at) / queue.seconds for queue in others)
    if not others or done <= samples - size:
        return True
    ends = [(queue.free_at + queue.seconds * size, index) for index, queue in enumerate(queues)]
    heapq.heapify(ends)
    for _ in range(math.ceil(samples / size)):
        end, index = ends[0]
        if queues[index].address == address:
            return True
        heapq.heapreplace(ends, (end + queues[index].seconds * size, index))
    return False
