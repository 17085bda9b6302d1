"""Excludes devices from new work: those that hang, return everything, are about to end, or that an
operator drains.

A device may report once a second and never finish. When its deadline has passed, others are given
its fragments as well, in the same slots; a slot takes one result, so the first result counts. The
device is given work again as soon as it finishes something or reports that it is idle.

A drained device is still watched until it has finished its work. It stays drained under its name
across restarts, until an operator changes that.

A device returns a fragment that it has not begun if a newer version is out. A device with a wrong
belief would return fragments without end.
"""

from dataclasses import replace

from services.scheduler import limits
from services.scheduler.core import fragments
from services.scheduler.core.state import Plan, State, WorkerState
from services.scheduler.core.tag.estimates import Estimate
from services.scheduler.core.workers import GENERATES
from shared.limits import DEADLINE_FACTOR, FIRST_DEADLINE_S, MIN_DEADLINE_S
from shared.messages.contracts import FragmentReleased, WorkerRequest


def fragment_deadline(plan: Plan, state: State, worker: WorkerState, num_samples: int) -> float:
    """Seconds that the device may take for a fragment of ``num_samples``."""
    return _deadline(plan, state.costs.rollout.get(worker.address), num_samples)


def gradient_deadline(plan: Plan, state: State, worker: WorkerState) -> float:
    """Seconds that a fluid device may take for the gradient of a group."""
    return _deadline(plan, state.costs.gradient.get(worker.address), 1)


def _deadline(plan: Plan, estimate: Estimate | None, times: int) -> float:
    """Seconds that a device may take for this many times what was learned."""
    if plan.schedule.slot_deadline_s != "auto":
        return plan.schedule.slot_deadline_s
    if estimate is None or estimate.value is None:
        return FIRST_DEADLINE_S
    return max(MIN_DEADLINE_S, DEADLINE_FACTOR * times * estimate.value)


def exclude_late_devices(plan: Plan, state: State, _event: object, now: float) -> State:
    """Let others take what is past its deadline."""
    if state.recovering:
        return state
    gap, state = now - state.ticked_at, replace(state, ticked_at=now)
    if gap > limits.STALL_S:
        return _restart_clocks(state, now)
    drains = [state.workers[a] for a in sorted(state.workers) if _drains(state.workers[a])]
    declining = [each for each in state.workers.values() if each.no_fragments and each.assigned]
    for worker in [*state.rollout, *(drains if state.draining else ()), *declining]:
        if _is_late(plan, state, worker, now):
            state = _exclude_late(plan, state, worker)
    return _fail_if_all_return(state, now)


def _drains(worker: WorkerState) -> bool:
    return worker.drained and worker.service in GENERATES and worker.excluded is None


def set_drained(_plan: Plan, state: State, request: WorkerRequest, _now: float) -> State:
    """Give workers of a name nothing new, or work again; what they have, they finish."""
    name, drained = request.worker, request.action == "drain"
    changed = [
        replace(worker, drained=drained)
        for worker in state.workers.values()
        if worker.name == name and worker.drained != drained
    ]
    draining = state.draining | {name} if drained else state.draining - {name}
    if draining == state.draining and not changed:
        return state
    workers = state.workers.changed(changed) if changed else state.workers
    return replace(state, draining=draining, workers=workers)


def _restart_clocks(state: State, now: float) -> State:
    """Restart all deadlines after a time in which nothing could be heard."""
    workers = [replace(worker, clock_from=now) for worker in state.workers.values()]
    return replace(state, workers=state.workers.changed(workers))


def _is_late(plan: Plan, state: State, worker: WorkerState, now: float) -> bool:
    """Whether the device is past the deadline of its current work."""
    return any(
        now - max(assigned.since, worker.clock_from)
        > fragment_deadline(plan, state, worker, assigned.num_samples)
        for assigned in worker.assigned[: worker.concurrency]
    )


def _exclude_late(plan: Plan, state: State, worker: WorkerState) -> State:
    """Exclude the device; it keeps its work, which others may take as well."""
    state = state.with_worker(replace(worker, excluded="late"))
    for place, assigned in enumerate(worker.assigned):
        fragment = state.find_fragment(assigned.slot)
        if (
            fragment is not None
            and fragment.stage == "issued"
            and fragment.worker == worker.address
        ):
            at_work = place < worker.concurrency
            state = fragments.requeue_lost(
                plan, state, assigned.slot, fragment, counts=at_work, is_kept=True
            )
    return state


