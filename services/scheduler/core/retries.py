"""Retries after an operator has removed the cause of a failure."""

from dataclasses import replace

from services.scheduler.core.fragments import discard_group_if_stale
from services.scheduler.core.state import FragmentState, GroupState, Plan, State
from shared.messages.contracts import GroupRequest


def forget_failures(state: State) -> State:
    """Let the work of all open batches have all its attempts again, as `reset_attempts` does."""
    for batch in state.batches:
        for index in range(len(batch.groups)):
            state = reset_attempts(state, batch.index, index)
    return state


def requested(_plan: Plan, state: State, request: GroupRequest, _now: float) -> State:
    """Give a group all its attempts again, if its batch is open and the group has not been sent to
    training. A paused run is paused again if the group fails again: the cause is still there."""
    state = reset_attempts(state, request.batch, request.group)
    if state.phase == "paused":
        state = replace(state, watched=state.watched | {(request.batch, request.group)})
    return state


def reset_attempts(state: State, batch: int, index: int) -> State:
    """Let the fragments of a group have all their attempts again. Fragments with unscored samples
    are generated again, unless the group has been sent to training."""
    group = state.find_group(batch, index)
    for fragment in () if group is None else group.fragments:
        slot = fragment.slot_in(batch, index)
        if state.find_fragment(slot) is None:  # the whole group was discarded meanwhile
            continue
        if group is not None and not group.sent and _lacks_scores(fragment):
            anew = FragmentState(
                first_sample=fragment.first_sample,
                num_samples=fragment.num_samples,
                attempt=fragment.attempt + 1,
            )
            state = discard_group_if_stale(state.with_fragment(slot, anew), slot)
        elif fragment.num_failures or fragment.num_losses:
            state = state.with_fragment(slot, replace(fragment, num_failures=0, num_losses=0))
    return state


def pause_where_asked(state: State) -> State:
    """Pause the run if operators want that at a failure, and an attempt at a fragment has failed
    that is not done since, or a group that may still be generated again has samples that could not
    be scored: any of an open batch, or one that they had generated again while the run was
    paused."""
    if state.phase != "running" or not (state.pause_at_failure or state.watched):
        return state
    failed = {
        (batch.index, index)
        for batch in state.batches
        for index, group in enumerate(batch.groups)
        if (lacks_scores(group) or any(map(_fails, group.fragments))) and not group.sent
    }
    if not (failed if state.pause_at_failure else failed & state.watched):
        return state
    return replace(state, phase="paused", pause_at_failure=False, watched=frozenset())


def unsettled_forgotten(state: State) -> State:
    """Let what has failed so far have all its attempts again, so that only what fails from now on
    pauses a run for which operators have asked that."""
    for batch in state.batches:
        for index, group in enumerate(batch.groups):
            for fragment in filter(_fails, group.fragments):
                anew = replace(fragment, num_failures=0)
                state = state.with_fragment(fragment.slot_in(batch.index, index), anew)
    return state


def lacks_scores(group: GroupState) -> bool:
    """Whether samples of the group could not be scored."""
    return any(map(_lacks_scores, group.fragments))


def _fails(fragment: FragmentState) -> bool:
    """Whether an attempt at the fragment has failed, and none is done since."""
    return fragment.num_failures > 0 and fragment.scored is None


def _lacks_scores(fragment: FragmentState) -> bool:
    return fragment.scored is not None and None in fragment.scored.rewards
