"""Which rollout devices are asked for work: not one that stands still, gives everything back, or is
about to end.

A device may report once a second and never finish: then what it has is given to others beside it
when its deadline has passed. They get the very same slots, of which each takes one result, so the
first result counts, whoever is first. The device is asked again as soon as it finishes something
or says that it is idle.

A device gives a fragment back without having begun it where a newer version is out, which is right,
or where it believes so wrongly, which would go on for ever.
"""

from dataclasses import replace

from services.scheduler.core import facts
from services.scheduler.core.state import Plan, State, WorkerState
from shared.messages.contracts import FragmentReleased

TIMES_LEARNED = 10
"""A device may take this many times longer than it usually does."""
SHORTEST_S = 120.0
"""No deadline is earlier: a store may be slow, and a first call may compile."""
UNLEARNED_S = 1800.0
"""Of a device that has not finished anything yet."""
GAP_S = 5.0
"""Without a tick for so long the scheduler itself stood still, or the broker did."""
NOBODY_S = 60.0
"""With all devices giving everything back for so long, the run fails."""


def fragment_seconds(plan: Plan, state: State, worker: WorkerState, num_samples: int) -> float:
    """How long the device may take for a fragment of ``num_samples``."""
    if plan.slot_deadline is not None:
        return plan.slot_deadline
    known = state.costs.rollout.get(worker.address)
    if known is None or known.value is None:
        return UNLEARNED_S
    return max(SHORTEST_S, TIMES_LEARNED * num_samples * known.value)


def gradient_seconds(plan: Plan, state: State, worker: WorkerState) -> float:
    """How long the device may take for the gradient of a group."""
    if plan.slot_deadline is not None:
        return plan.slot_deadline
    known = state.costs.gradient.get(worker.address)
    if known is None or known.value is None:
        return UNLEARNED_S
    return max(SHORTEST_S, TIMES_LEARNED * known.value)


def time_passed(plan: Plan, state: State, now: float) -> State:
    """What is past its deadline is anybody's as well."""
    gap, state = now - state.ticked_at, replace(state, ticked_at=now)
    if gap > GAP_S:
        return _with_clocks_from(state, now)
    for worker in state.rollout:
        if _is_late(plan, state, worker, now):
            state = _given_to_others(plan, state, worker)
    return _failed_if_nobody_is_asked(state, now)


def _with_clocks_from(state: State, now: float) -> State:
    """Nobody's deadline counts the time in which nothing could be heard."""
    workers = {a: replace(worker, clock_from=now) for a, worker in state.workers.items()}
    return replace(state, workers=workers)


def _is_late(plan: Plan, state: State, worker: WorkerState, now: float) -> bool:
    """Whether the device is past the deadline of something that it is at."""
    at_work = worker.assigned[: worker.slots]
    if worker.gradient_task is None:
        return any(
            now - max(held.since, worker.clock_from)
            > fragment_seconds(plan, state, worker, held.num_samples)
            for held in at_work
        )
    # The fragment that it was at comes first, and waits for the gradient if it was not begun.
    before = [fragment_seconds(plan, state, worker, held.num_samples) for held in at_work]
    deadline = gradient_seconds(plan, state, worker) + max(before, default=0.0)
    return now - max(worker.gradient_task.since, worker.clock_from) > deadline


def _given_to_others(plan: Plan, state: State, worker: WorkerState) -> State:
    """The device keeps what it has, and so may others."""
    state = state.with_worker(replace(worker, not_asked="late"))
    for place, held in enumerate(worker.assigned):
        found = facts.find(state, held.slot)
        if found is not None and found.stage == "issued" and found.worker == worker.address:
            at_work = place < worker.slots
            state = facts.lost_fragment(plan, state, held.slot, found, counts=at_work)
    gradient_task = worker.gradient_task
    if gradient_task is None:
        return state
    group = facts.group_at(state, gradient_task.batch, gradient_task.group)
    if group is None or group.computed_by != worker.address or group.contribution is not None:
        return state
    return facts.computed_by_nobody(state, gradient_task.batch, gradient_task.group)


def finished_something(state: State, address: str) -> State:
    """The device works: what nobody else has taken meanwhile is its own again."""
    worker = state.workers.get(address)
    if worker is None or not (worker.num_returned or worker.not_asked):
        return state
    if worker.not_asked == "leaves":
        return state
    state = state.with_worker(replace(worker, not_asked=None, num_returned=0))
    for held in worker.assigned:
        found = facts.find(state, held.slot)
        if found is not None and found.stage == "pending":
            own = replace(found, stage="issued", worker=address)
            state = facts.with_fragment(state, held.slot, own)
    return state


def idles(state: State, address: str) -> State:
    """A device that is past its deadline says that it has nothing to do."""
    worker = state.workers.get(address)
    if worker is None or worker.not_asked != "late":
        return state
    for held in worker.assigned:
        state = facts.given_back_by(state, held.slot, address)
    return state.with_worker(replace(state.workers[address], not_asked=None, assigned=(),
                                     gradient_task=None))  # fmt: skip


def loads(state: State, address: str, now: float) -> State:
    """To load or to compile is no part of any deadline."""
    worker = state.workers.get(address)
    if worker is None or not (worker.assigned or worker.gradient_task):
        return state
    return state.with_worker(replace(worker, clock_from=now))


def gave_back(plan: Plan, state: State, event: FragmentReleased, now: float) -> State:
    """A rollout device does not do what it was given."""
    worker = state.workers.get(event.worker)
    if worker is None or worker.service != "rollout":
        return state
    if event.reason == "draining":
        return state.with_worker(replace(worker, not_asked="leaves"))
    found, group = (
        facts.find(state, event.slot),
        facts.group_at(state, event.slot.batch, event.slot.group),
    )
    is_current = group is not None and group.policy == state.policy
    if found is None or found.worker != worker.address or not is_current:
        return state  # it was right
    returned = replace(worker, num_returned=worker.num_returned + 1)
    if returned.num_returned >= plan.max_returns * worker.slots:
        returned = replace(returned, not_asked=worker.not_asked or "returns", clock_from=now)
    return state.with_worker(returned)


def forgiven(state: State) -> State:
    """A new version is out, or an operator resumes the run: who gave everything back is asked."""
    workers = {
        address: replace(
            worker,
            num_returned=0,
            not_asked=None if worker.not_asked == "returns" else worker.not_asked,
        )
        for address, worker in state.workers.items()
    }
    return replace(state, workers=workers)


def _failed_if_nobody_is_asked(state: State, now: float) -> State:
    if state.phase != "running" or state.rollout:
        return state
    refusing = [worker for worker in state.workers.values() if worker.not_asked == "returns"]
    if not refusing or min(now - worker.clock_from for worker in refusing) < NOBODY_S:
        return state
    names = ", ".join(sorted(worker.name for worker in refusing)[:3])
    assert state.policy is not None
    return facts.with_failure(
        state,
        f"{len(refusing)} rollout devices ({names}) give back whatever they are given: they say "
        f"that version {state.policy.version} is not the newest; start them again, then resume",
    )


def newly_not_asked(before: State, after: State, event: object) -> list[WorkerState]:
    """Devices that are asked no more since ``event``."""
    if not isinstance(event, FragmentReleased) and after.ticked_at == before.ticked_at:
        return []
    return [
        worker
        for address, worker in after.workers.items()
        if worker.not_asked and before.workers.get(address, worker).not_asked is None
    ]
