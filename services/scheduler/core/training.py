"""What events say about the training of groups: (plan, state, event) -> state, no commands."""

from dataclasses import replace

from services.scheduler.core.fragments import cancel_gradient, fail_run, requeue_group
from services.scheduler.core.state import AssignedFragment, GradientTask, Plan, State
from shared.messages.contracts import (
    GradientComputed,
    GradientReleased,
    GroupFailed,
    GroupTrained,
    RunFailed,
)


def group_trained(state: State, event: GroupTrained, now: float) -> State:
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


def group_failed(plan: Plan, state: State, event: GroupFailed) -> State:
    """Send a whole group to the trainer once more, under its next attempt."""
    group = state.find_group(event.batch, event.group)
    if group is None or not group.sent or group.attempt != event.attempt:
        return state
    state = state.change_group(event.batch, event.group, requeue_group)
    if event.attempt + 1 >= plan.max_attempts:
        where = f"batch {event.batch}, group {event.group}"
        return fail_run(state, f"{where} could not be sent to the trainer: {event.reason}")
    return state


def gradient_computed(state: State, event: GradientComputed, now: float) -> State:
    """A rollout device has stored the gradient of a group."""
    address = event.contribution.worker
    state = _end_gradient_task(state, address, event.batch, event.group, now)
    if event.seconds and address in state.workers:
        costs = state.costs.observe_gradient(address, event.seconds)
        state = replace(state, costs=costs)
    group = state.find_group(event.batch, event.group)
    if group is None or group.sent or group.contribution is not None:
        return state
    batch_policy = state.policy if state.batch and state.batch.index == event.batch else None
    if event.attempt != group.attempt or event.policy != batch_policy:
        return state
    group = replace(group, computed_by=address, contribution=event.contribution)
    return state.with_group(event.batch, event.group, group)


def gradient_released(state: State, event: GradientReleased, now: float) -> State:
    """A device has returned a group without its gradient."""
    state = _end_gradient_task(state, event.worker, event.batch, event.group, now)
    worker = state.workers.get(event.worker)
    if worker is not None and event.reason == "failed":
        state = state.with_worker(replace(worker, can_train=False))
    group = state.find_group(event.batch, event.group)
    if group is None or group.computed_by != event.worker or group.attempt != event.attempt:
        return state
    if group.contribution is not None:
        return state  # it was stored before the group was returned
    return cancel_gradient(state, event.batch, event.group)


def run_failed(state: State, event: RunFailed) -> State:
    """Fail the run if the current batch cannot be trained; earlier failures were resolved."""
    if state.batch is None or state.batch.index != event.batch:
        return state
    return fail_run(state, f"batch {event.batch}: {event.reason}")


def _end_gradient_task(state: State, address: str, batch: int, group: int, now: float) -> State:
    """End the device's gradient task: it begins with its next fragment."""
    worker = state.workers.get(address)
    if worker is None or worker.gradient_task is None:
        return state
    if (worker.gradient_task.batch, worker.gradient_task.group) != (batch, group):
        return state
    assigned = tuple(
        AssignedFragment(held.slot, held.num_samples, now) if place < worker.concurrency else held
        for place, held in enumerate(worker.assigned)
    )
    return state.with_worker(replace(worker, gradient_task=None, assigned=assigned))


def gradient_task_of(state: State, address: str) -> GradientTask | None:
    """The group that a worker was given before the scheduler knew it."""
    for batch in state.batches:
        for index, group in enumerate(batch.groups):
            if group.computed_by == address and group.contribution is None:
                return GradientTask(batch.index, index, group.attempt, 0.0)
    return None
