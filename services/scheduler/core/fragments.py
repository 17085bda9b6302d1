"""Applies events about fragments, groups and training: (plan, state, event) -> state, no commands.

An event about another batch, attempt or version changes nothing, so every event may arrive twice,
late, or after its subject was discarded.
"""

from dataclasses import replace

from services.scheduler.core.device_fragments import count_finished, unassign, unassign_everywhere
from services.scheduler.core.state import (
    FragmentState,
    GroupState,
    Plan,
    State,
    WorkerState,
    new_batch,
)
from services.scheduler.core.workers import Workers
from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    FragmentSlot,
    GroupFailed,
    Policy,
    RunFailed,
)


def batch_opened(plan: Plan, state: State, policy: Policy, now: float) -> State:
    """Open the batch of a committed version, or finish the run."""
    if state.policy is not None and policy.version <= state.policy.version:
        return state
    if policy.version >= plan.num_batches or state.goal_reached_by is not None:
        return replace(state, policy=policy, phase="finished", batches=())
    if state.policy is not None and not state.recovering:
        costs = state.costs.only_of(state.workers)
        costs = costs.observe("commit", max(0.0, now - state.trained_at))
        state = replace(state, costs=costs)
    batch = state.find_batch(policy.version) or new_batch(plan, policy.version, now)
    phase = "running" if state.phase == "waiting" else state.phase
    batches = (replace(batch, opened_at=now),)
    watched = frozenset(each for each in state.watched if each[0] >= policy.version)
    state = replace(
        state, policy=policy, batches=batches, phase=phase, trained_at=now, pause=0,
        watched=watched,
    )  # fmt: skip
    return drop_stale_groups(plan, state)


def drop_stale_groups(plan: Plan, state: State) -> State:
    """Discard groups of the current batch that would begin a fragment with an older version."""
    batch = state.batch
    if batch is None:
        return state
    groups = tuple(
        group if group.policy in (None, state.policy)
        or _goes_on(state, plan, batch.index, index, group)
        else discard_group(group)
        for index, group in enumerate(batch.groups)
    )  # fmt: skip
    return state.with_batch(replace(batch, groups=groups))


def _goes_on(state: State, plan: Plan, batch: int, index: int, group: GroupState) -> bool:
    """Whether a group continues with the version before: if it is in progress, or if members
    generate and keep the weights of that version until their next step."""
    if not plan.schedule.members_generate:
        return _is_under_way(state, plan, batch, index, group)
    assert group.policy is not None
    return plan.early_groups > 0 and group.policy.version == batch - 1


def _is_under_way(state: State, plan: Plan, batch: int, index: int, group: GroupState) -> bool:
    """Whether every fragment of the group has been begun."""
    if group.num_cut < plan.group_size:
        return False
    for fragment in group.fragments:
        if fragment.stage == "pending":
            return False
        if fragment.stage == "issued":
            worker = state.workers.get(fragment.worker or "")
            slot = fragment.slot_in(batch, index)
            # While recovering this is unknown: the device returns what it has not begun.
            waiting = () if worker is None else worker.assigned[worker.concurrency :]
            if slot in [assigned.slot for assigned in waiting]:
                return False
    return True


def discard_group(group: GroupState) -> GroupState:
    """Have the whole group generated again, since a group has one policy version."""
    attempts = [fragment.attempt + 1 for fragment in group.fragments]
    again = max([group.first_attempt, *attempts])
    return GroupState(first_attempt=again, attempt=group.attempt + group.sent)


def requeue_group(group: GroupState) -> GroupState:
    """Take the group back from its trainer, under its next attempt."""
    return replace(group, sent=False, attempt=group.attempt + group.sent)


def generated(plan: Plan, state: State, event: FragmentGenerated, now: float) -> State:
    slot = event.fragment.slot
    state = count_finished(learn_generation(state, event), slot, event.worker, now)
    fragment = state.find_fragment(slot)
    if fragment is None:
        return _pass_over(plan, unassign(state, slot, event.worker, now), slot)
    state = unassign_everywhere(state, slot, now, event.worker)
    if fragment.stage not in ("pending", "issued") or event.policy != _policy(state, slot):
        return state
    return state.with_fragment(
        slot, replace(fragment, stage="generated", worker=None, generated_at=now)
    )


