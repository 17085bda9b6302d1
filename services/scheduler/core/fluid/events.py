"""Applies events about pieces, sums and steps: (plan, state, event) -> state, no commands.

An event about another batch, attempt, round or sum changes nothing, so every one may arrive twice
or late.
"""

from dataclasses import dataclass, replace
from statistics import median_low

from services.scheduler import limits
from services.scheduler.core import participation
from services.scheduler.core.fluid import batch_std
from services.scheduler.core.fluid.cutting import rows_per_group
from services.scheduler.core.fluid.fluid_state import FluidState, next_attempt, num_rows
from services.scheduler.core.fluid.members import MEMBER, updates_replace_version, with_held
from services.scheduler.core.fragments import fail_run, group_failed
from services.scheduler.core.state import Plan, State
from shared.messages.contracts import GroupFailed, PolicyPublished
from shared.messages.fluid import (
    ExchangeMissed,
    FluidEvent,
    PieceReleased,
    PieceTrained,
    Stepped,
    SumHeld,
    WeightsStored,
)
from shared.messages.workers import Holds


@dataclass(frozen=True, slots=True)
class MemberReported:
    """A member has reported what it could step from."""

    address: str
    holds: Holds | None


@dataclass(frozen=True, slots=True)
class VersionLoaded:
    """A device that only generates has reported the newest version of which it has the weights, -1
    before the first."""

    address: str
    version: int


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """A worker has stored or read objects: seconds per byte, None without any."""

    address: str
    up: float | None
    down: float | None


def batch_opened(plan: Plan, state: State, event: PolicyPublished, _now: float) -> State:
    """Begin with the batch of a committed version: nothing of it is trained yet."""
    before, policy = state.fluid, event.policy
    if before is not None and before.batch >= policy.version:
        return state
    checksum = event.checksum
    if checksum is None and before is not None and before.step is not None:
        checksums = [
            each.checksum for each in before.step.stepped.values() if each.policy == policy
        ]
        checksum = checksums[0] if checksums else None
    holds = {} if before is None else before.holds
    sizes = [each.sum_bytes for each in holds.values() if each.sum_bytes]
    size = median_low(sizes or [0 if before is None else before.sum_bytes])
    opened = FluidState(batch=policy.version, checksum=checksum, holds=holds, sum_bytes=size)
    return participation.decide(plan, replace(state, fluid=opened))


def record(plan: Plan, state: State, event: FluidEvent, now: float) -> State:
    """Record what a member reports."""
    state = _learn(plan, state, event)
    fluid = state.fluid
    if fluid is None or event.batch != fluid.batch:
        return state
    if isinstance(event, Stepped):
        return replace(state, fluid=_stepped(state, fluid, event, now))
    if isinstance(event, WeightsStored):
        return replace(state, fluid=replace(fluid, stored=event))
    if (event.attempt, event.update) != (fluid.attempt, fluid.update):
        return state
    match event:
        case PieceTrained():
            return replace(state, fluid=_trained(fluid, event, now))
        case PieceReleased():
            return _released(plan, state, fluid, event, now)
        case SumHeld() | ExchangeMissed():
            return replace(state, fluid=_answered(fluid, event))
    return state


def member_reported(plan: Plan, state: State, event: MemberReported, now: float) -> State:
    """Record what a member holds; the same state if it is known, or was known before.

    A member that goes back to an earlier version reports first that it holds none. If that report
    is lost, the member is believed once it has reported the earlier version for a while. One that
    goes back to before an update does so for an attempt in which that is not taken yet.
    """
    fluid, holds = state.fluid, event.holds
    if fluid is None:
        return state
    known_holds = fluid.holds.get(event.address)
    if known_holds == holds:
        return state
    if known_holds is not None and holds is not None:
        is_older = holds.version < known_holds.version
        if is_older or (
            holds.version == known_holds.version
            and holds.update < min(known_holds.update, fluid.update)
        ):
            before, since = fluid.older.get(event.address, (None, now))
            if before != holds:
                older = {**fluid.older, event.address: (holds, now)}
                return replace(state, fluid=replace(fluid, older=older))
            if now - since < limits.MAX_REPORT_DELAY_S:
                return state
    state = replace(state, fluid=with_held(state, fluid, event.address, holds))
    if known_holds is None and holds is not None and holds.version == fluid.batch:
        state = participation.admit(plan, _version_came(state, event.address, now), event.address)
    return state


