"""Decides which workers are members of a batch: alive, and with its version to the last bit."""

from dataclasses import replace

from services.scheduler import limits
from services.scheduler.core.fluid.fluid_state import FluidState, with_or_without
from services.scheduler.core.state import Plan, State, WorkerState
from shared.messages.records import ObjectRef, Policy
from shared.messages.workers import Holds

MEMBER = "member"
"""Name of a member's service in the state; to the others it is a trainer."""


def may_step(state: State, worker: WorkerState) -> bool:
    """Whether the worker can train pieces of the open batch and take its step."""
    fluid = state.fluid
    if fluid is None or worker.service != MEMBER or worker.excluded is not None:
        return False
    if worker.no_pieces or worker.address in fluid.out or worker.address in fluid.gone:
        return False
    holds = fluid.holds.get(worker.address)
    if holds is None or (holds.version, holds.update) != (fluid.batch, fluid.update):
        return False
    return fluid.checksum is None or holds.checksum == fluid.checksum


def member_addresses(state: State) -> frozenset[str]:
    """Addresses of the workers that could take the next step of the open batch. They are recomputed
    only when a worker joins, leaves or is excluded, or when the base of the step changes."""
    fluid, roles = state.fluid, state.workers.roles
    if fluid is None:
        return frozenset()
    members = _known_members(state, fluid)
    if members is None:
        addresses = (*roles.places, *roles.only_train)
        members = frozenset(a for a in addresses if may_step(state, state.workers[a]))
        _know_members(state, fluid, members)
    return members


def with_held(state: State, fluid: FluidState, address: str, new_holds: Holds | None) -> FluidState:
    """Record the holdings of one worker; the others are unchanged."""
    if new_holds is not None:
        holds = {**fluid.holds, address: new_holds}
    else:
        holds = {a: each for a, each in fluid.holds.items() if a != address}
    size = fluid.sum_bytes or (0 if new_holds is None else new_holds.sum_bytes)
    changed = replace(fluid, holds=holds, sum_bytes=size)
    members = _known_members(state, fluid)
    worker = state.workers.get(address)
    if members is not None and worker is not None and worker.takes_work:
        may = may_step(replace(state, fluid=changed), worker)
        _know_members(state, changed, with_or_without(members, address, may))
    return changed


def _known_members(state: State, fluid: FluidState) -> frozenset[str] | None:
    """Return the cached members, if their inputs are unchanged."""
    if fluid.known_members is None:
        return None
    basis, members = fluid.known_members
    same = (one is other for one, other in zip(basis, _basis(state, fluid), strict=True))
    return members if all(same) else None


def _know_members(state: State, fluid: FluidState, members: frozenset[str]) -> None:
    object.__setattr__(fluid, "known_members", (_basis(state, fluid), members))


def _basis(state: State, fluid: FluidState) -> tuple[object, ...]:
    """Inputs from which the members follow."""
    return (
        state.workers.roles, fluid.out, fluid.gone, fluid.holds, fluid.batch, fluid.update,
        fluid.checksum,
    )  # fmt: skip


def members(state: State) -> list[WorkerState]:
    """Workers that could take the step of the open batch, in a fixed order."""
    return [state.workers[address] for address in sorted(member_addresses(state))]


def updates_replace_version(plan: Plan, state: State) -> bool:
    """Whether an update that makes no version replaces the one that generates on some member:
    on-policy it does, and on shard groups, which hold no second set of weights."""
    ranks = (state.workers[address].ranks for address in member_addresses(state))
    return not plan.early_groups or any(each > 1 for each in ranks)


def may_begin_next(state: State, fluid: FluidState) -> frozenset[str]:
    """Return the devices that may generate by the provisional version: members that have made
    it with the committer's bits and, once its weights can be fetched, all that only generate."""
    addresses = frozenset() if fluid.step is None else fluid.step.agreed - fluid.gone
    return addresses if fluid.stored_weights is None else addresses | state.workers.roles.rollout


def weights_to_fetch(state: State, worker: WorkerState, policy: Policy) -> ObjectRef | None:
    """Return where a device finds the weights that it generates with, unless it has made them or a
    commit record names them."""
    fluid = state.fluid
    if fluid is None or worker.service == MEMBER or policy != fluid.provisional:
        return None
    return fluid.stored_weights


def are_together(fluid: FluidState, now: float) -> bool:
    """Whether the next batch may be given out: to all that hold the total, or, after a while, to
    those that have stepped. Given to the first ones, it would be theirs alone."""
    step = fluid.step
    if step is None or step.stepped_at is None:
        return False
    if now - step.stepped_at > limits.STEP_WAIT_S:
        return True
    return all(a in step.stepped or a in fluid.gone for a in step.holders)
