"""Decides who computes the gradient of a whole group: the trainer, or a rollout device.

This is the mirror image of TAG. While the trainer is behind, whole groups wait here rather than at
the trainer, so that a rollout device that can train may take one: if it would finish before the
trainer has trained all the rest, and if generation is far enough ahead to do without the device.
Its gradient is stored, and the trainer is sent the group with it. Both rules compare the same two
times, so sharing stops by itself where generation would become the bottleneck.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.scheduler.core.device_queues import sample_seconds, seconds_left
from services.scheduler.core.state import (
    BatchState,
    GradientTask,
    GroupState,
    Plan,
    State,
    WorkerState,
)
from services.scheduler.core.supply import num_unissued
from shared.messages.contracts import ComputeGradient, TrainGroup

AHEAD, ROUNDS_AHEAD = 2, 2
"""Groups queued at the trainer while others could train them: those that it is fetching, and enough
to give each of its devices this many samples."""

Sent = tuple[State, list[TrainGroup | ComputeGradient]]


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A whole group that no device trains yet."""

    batch: BatchState
    index: int
    group: GroupState


def send_groups(plan: Plan, state: State, now: float) -> Sent:
    """Send every whole group to whoever is to train it; some may wait."""
    if plan.schedule.mode == "colocated":
        return _send_to_owners(plan, state, now)
    devices = gradient_devices(plan, state)
    commands: list[TrainGroup | ComputeGradient] = []
    ahead = AHEAD + _rounds_ahead(plan, state)
    for ready in list(ready_groups(plan, state)):
        has_room = not devices or _num_before_trainer(state, ready.batch.index) < ahead
        if has_room or ready.group.contribution is not None:
            state = _send_to_trainer(plan, state, ready, commands)
    return _share_waiting(plan, state, devices, commands, now)


def gradient_devices(plan: Plan, state: State) -> list[WorkerState]:
    """Rollout devices that may compute gradients."""
    if plan.schedule.mode == "sequential" or plan.schedule.deterministic:
        return []
    return [worker for worker in state.rollout if worker.can_train]


def may_be_shared(group: GroupState) -> bool:
    """Whether a rollout device may take the group; one that failed before is the trainer's."""
    return group.attempt == 0 and group.computed_by is None and group.contribution is None


def missing(plan: Plan, group: GroupState) -> int:
    """Samples without a score."""
    return plan.group_size - group.num_scored


def ready_groups(plan: Plan, state: State) -> Iterator[ReadyGroup]:
    """Groups that are whole, and that nobody was given to train."""
    for batch in state.batches:
        if plan.schedule.mode not in ("pipelined", "fluid") and any(
            missing(plan, group) for group in batch.groups
        ):
            continue
        for index, group in enumerate(batch.groups):
            is_whole = not group.sent and not missing(plan, group)
            if is_whole and (group.computed_by is None or group.contribution is not None):
                yield ReadyGroup(batch, index, group)


def _rounds_ahead(plan: Plan, state: State) -> int:
    slots = 1 if state.trainer is None else max(1, state.trainer.concurrency)
    return math.ceil(ROUNDS_AHEAD * slots / plan.group_size)


def _num_before_trainer(state: State, index: int) -> int:
    """Number of groups sent to the trainer that it has not trained yet, of one batch.

    Groups of the next batch wait for all of the current one, and must not get in its way.
    """
    batch, trainer = state.find_batch(index), state.trainer
    assert batch is not None
    address = "" if trainer is None else trainer.address
    return sum(
        group.sent and group.contribution is None and address not in group.trained_by
        for group in batch.groups
    )


def _share_waiting(
    plan: Plan,
    state: State,
    devices: list[WorkerState],
    commands: list[TrainGroup | ComputeGradient],
    now: float,
) -> Sent:
    """Give waiting groups to rollout devices where that saves time."""
    current, policy = state.batch, state.policy
    if current is None or policy is None or state.phase != "running":
        return state, commands
    free = [worker for worker in devices if worker.gradient_task is None]
    waiting = [r for r in ready_groups(plan, state) if r.batch.index == current.index]
    if not free or not waiting:
        return state, commands
    free.sort(key=lambda worker: gradient_seconds(state, worker))
    for ready in waiting:
        if not may_be_shared(ready.group):
            continue
        worker = next((w for w in free if _is_worth_it(plan, state, w, now)), None)
        if worker is None:
            break
        free.remove(worker)
        state = _send_to_device(plan, state, ready, worker, commands, now)
    return state, commands