def version_loaded(_plan: Plan, state: State, event: VersionLoaded, now: float) -> State:
    """Record that a device that only generates has the weights of a version."""
    worker = state.workers.get(event.address)
    if worker is None or worker.version == event.version:
        return state
    if worker.version not in (None, -1) and state.fluid and event.version == state.fluid.batch:
        state = _version_came(state, event.address, now)
    return state.with_worker(replace(worker, version=event.version))


def _version_came(state: State, address: str, now: float) -> State:
    """Learn how long the open batch's version was on the way to a device."""
    batch, worker = state.batch, state.workers.get(address)
    if not batch or not batch.index or worker is None or worker.clock_from >= batch.opened_at:
        return state
    return replace(state, costs=state.costs.observe_version(address, now - batch.opened_at))


def link_measured(_plan: Plan, state: State, event: LinkMeasured, _now: float) -> State:
    """Learn the rates of a line."""
    worker = state.workers.get(event.address)
    sends = worker is None or not worker.declines
    costs = state.costs.observe_link(event.address, event.up, event.down, sends=sends)
    return replace(state, costs=costs)


def member_lost(state: State, address: str) -> State:
    """Record that a member's lease has ended: what only it had is given out again, unless others
    hold the total with it."""
    fluid = state.fluid
    if fluid is None:
        return state
    holds = {a: others for a, others in fluid.holds.items() if a != address}
    fluid = replace(fluid, gone=fluid.gone | {address}, holds=holds, has_losses=True)
    if fluid.is_settled:
        return replace(state, fluid=fluid)
    if fluid.exchange is not None and address in fluid.exchange.members:
        fluid = replace(fluid, exchange=None)
    return replace(state, fluid=fluid.invalidate_sum(address))


def group_changed(plan: Plan, state: State, batch: int, index: int) -> State:
    """Forget the pieces of a group that is trained at another attempt, and all sums with them.

    After an update, the version that would generate the group again may no longer exist. Then the
    batch begins again, from that.
    """
    fluid, group = state.fluid, state.find_group(batch, index)
    if fluid is None or batch != fluid.batch or index not in fluid.groups or group is None:
        return state
    if group.sent and group.attempt == fluid.groups[index].attempt:
        return state
    is_update_restart = plan.updates > 1 and _restarts_update(plan, state)
    if is_update_restart and (fluid.update or fluid.step is not None):
        fluid = next_attempt(fluid, fluid.attempt + 1)
    if batch_std.is_batch_std(plan):
        return batch_std.requeue_sent_groups(state, fluid)
    owners = sorted(fluid.owners(index))
    for owner in owners:
        fluid = fluid.invalidate_sum(owner)
    fluid = fluid.without_group(index)
    if owners or is_update_restart:
        fluid = replace(fluid, exchange=None)
    return replace(state, fluid=fluid)


def _restarts_update(plan: Plan, state: State) -> bool:
    """Whether a batch cannot continue without a group after an update: the weights that generate
    the group may be gone, and advantages over the batch's deviation use all its rewards."""
    return updates_replace_version(plan, state) or batch_std.is_batch_std(plan)


def is_in_a_step(plan: Plan, state: State, batch: int, group: int) -> bool:
    """Whether a group's gradient is in a total that a member holds, or in a step."""
    fluid = state.fluid
    if fluid is None or batch != fluid.batch:
        return False
    part = plan.part(fluid.update)
    return group < part.start or (fluid.is_settled and group < part.stop)


def member_joined(state: State, address: str) -> State:
    """Record that a member is heard, for the first time or again."""
    fluid = state.fluid
    if fluid is None or address not in fluid.gone:
        return state
    return replace(state, fluid=replace(fluid, gone=fluid.gone - {address}))


def _learn(plan: Plan, state: State, event: FluidEvent) -> State:
    """Learn how fast the member trains."""
    if not isinstance(event, PieceTrained) or not event.seconds:
        return state
    worker = state.workers.get(event.worker)
    if worker is None:
        return state
    costs = state.costs.observe_piece(
        event.worker, event.seconds, rows=num_rows(event.piece, plan.merged_steps, worker.ranks),
        group_rows=rows_per_group(plan, worker.ranks), pass_rows=event.pass_rows,
    )  # fmt: skip
    return replace(state, costs=costs)


