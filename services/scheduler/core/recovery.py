"""Restores the state from stored commands after a restart: (state, command) -> state.

Tasks are read before results, and results before the groups that were sent, so each finds what it
refers to. No commands are issued meanwhile.
"""

from dataclasses import replace
from itertools import accumulate

from services.scheduler.core import fragments
from services.scheduler.core.fluid.stream_recovery import again
from services.scheduler.core.state import FragmentState, GroupState, Plan, State
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment, Policy, TrainGroup

RECOVERED_STREAMS = (
    subjects.TASK, subjects.TRAJ, subjects.REW, subjects.TRAIN, subjects.FLUID, subjects.EVT,
)  # fmt: skip
"""Streams in the order in which they are read: commands, their results, other events."""


def restore_task(plan: Plan, state: State, task: GenerateFragment, _now: float) -> State:
    """Restore from a stored task that some device was given this fragment.

    Tasks do not show whether a device had begun them when it was lost, so losses are counted from
    0.
    """
    fragment = task.fragment
    state = fragments.with_early_batch(plan, state, fragment.batch)
    group = state.find_group(fragment.batch, fragment.group)
    if group is None or _older(task.policy, group.policy):
        return state
    if group.policy is not None and group.policy != task.policy:
        group = fragments.discard_group(group)
    same = [f for f in group.fragments if f.first_sample == fragment.first_sample]
    if same and same[0].attempt > fragment.attempt:
        return state
    again = bool(same) and same[0].attempt < fragment.attempt
    restored = FragmentState(
        first_sample=fragment.first_sample,
        num_samples=fragment.num_samples,
        attempt=fragment.attempt,
        stage="issued",
        worker=task.worker,
        num_failures=same[0].num_failures + again if same else 0,
        given=(*(same[0].given if same else ()), (fragment.attempt, task.worker)),
    )
    first_attempt = max(group.first_attempt, fragment.attempt)
    group = replace(group.with_fragment(restored), policy=task.policy, first_attempt=first_attempt)
    if not _are_cut_in_order(group.fragments):  # cut by two schedulers unaware of each other
        group = fragments.discard_group(group)
    return state.with_group(fragment.batch, fragment.group, group)


def restart_batches(state: State, before: State) -> State:
    """Add the open batches of ``before`` from their start to a state read after streams were lost.

    Every attempt is one that no device can be working on: a late result would take its slot.
    """
    if state.batch is None:
        return state
    batches_by_index = {
        batch.index: batch for batch in before.batches if batch.index >= state.batch.index
    }
    batches_by_index.setdefault(state.batch.index, state.batch)
    batches = tuple(
        replace(
            batches_by_index[index],
            groups=tuple(map(_restart_group, batches_by_index[index].groups)),
        )
        for index in sorted(batches_by_index)
    )
    state = replace(state, batches=batches[:2], draining=before.draining)
    return again(state, before)


def _restart_group(group: GroupState) -> GroupState:
    return replace(fragments.discard_group(group), attempt=group.attempt + 1)


def _are_cut_in_order(fragments: tuple[FragmentState, ...]) -> bool:
    ends = accumulate((f.num_samples for f in fragments), initial=0)
    return all(f.first_sample == end for f, end in zip(fragments, ends, strict=False))


def _older(policy: Policy, than: Policy | None) -> bool:
    return than is not None and policy.version < than.version


def restore_group(_plan: Plan, state: State, command: TrainGroup, _now: float) -> State:
    """Restore from a stored group that it was sent to be trained."""
    group = state.find_group(command.batch, command.group)
    if group is None or command.attempt < group.attempt:
        return state
    same = _names_fragments(command, group)
    attempt = command.attempt if same else command.attempt + 1
    group = replace(group, sent=same, attempt=attempt)
    return state.with_group(command.batch, command.group, group)


def _names_fragments(command: TrainGroup, group: GroupState) -> bool:
    """Whether the command is about exactly these fragments."""
    slots = [fragment.fragment.slot for fragment in command.fragments]
    now = [fragment.slot_in(command.batch, command.group) for fragment in group.fragments]
    return slots == now and command.policy == group.policy