def learn_generation(state: State, event: FragmentGenerated) -> State:
    """Learn the speed of the device, and the overhead of a fragment."""
    worker = state.workers.get(event.worker)
    if worker is None or event.seconds <= 0:
        return state
    costs = state.costs.observe_fragment(worker.address, event.fragment.num_samples, event.seconds)
    size = event.stored.trajectory.size + event.stored.media.size
    costs = costs.observe("sample_bytes", size / event.fragment.num_samples)
    each = event.seconds / costs.whole_samples(event.fragment.num_samples)
    return replace(state, costs=costs.observe_rollout(worker.address, each))


def scored(plan: Plan, state: State, event: FragmentScored, now: float) -> State:
    slot = event.fragment.slot
    fragment = state.find_fragment(slot)
    if fragment is None:
        return _pass_over(plan, state, slot)
    if fragment.stage == "scored":
        return state
    wanted = {name for name, _ in plan.advantages.weights}
    fits = len(event.rewards) == fragment.num_samples and wanted <= event.parts.keys()
    if event.policy != _policy(state, slot) or not fits:
        return retry(plan, state, slot, "reward: its scores do not match its task", now)
    if fragment.stage == "generated":
        costs = state.costs.observe("ready", max(0.0, now - fragment.generated_at))
        state = replace(state, costs=costs)
    state = state.with_fragment(slot, replace(fragment, stage="scored", worker=None, scored=event))
    return _fail_if_all_dropped(plan, state, event) if None in event.rewards else state


def _fail_if_all_dropped(plan: Plan, state: State, event: FragmentScored) -> State:
    """Fail the run if every group of the batch is dropped: its scorers are broken."""
    batch = state.find_batch(event.fragment.batch)
    assert batch is not None
    if not all(is_dropped(plan, group) for group in batch.groups):
        return state
    return fail_run(state, f"batch {batch.index}: too few of its samples could be scored")


def is_dropped(plan: Plan, group: GroupState) -> bool:
    """Whether the group is whole, and too few of its samples have a score to be trained on."""
    if group.num_scored < plan.group_size:
        return False
    scored = (fragment.scored for fragment in group.fragments if fragment.scored is not None)
    rewards = [reward for part in scored for reward in part.rewards]
    return plan.advantages.why_dropped(rewards) is not None


def retry(plan: Plan, state: State, slot: FragmentSlot, reason: str, now: float) -> State:
    """Give the fragment another attempt; too many failures fail the run."""
    fragment = state.find_fragment(slot)
    state = unassign_everywhere(state, slot, now, None if fragment is None else fragment.worker)
    if fragment is None:
        return state
    failures = fragment.num_failures + 1
    again = FragmentState(
        first_sample=fragment.first_sample,
        num_samples=fragment.num_samples,
        attempt=fragment.attempt + 1,
        num_failures=failures,
    )
    state = state.with_fragment(slot, again).change_group(slot.batch, slot.group, requeue_group)
    state = discard_group_if_stale(state, slot)
    if failures >= plan.max_attempts:
        return fail_run(
            state, f"{_describe(slot)} failed {failures} times, most recently at {reason}"
        )
    return state


def failed(plan: Plan, state: State, event: FragmentFailed, now: float) -> State:
    return retry(plan, state, event.slot, f"{event.stage}: {event.reason}", now)


def released(_plan: Plan, state: State, event: FragmentReleased, now: float) -> State:
    """Record that a device has returned a fragment without finishing it."""
    state = unassign(state, event.slot, event.worker, now)
    return give_back(state, event.slot, event.worker)


def give_back(state: State, slot: FragmentSlot, address: str) -> State:
    """Requeue a fragment under its next attempt, unless another device has it as well."""
    fragment = state.find_fragment(slot)
    if fragment is None or fragment.stage not in ("pending", "issued"):
        return state
    if fragment.stage == "issued" and fragment.worker != address:
        return state.with_fragment(slot, replace(fragment, slot_taken=True))
    return _requeue(state, slot, fragment)