def _find(fluid: FluidState, event: PieceTrained | PieceReleased) -> tuple[int, int] | None:
    """The piece that an event is about, if it is still what the member has."""
    if event.sum_number != fluid.sum_number(event.worker):
        return None
    group = fluid.groups.get(event.piece.group)
    if group is None or group.attempt != event.piece.attempt:
        return None
    for place, each in enumerate(group.pieces):
        if each.piece.number == event.piece.number and each.worker == event.worker:
            return None if each.trained else (event.piece.group, place)
    return None


def _trained(fluid: FluidState, event: PieceTrained, now: float) -> FluidState:
    key = _find(fluid, event)
    if key is None:
        return fluid
    piece = fluid.groups[key[0]].pieces[key[1]]
    fluid = fluid.with_piece(key, replace(piece, trained=True)).without_piece(key, event.worker)
    following = fluid.queues[event.worker][:1]  # begins now
    for index, place in following:
        begun = replace(fluid.groups[index].pieces[place], since=now)
        fluid = fluid.with_piece((index, place), begun)
    return fluid


def _released(
    plan: Plan, state: State, fluid: FluidState, event: PieceReleased, now: float
) -> State:
    key = _find(fluid, event)
    if key is None or fluid.is_settled:
        return state
    group = fluid.groups[key[0]]
    if event.reason == "faulty":
        waits = replace(group.pieces[key[1]], worker=None)
        fluid = fluid.with_piece(key, waits).without_piece(key, event.worker)
        return _count_fault(plan, replace(state, fluid=fluid), key[0], event, now)
    if event.reason == "failed":
        group = replace(group, num_failures=group.num_failures + 1)
        fluid = fluid.with_group(key[0], group)
    state = replace(state, fluid=fluid.invalidate_sum(event.worker))
    worker = state.workers.get(event.worker)
    if event.reason == "draining" and worker is not None and worker.service == MEMBER:
        return state.with_worker(replace(worker, excluded="leaves"))
    if group.num_failures >= plan.max_attempts:
        where = f"batch {event.batch}, group {event.piece.group}"
        return fail_run(state, f"{where} failed {group.num_failures} times where it was trained")
    return state


def _count_fault(plan: Plan, state: State, index: int, event: PieceReleased, now: float) -> State:
    """Send the whole group once more if members cannot read what they are to train of it."""
    fluid = state.fluid
    assert fluid is not None
    group = fluid.groups[index]
    group = replace(group, num_faults=group.num_faults + 1)
    state = replace(state, fluid=fluid.with_group(index, group))
    if group.num_faults < plan.max_attempts:
        return state
    failure = GroupFailed(
        batch=event.batch, group=index, attempt=group.attempt,
        reason="members cannot read its message, or a piece's",
    )  # fmt: skip
    return group_changed(plan, group_failed(plan, state, failure, now), event.batch, index)


def _answered(fluid: FluidState, event: SumHeld | ExchangeMissed) -> FluidState:
    exchange = fluid.exchange
    if exchange is None or exchange.command.round != event.round or fluid.step is not None:
        return fluid
    worker = event.worker
    if worker not in exchange.silent:
        return fluid
    silent = exchange.silent - {worker}
    if isinstance(event, SumHeld):
        exchange = replace(exchange, silent=silent, held={**exchange.held, worker: event})
    else:
        missed = {**exchange.missed, worker: event.missing}
        exchange = replace(exchange, silent=silent, missed=missed)
    return replace(fluid, exchange=exchange)


def _stepped(state: State, fluid: FluidState, event: Stepped, now: float) -> FluidState:
    """Record a step; one of an earlier attempt may be all that is left of the batch in the end."""
    makes_version = event.policy.version > fluid.batch
    if event.attempt < fluid.attempt:
        if not makes_version:
            return fluid
        return replace(fluid, former={**fluid.former, event.worker: event})
    step = fluid.step
    is_another = (event.attempt, event.update) != (fluid.attempt, fluid.update)
    if step is None or is_another or event.worker in step.stepped:
        return fluid
    step = step.with_stepped(event, now)
    if event.worker not in fluid.gone:
        holds = Holds(
            version=event.policy.version, checksum=event.checksum,
            update=0 if makes_version else event.update + 1, sum_bytes=0,
        )  # fmt: skip
        before = fluid.holds.get(event.worker, holds)
        kept = before.model_dump(include={"host", "site", "sum_bytes"})
        fluid = with_held(state, fluid, event.worker, holds.model_copy(update=kept))
    return replace(fluid, step=step)
