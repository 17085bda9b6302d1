"""Which fragments devices have, and how they are taken off them."""

from dataclasses import replace

from services.scheduler.core.state import AssignedFragment, FragmentState, State, WorkerState
from shared.messages.contracts import FragmentSlot


def unassign(state: State, slot: FragmentSlot, address: str, now: float) -> State:
    """Take the fragment off the device, which begins with its next one."""
    worker = state.workers.get(address)
    if worker is None:
        return state
    place = _find_place(worker, slot)
    if place is None:
        return state
    left = worker.assigned[:place] + worker.assigned[place + 1 :]
    begun = worker.concurrency - 1  # this one begins now; who says more may have begun it before
    if worker.declared <= 1 and 0 <= begun < len(left):
        next_one = AssignedFragment(left[begun].slot, left[begun].num_samples, now)
        left = (*left[:begun], next_one, *left[begun + 1 :])
    clock_from = now if worker.concurrency == 1 else worker.clock_from
    return state.with_worker(replace(worker, assigned=left, clock_from=clock_from))


def count_finished(state: State, slot: FragmentSlot, address: str, now: float) -> State:
    """Learn from a fragment that a device has finished how many it generates at a time."""
    worker = state.workers.get(address)
    if worker is None or worker.declared <= 1:
        return state
    place = _find_place(worker, slot)
    if place is None:
        return state
    return state.with_worker(worker.having_finished(worker.assigned[place], now))


def unassign_everywhere(state: State, slot: FragmentSlot, now: float, address: str | None) -> State:
    """Remove a fragment from all devices that have it; ``address``: a device that reports it.

    Once its result is stored, another device finds the slot taken and reports nothing.
    """
    fragment = state.find_fragment(slot)
    if fragment is not None and address is not None and _has_alone(state, fragment, slot, address):
        return unassign(state, slot, address, now)
    batch, group, first, attempt = slot.batch, slot.group, slot.first_sample, slot.attempt
    holders = [
        worker.address
        for worker in state.workers.values()
        for assigned in worker.assigned  # spelt out, being the hottest comparison
        if assigned.slot.group == group
        and assigned.slot.first_sample == first
        and (assigned.slot.batch, assigned.slot.attempt) == (batch, attempt)
    ]
    for address in holders:
        state = unassign(state, slot, address, now)
    return state


def _has_alone(state: State, fragment: FragmentState, slot: FragmentSlot, address: str) -> bool:
    """Whether this device has the fragment and no other can have it. It may have been scored before
    it is heard of that it was generated."""
    if fragment.is_shared or fragment.stage in ("pending", "issued"):
        return fragment.stage == "issued" and fragment.worker == address and not fragment.is_shared
    worker = state.workers.get(address)
    return worker is not None and _find_place(worker, slot) is not None


def _find_place(worker: WorkerState, slot: FragmentSlot) -> int | None:
    """Find a fragment of a device. Fields are compared one by one, which is much faster than
    comparing records."""
    batch, group, first, attempt = slot.batch, slot.group, slot.first_sample, slot.attempt
    for place, assigned in enumerate(worker.assigned):
        mine = assigned.slot
        if (
            mine.group == group
            and mine.first_sample == first
            and (mine.batch, mine.attempt) == (batch, attempt)
        ):
            return place
    return None


def issued_to(state: State, address: str) -> tuple[AssignedFragment, ...]:
    """Fragments that a worker was issued before the scheduler knew it."""
    return tuple(
        AssignedFragment(fragment.slot_in(batch.index, index), fragment.num_samples, 0.0)
        for batch in state.batches
        for index, group in enumerate(batch.groups)
        for fragment in group.fragments
        if fragment.stage == "issued" and fragment.worker == address
    )


def busy_addresses(state: State) -> set[str]:
    """Addresses of devices that have work, as far as is known."""
    addresses: set[str | None] = set()
    for batch in state.batches:
        for group in batch.groups:
            addresses.update(f.worker for f in group.fragments if f.stage == "issued")
    if state.fluid is not None:
        addresses |= state.fluid.busy
    return {address for address in addresses if address is not None}
