"""Checks that a result comes from a worker that was given the work; other results are ignored."""

from services.scheduler.core.state import State
from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentReleased,
    FragmentScored,
    FragmentSlot,
)


def is_foreign(state: State, event: object) -> bool:
    """Whether a result comes from a worker that was never given this attempt. One that was given it
    and lost its lease may have finished it all the same."""
    match event:
        case FragmentGenerated(fragment=slot, worker=worker):
            return not _was_given(state, slot, worker)
        case FragmentScored(fragment=slot, generated_by=worker):
            return not _was_given(state, slot, worker)
        case FragmentReleased(slot=slot, worker=worker):
            return not _was_given(state, slot, worker)
        case FragmentFailed(slot=slot, stage="rollout" | "delivery", worker=str(worker)):
            return not _was_given(state, slot, worker)
        case FragmentFailed(stage="rollout"):
            return True
        case _:
            return False


def _was_given(state: State, slot: FragmentSlot, worker: str) -> bool:
    """Whether a device was given a fragment; also if nothing is known of that attempt any more."""
    fragment = state.find_fragment(slot)
    return fragment is None or (slot.attempt, worker) in fragment.given
