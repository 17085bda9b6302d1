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

from services.scheduler.core.again import is_given, lacks_scores
from services.scheduler.core.device_queues import sample_seconds, seconds_left
from services.scheduler.core.fragments import is_dropped
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
    return [state.workers[address] for address in state.workers.roles.can_train]


def may_be_shared(group: GroupState) -> bool:
    """Whether a rollout device may take the group; one that failed before is the trainer's."""
    return group.attempt == 0 and group.computed_by is None and group.contribution is None


def missing(plan: Plan, group: GroupState) -> int:
    """Samples without a score."""
    return plan.group_size - group.num_scored


def ready_groups(plan: Plan, state: State) -> Iterator[ReadyGroup]:
    """Groups that are whole, and that nobody was given to train.

    Groups that are dropped wait for all others of their update, but in deterministic mode: they
    take no time to train, and operators may mend what made them fail, and have them generated
    again. Without another one in the batch the run fails, and nothing of the batch has been trained
    when it goes on. While the run is paused, all groups with samples that could not be scored wait.
    """
    for batch in state.batches:
        samples = len(batch.groups) * plan.group_size
        if plan.schedule.mode not in ("pipelined", "fluid") and batch.tally.scored < samples:
            continue
        found = [
            ReadyGroup(batch, index, group)
            for index in sorted(batch.tally.maybe_whole)
            if not missing(plan, group := batch.groups[index])
            and (group.computed_by is None or group.contribution is not None)
            and not waits_for_a_mend(state, group)
        ]
        dropped = {r.index for r in found if lacks_scores(r.group) and is_dropped(plan, r.group)}
        if dropped and len(dropped) == len(found) and not _is_begun(batch):
            continue
        if plan.schedule.deterministic:  # the trainer takes them in their order
            yield from found
        else:
            yield from _dropped_last(plan, batch, found, dropped)


def _dropped_last(
    plan: Plan, batch: BatchState, found: list[ReadyGroup], dropped: set[int]
) -> Iterator[ReadyGroup]:
    """Yield groups that are not dropped, then those that are and whose update lacks no other."""
    whole = {each.index for each in found}
    yield from (each for each in found if each.index not in dropped)
    if not dropped:
        return
    size = plan.num_groups // plan.updates
    lacking = {
        index // size
        for index, group in enumerate(batch.groups)
        if index not in whole and not is_given(group)
    }
    yield from (r for r in found if r.index in dropped and r.index // size not in lacking)


def waits_for_a_mend(state: State, group: GroupState) -> bool:
    """Whether operators have paused the run, so that they may mend what made scoring fail."""
    return state.phase == "paused" and lacks_scores(group)


def _is_begun(batch: BatchState) -> bool:
    """Whether a group of the batch was given to somebody to train."""
    return batch.tally.sent[0] > 0 or any(g.computed_by is not None for g in batch.groups)


def _rounds_ahead(plan: Plan, state: State) -> int:
    slots = 1 if state.trainer is None else max(1, state.trainer.concurrency)
    return math.ceil(ROUNDS_AHEAD * slots / plan.group_size)


def _num_before_trainer(state: State, index: int) -> int:
    """Number of groups sent to the trainer that it has not trained yet, of one batch.

    Groups of the next batch wait for all of the current one, and must not get in its way.
    """
    batch, trainer = state.find_batch(index), state.trainer
    assert batch is not None
    return batch.tally.untrained_by_itself("" if trainer is None else trainer.address)


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
    waiting = [r for r in ready_groups(plan, state) if r.batch.index == current.index]
    if not devices or not waiting or not state.costs.train.seconds:
        return state, commands
    free = _by_speed(state, [worker for worker in devices if worker.gradient_task is None])
    for ready in waiting:
        if not may_be_shared(ready.group):
            continue
        place = _first_worth_it(plan, state, free, now)
        if place is None:
            break
        state = _send_to_device(plan, state, ready, free.pop(place)[1], commands, now)
    return state, commands


def gradient_seconds(state: State, worker: WorkerState) -> float:
    """Seconds for a whole group on this device; if unknown, on one of the trainer's devices."""
    known = state.costs.gradient_seconds(worker.address)
    if known is not None:
        return known
    trainer = state.trainer
    slots = trainer.concurrency if trainer is not None else 1
    return state.costs.train.seconds * max(1, slots)


def _by_speed(state: State, workers: list[WorkerState]) -> list[tuple[float, WorkerState]]:
    """The devices and their `gradient_seconds`, the fastest first."""
    known, others, found = state.costs.gradient, None, []
    for worker in workers:
        if worker.address in known:
            found.append((gradient_seconds(state, worker), worker))
        else:  # the same for all of them
            others = gradient_seconds(state, worker) if others is None else others
            found.append((others, worker))
    return sorted(found, key=lambda each: each[0])


def _first_worth_it(
    plan: Plan, state: State, free: list[tuple[float, WorkerState]], now: float
) -> int | None:
    """The place of the first of these devices that saves time if it takes a waiting group."""
    train = state.costs.train.seconds
    rest = (_num_left(state) - 1) * train
    num_devices, generation = len(state.workers.roles.places), None
    if not state.costs.gradient and _is_probing(state):
        return None
    for place, (seconds, worker) in enumerate(free):
        if seconds >= rest:
            return None  # and the others are slower
        if seconds_left(state, worker, now) + seconds + _waiting(state, worker) >= rest:
            continue
        generation = _generation(plan, state, now) if generation is None else generation
        if generation + seconds / num_devices < rest + state.costs.commit.seconds:  # over all
            return place
    return None


def _waiting(state: State, worker: WorkerState) -> float:
    """Delay to the current batch: its fragments that wait on this device, and training the last of
    their groups."""
    batch = state.batch
    assert batch is not None
    waiting = [h for h in worker.assigned[worker.concurrency :] if h.slot.batch == batch.index]
    samples = sum(held.num_samples for held in waiting)
    train = state.costs.train.seconds if waiting else 0.0
    return samples * sample_seconds(state, worker) + train


def _is_probing(state: State) -> bool:
    """Whether a device is measuring what gradients cost."""
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
    devices = state.training_devices
    for ready in list(ready_groups(plan, state)):
        owner = devices[ready.index % len(devices)] if devices else None
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
