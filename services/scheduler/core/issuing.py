"""Gives a fragment to a device, once it is chosen which of them."""

from dataclasses import replace

from services.scheduler.core.draft import StateDraft
from services.scheduler.core.fluid.members import weights_to_fetch
from services.scheduler.core.state import AssignedFragment, WorkerState
from services.scheduler.core.unissued import NextFragment
from shared.messages.contracts import Fragment, GenerateFragment

WorkerChoice = tuple[WorkerState, NextFragment]


def issue(draft: StateDraft, worker: WorkerState, found: NextFragment) -> GenerateFragment:
    """Give a fragment to a device, in the draft."""
    group = draft.group(draft.begin(found.batch), found.group)
    policy = group.policy or draft.state.policy
    assert policy is not None
    given = (*found.fragment.given, (found.fragment.attempt, worker.address))
    fragment = replace(found.fragment, stage="issued", worker=worker.address, given=given)
    slot = fragment.slot_in(found.batch, found.group)
    held = AssignedFragment(slot, fragment.num_samples, draft.now)
    group = group.with_fragment(fragment)
    if group.policy is not policy:
        group = replace(group, policy=policy)
    draft.set_group(found.batch, found.group, group)
    draft.set_worker(replace(worker, assigned=(*worker.assigned, held)))
    if worker.lent_concurrency:
        draft.samples_left = max(0, draft.samples_left - fragment.num_samples)
    prompt, window_start = draft.origin(found.batch, found.group)
    return GenerateFragment(
        fragment=Fragment(
            batch=slot.batch,
            group=slot.group,
            first_sample=slot.first_sample,
            attempt=slot.attempt,
            num_samples=fragment.num_samples,
        ),
        policy=policy,
        prompt=prompt,
        window_start=window_start,
        worker=worker.address,
        weights=weights_to_fetch(draft.state, worker, policy),
    )