def gradient_seconds(state: State, worker: WorkerState) -> float:
    """Seconds for a whole group on this device; if unknown, on one of the trainer's devices."""
    known = state.costs.gradient_seconds(worker.address)
    if known is not None:
        return known
    trainer = state.trainer
    slots = trainer.concurrency if trainer is not None else 1
    return state.costs.train.seconds * max(1, slots)


def _is_worth_it(plan: Plan, state: State, worker: WorkerState, now: float) -> bool:
    train = state.costs.train.seconds
    if not train or _is_probing(state, worker):
        return False
    left = _num_left(state)
    rest = (left - 1) * train
    seconds = gradient_seconds(state, worker)
    done = seconds_left(state, worker, now) + seconds + _waiting(state, worker)
    busy = _generation(plan, state, now) + seconds / len(state.rollout)  # spread over all
    return done < rest and busy < rest + state.costs.commit.seconds


def _waiting(state: State, worker: WorkerState) -> float:
    """Delay to the current batch: its fragments that wait on this device, and training the last of
    their groups."""
    batch = state.batch
    assert batch is not None
    waiting = [h for h in worker.assigned[worker.concurrency :] if h.slot.batch == batch.index]
    samples = sum(held.num_samples for held in waiting)
    train = state.costs.train.seconds if waiting else 0.0
    return samples * sample_seconds(state, worker) + train


def _is_probing(state: State, worker: WorkerState) -> bool:
    """Whether the cost of gradients is unknown, and another device is measuring it."""
    if state.costs.gradient_seconds(worker.address) is not None:
        return False
    return any(other.gradient_task is not None for other in state.rollout)


def _num_left(state: State) -> int:
    """Number of groups of the current batch left to the trainer, whole or not."""
    batch, trainer = state.batch, state.trainer
    assert batch is not None
    address = "" if trainer is None else trainer.address
    return sum(g.computed_by is None and address not in g.trained_by for g in batch.groups)


def _generation(plan: Plan, state: State, now: float) -> float:
    """Seconds until rollout devices would have nothing left to generate, or to compute."""
    begun = sum(seconds_left(state, worker, now, everything=True) for worker in state.rollout)
    rate = sum(worker.concurrency / sample_seconds(state, worker) for worker in state.rollout)
    return num_unissued(plan, state) / rate + begun / len(state.rollout)


def _send_to_trainer(
    plan: Plan, state: State, ready: ReadyGroup, commands: list[TrainGroup | ComputeGradient]
) -> State:
    commands.append(train_command(plan, ready))
    group = replace(ready.group, sent=True)
    return state.with_group(ready.batch.index, ready.index, group)


def _send_to_device(
    plan: Plan,
    state: State,
    ready: ReadyGroup,
    worker: WorkerState,
    commands: list[TrainGroup | ComputeGradient],
    now: float,
) -> State:
    policy, group = state.policy, ready.group
    assert policy is not None
    group_command = train_command(plan, ready)
    commands.append(ComputeGradient(group=group_command, policy=policy, worker=worker.address))
    state = state.with_group(
        ready.batch.index, ready.index, replace(group, computed_by=worker.address)
    )
    work = GradientTask(ready.batch.index, ready.index, group.attempt, now)
    return state.with_worker(replace(state.workers[worker.address], gradient_task=work))


def _send_to_owners(plan: Plan, state: State, now: float) -> Sent:
    """Colocated: have every device train the groups that are its share."""
    commands: list[TrainGroup | ComputeGradient] = []
    for ready in list(ready_groups(plan, state)):
        owner = state.owner_of(ready.index)
        is_trainers = owner is None or owner.service == "trainer"
        if is_trainers or ready.group.contribution is not None or not may_be_shared(ready.group):
            state = _send_to_trainer(plan, state, ready, commands)
        elif owner is not None and state.workers[owner.address].gradient_task is None:
            state = _send_to_device(plan, state, ready, owner, commands, now)
    return state, commands


def train_command(plan: Plan, ready: ReadyGroup) -> TrainGroup:
    """Return what whoever trains the group is told."""
    group = ready.group
    scored = tuple(fragment.scored for fragment in group.fragments if fragment.scored)
    assert group.policy is not None
    rewards = [reward for part in scored for reward in part.rewards]
    return TrainGroup(
        batch=ready.batch.index,
        group=ready.index,
        attempt=group.attempt,
        policy=group.policy,
        fragments=scored,
        advantages=plan.advantages.of(
            rewards,
            {name: [s for part in scored for s in part.parts[name]] for name in scored[0].parts},
        ),
        dropped=plan.advantages.why_dropped(rewards),
        contribution=group.contribution,
    )