def worker_lost(plan: Plan, state: State, address: str) -> State:
    """Remove a worker that is gone, and requeue what it had."""
    innocent = _not_begun(state, address)
    for batch in state.batches:
        for index, group in enumerate(batch.groups):
            for fragment in group.fragments:
                if fragment.stage == "issued" and fragment.worker == address:
                    slot = fragment.slot_in(batch.index, index)
                    counts = slot not in innocent
                    state = requeue_lost(plan, state, slot, fragment, counts=counts)
    left = {a: w for a, w in state.workers.items() if a != address}
    return replace(state, workers=Workers(left))


def _not_begun(state: State, address: str) -> list[FragmentSlot]:
    """Returns what waits in a worker's queue: it cannot be what killed the worker."""
    worker = state.workers.get(address)
    return (
        []
        if worker is None
        else [assigned.slot for assigned in worker.assigned[worker.concurrency :]]
    )


def requeue_lost(
    plan: Plan,
    state: State,
    slot: FragmentSlot,
    fragment: FragmentState,
    *,
    counts: bool = True,
    is_kept: bool = False,
) -> State:
    """Requeue a fragment in the same slot.

    Args:
        counts: it may be what killed its device.
        is_kept: the device lives, and may finish it after all.
    """
    losses = fragment.num_losses + counts
    again = replace(
        fragment,
        stage="pending",
        worker=None,
        num_losses=losses,
        attempt=fragment.attempt + fragment.slot_taken,
        slot_taken=False,
        is_shared=fragment.is_shared or is_kept,
    )
    state = discard_group_if_stale(state.with_fragment(slot, again), slot)
    if losses >= plan.max_losses:
        return fail_run(
            state, f"{_describe(slot)} was lost with {losses} workers, one after another"
        )
    return state


def fail_run(state: State, reason: str) -> State:
    return replace(state, phase="failed", failure=reason)


def give_back_all(state: State, worker: WorkerState) -> State:
    """Requeue all work of the worker; it was ordered to drop it."""
    for assigned in worker.assigned:
        fragment = state.find_fragment(assigned.slot)
        if (
            fragment is not None
            and fragment.stage == "issued"
            and fragment.worker == worker.address
        ):
            state = _requeue(state, assigned.slot, fragment)
    return state.with_worker(replace(worker, assigned=()))


def _requeue(state: State, slot: FragmentSlot, fragment: FragmentState) -> State:
    """Requeue under the next attempt: even its former device needs another task slot."""
    again = replace(
        fragment, stage="pending", worker=None, attempt=fragment.attempt + 1, slot_taken=False
    )
    return discard_group_if_stale(state.with_fragment(slot, again), slot)


def discard_group_if_stale(state: State, slot: FragmentSlot) -> State:
    """Discard the whole group if it would otherwise begin again with an older version."""
    group = state.find_group(slot.batch, slot.group)
    assert group is not None
    if group.policy is None or group.policy == state.policy_of(slot.batch):
        return state
    return state.with_group(slot.batch, slot.group, discard_group(group))


def _pass_over(plan: Plan, state: State, slot: FragmentSlot) -> State:
    """Begin the next attempt of the group if the scheduler has not assigned this fragment: the slot
    of its result is taken, so no device could report it.

    A device that has waited for a broker reports such a result, where the broker has lost all
    messages and the scheduler that knew of the task is dead. The result may be of the next batch.
    """
    state = with_early_batch(plan, state, slot.batch)
    group = state.find_group(slot.batch, slot.group)
    if group is None or slot.attempt != group.first_attempt:
        return state
    if any(each.first_sample == slot.first_sample for each in group.fragments):
        return state
    return state.with_group(
        slot.batch, slot.group, replace(group, first_attempt=group.first_attempt + 1)
    )


def with_early_batch(plan: Plan, state: State, index: int) -> State:
    """Add batch ``index`` if it is the one after the current batch and not there yet."""
    current = state.batch
    if current is None or index != current.index + 1 or len(state.batches) > 1:
        return state
    if index >= plan.num_batches:
        return state
    return replace(state, batches=(current, new_batch(plan, index, 0.0)))


def _policy(state: State, slot: FragmentSlot) -> Policy | None:
    group = state.find_group(slot.batch, slot.group)
    return None if group is None else group.policy


def _describe(slot: FragmentSlot) -> str:
    return f"batch {slot.batch}, group {slot.group}, sample {slot.first_sample}"


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
