"""Applies events about the training of groups: (plan, state, event) -> state, no commands."""

from services.scheduler.core.fragments import fail_run, requeue_group
from services.scheduler.core.state import Plan, State
from shared.messages.contracts import (
    GroupFailed,
    RunFailed,
)


def group_failed(plan: Plan, state: State, event: GroupFailed, _now: float) -> State:
    """Send a whole group once more, under its next attempt."""
    group = state.find_group(event.batch, event.group)
    if group is None or not group.sent or group.attempt != event.attempt:
        return state
    state = state.change_group(event.batch, event.group, requeue_group)
    if event.attempt + 1 >= plan.max_attempts:
        where = f"batch {event.batch}, group {event.group}"
        return fail_run(state, f"{where} could not be sent to be trained: {event.reason}")
    return state


def run_failed(_plan: Plan, state: State, event: RunFailed, _now: float) -> State:
    """Fail the run if the current batch cannot be trained; earlier failures were resolved."""
    if state.batch is None or state.batch.index != event.batch:
        return state
    return fail_run(state, f"batch {event.batch}: {event.reason}")
