"""What events say about the training of groups: (plan, state, event) -> state, no commands."""

from dataclasses import replace

from services.scheduler.core.fragments import fail_run, requeue_group
from services.scheduler.core.state import Plan, State
from shared.messages.contracts import (
    GroupFailed,
    GroupTrained,
    RunFailed,
)


def group_trained(_plan: Plan, state: State, event: GroupTrained, now: float) -> State:
    """Record who trained a group, whatever its attempt: a trainer takes each group once."""
    group = state.find_group(event.batch, event.group)
    if group is None or event.worker in group.trained_by:
        return state
    trained_by = (*group.trained_by, event.worker)
    state = state.with_group(event.batch, event.group, replace(group, trained_by=trained_by))
    costs = state.costs.observe("train", event.seconds) if event.seconds else state.costs
    is_current = state.batch is not None and state.batch.index == event.batch
    # A group of the next batch may be trained while this batch's record is being stored.
    return replace(state, costs=costs, trained_at=now if is_current else state.trained_at)


def group_failed(plan: Plan, state: State, event: GroupFailed, _now: float) -> State:
    """Send a whole group to the trainer once more, under its next attempt."""
    group = state.find_group(event.batch, event.group)
    if group is None or not group.sent or group.attempt != event.attempt:
        return state
    state = state.change_group(event.batch, event.group, requeue_group)
    if event.attempt + 1 >= plan.max_attempts:
        where = f"batch {event.batch}, group {event.group}"
        return fail_run(state, f"{where} could not be sent to the trainer: {event.reason}")
    return state


def run_failed(_plan: Plan, state: State, event: RunFailed, _now: float) -> State:
    """Fail the run if the current batch cannot be trained; earlier failures were resolved."""
    if state.batch is None or state.batch.index != event.batch:
        return state
    return fail_run(state, f"batch {event.batch}: {event.reason}")