def readmit_working(state: State, address: str) -> State:
    """Give work again to a device that has finished something; it keeps what no other has taken."""
    worker = state.workers.get(address)
    if worker is None or not (worker.num_returned or worker.excluded):
        return state
    if worker.excluded == "leaves":
        return state
    state = state.with_worker(replace(worker, excluded=None, num_returned=0))
    for assigned in worker.assigned:
        fragment = state.find_fragment(assigned.slot)
        if fragment is not None and fragment.stage == "pending":
            own = replace(fragment, stage="issued", worker=address)
            state = state.with_fragment(assigned.slot, own)
    return state


def readmit_idle(state: State, address: str) -> State:
    """Give work again to a late device that reports that it is idle."""
    worker = state.workers.get(address)
    if worker is None or worker.excluded != "late":
        return state
    for assigned in worker.assigned:
        state = fragments.give_back(state, assigned.slot, address)
    return state.with_worker(replace(state.workers[address], excluded=None, assigned=()))


def extend_deadlines(plan: Plan, state: State, address: str, now: float) -> State:
    """Restart the deadlines of a device that is loading or compiling, until that has taken too
    long: it may hang there as well."""
    worker = state.workers.get(address)
    if worker is None or not worker.assigned:
        return state
    since, last = worker.loading
    since = now if now - last > limits.STALL_S else since
    clock_from = worker.clock_from if now - since > _loading_limit(plan) else now
    return state.with_worker(replace(worker, clock_from=clock_from, loading=(since, now)))


def _loading_limit(plan: Plan) -> float:
    deadline = plan.schedule.slot_deadline_s
    return FIRST_DEADLINE_S if deadline == "auto" else DEADLINE_FACTOR * deadline


def count_return(plan: Plan, state: State, event: FragmentReleased, now: float) -> State:
    """Count a fragment that a rollout device has returned; too many in a row exclude it."""
    worker = state.workers.get(event.worker)
    if worker is None or worker.service not in GENERATES:
        return state
    if event.reason == "draining":
        return state.with_worker(replace(worker, excluded="leaves"))
    fragment = state.find_fragment(event.slot)
    group = state.find_group(event.slot.batch, event.slot.group)
    is_current = group is not None and group.policy == state.policy
    if fragment is None or fragment.worker != worker.address or not is_current:
        return state  # rightly
    returned = replace(worker, num_returned=worker.num_returned + 1)
    if returned.num_returned >= plan.max_returns * worker.concurrency:
        returned = replace(returned, excluded=worker.excluded or "returns", clock_from=now)
    return state.with_worker(returned)


def readmit_returning(state: State) -> State:
    """Give work again to devices that returned everything: a version is out, or the run resumes."""
    workers = [
        replace(
            worker,
            num_returned=0,
            excluded=None if worker.excluded == "returns" else worker.excluded,
        )
        for worker in state.workers.values()
        if worker.num_returned or worker.excluded == "returns"
    ]
    return replace(state, workers=state.workers.changed(workers)) if workers else state


def _fail_if_all_return(state: State, now: float) -> State:
    if state.phase != "running" or state.rollout:
        return state
    refusing = [worker for worker in state.workers.values() if worker.excluded == "returns"]
    if not refusing or min(now - worker.clock_from for worker in refusing) < limits.ALL_RETURN_S:
        return state
    names = ", ".join(sorted(worker.name for worker in refusing)[:3])
    assert state.policy is not None
    return fragments.fail_run(
        state,
        f"{len(refusing)} rollout devices ({names}) return whatever they are given: they report "
        f"that version {state.policy.version} is not the newest; restart them, then resume",
    )


def newly_excluded(before: State, after: State, event: object) -> list[WorkerState]:
    """Devices that were excluded by ``event``."""
    if not isinstance(event, FragmentReleased) and after.ticked_at == before.ticked_at:
        return []
    if after.workers.roles is before.workers.roles:
        return []
    return [
        worker
        for address, worker in after.workers.items()
        if worker.excluded and before.workers.get(address, worker).excluded is None
    ]
