"""Restores the commands to fluid devices from their stream: (plan, state, command) -> state.

The stream has everything of a batch in the order in which it happened. A piece that was given to
another member, or a sum that was restarted, shows that the earlier sum no longer counts.
"""

from dataclasses import replace

from services.scheduler.core.fluid import batch_std
from services.scheduler.core.fluid.cutting import cut_to, whole_group
from services.scheduler.core.fluid.fluid_state import (
    ATTEMPTS_PER_EPOCH,
    FluidState,
    GroupPieces,
    OrderedStep,
    PieceState,
    begin_round,
    next_attempt,
    next_update,
)
from services.scheduler.core.fragments import discard_group
from services.scheduler.core.inputs import RecoveryDone
from services.scheduler.core.state import Plan, State
from shared.messages.fluid import (
    BeginAgain,
    CommitVersion,
    ExchangeSums,
    FluidCommand,
    Piece,
    TakeStep,
    TrainPiece,
)


def restore(plan: Plan, state: State, command: FluidCommand, now: float) -> State:
    """Restore from a stored command that members were given it."""
    fluid = state.fluid
    if fluid is None or command.batch != fluid.batch:
        return state
    if command.attempt > fluid.attempt and not isinstance(command, CommitVersion):
        fluid = next_attempt(replace(fluid, has_losses=True), command.attempt)
    if isinstance(command, CommitVersion):
        fluid = replace(fluid, named=max(fluid.named, command.number + 1))
        if command.attempt == fluid.attempt and fluid.step is not None:
            fluid = replace(fluid, step=fluid.step.with_committer(command, now))
    elif isinstance(command, BeginAgain):
        fluid = replace(fluid, told_attempt=max(fluid.told_attempt, command.attempt))
    elif command.attempt == fluid.attempt:
        fluid = _at_update(plan, fluid, command)
        if command.update == fluid.update:
            fluid = _restored(plan, fluid, command, now)
    return replace(state, fluid=fluid)


def _at_update(
    plan: Plan, fluid: FluidState, command: TrainPiece | ExchangeSums | TakeStep
) -> FluidState:
    """Move to the update of a command: its receiver had taken the update before, with the bits that
    count."""
    step = fluid.step
    if command.update <= fluid.update or step is None:
        return fluid
    address = command.worker if isinstance(command, TrainPiece) else command.committer
    stepped = step.stepped.get(address)
    if stepped is None:
        return fluid
    return next_update(fluid, plan.part(fluid.update), stepped.checksum)


def finish(plan: Plan, state: State, event: RecoveryDone, _now: float) -> State:
    """Find what no member has, once all is read; and drop what was begun by a lost version."""
    fluid = state.fluid
    if fluid is None:
        return state
    if not (fluid.attempt or fluid.groups or fluid.exchange or fluid.step):
        fluid = replace(fluid, attempt=ATTEMPTS_PER_EPOCH * max(0, event.epoch - 1))
    state = batch_std.under_one_attempt(plan, state, fluid.batch)
    for index, group in list(fluid.groups.items()):
        sent_group = state.find_group(fluid.batch, index)
        if sent_group is not None and sent_group.sent and sent_group.attempt == group.attempt:
            fluid = _with_queues(fluid.with_group(index, _completed(plan, index, group)), index)
            continue
        for owner in sorted(fluid.owners(index)):
            fluid = fluid.invalidate_sum(owner)
        fluid = fluid.without_group(index)
        if (
            sent_group is not None and not sent_group.sent
        ):  # its message is lost, and names of pieces are taken
            sent_group = replace(sent_group, attempt=max(sent_group.attempt, group.attempt + 1))
            state = state.with_group(fluid.batch, index, sent_group)
    return drop_lost_version(replace(state, fluid=_with_sent_groups(plan, state, fluid)))


def _with_sent_groups(plan: Plan, state: State, fluid: FluidState) -> FluidState:
    """Add the groups that were sent and of which no member has a piece."""
    batch = state.find_batch(fluid.batch)
    for index, sent_group in enumerate(() if batch is None else batch.groups):
        if sent_group.sent and index not in fluid.groups:
            fluid = fluid.with_group(index, whole_group(plan, sent_group.attempt))
    return fluid


def again(state: State, before: State) -> State:
    """Train the batch under the next attempt after streams were lost: members may have sums, and
    may have stepped, of which nothing is stored any more."""
    fluid, old = state.fluid, before.fluid
    if fluid is None or old is None or old.batch != fluid.batch:
        return state
    fluid = replace(fluid, former=old.former, step=old.step, has_losses=True)
    restarted = next_attempt(fluid, old.attempt + 1)
    return replace(state, fluid=replace(restarted, named=old.named))


def drop_lost_version(state: State) -> State:
    """Discard groups of the next batch that another version has begun than the provisional one, or
    with one-step asynchrony the one that is committed."""
    fluid = state.fluid
    batch = None if fluid is None else state.find_batch(fluid.batch + 1)
    if fluid is None or batch is None:
        return state
    kept = (fluid.provisional, state.policy)
    if all(policy in kept for policy in batch.tally.policies):
        return state
    groups = tuple(
        group if group.policy in (None, *kept) else discard_group(group) for group in batch.groups
    )
    return state.with_batch(replace(batch, groups=groups))


def _restored(
    plan: Plan, fluid: FluidState, command: TrainPiece | ExchangeSums | TakeStep, now: float
) -> FluidState:
    match command:
        case TrainPiece():  # so the round before it has come to nothing
            return _given(plan, replace(fluid, exchange=None), command)
        case ExchangeSums():
            sums = {share.worker: share.sum_number for share in command.shares}
            for address, number in sums.items():
                fluid = _member_sum(fluid, address, number)
            exchange = begin_round(command, now)
            return replace(fluid, exchange=exchange, round=command.round + 1)
        case TakeStep():
            totals = {} if fluid.exchange is None else fluid.exchange.held
            holders = tuple(a for a, each in totals.items() if each.sum_id == command.sum_id)
            return replace(fluid, step=OrderedStep(command=command, since=now, holders=holders))


def _member_sum(fluid: FluidState, address: str, number: int) -> FluidState:
    """The member has begun another sum if its number is larger."""
    if number > fluid.sum_number(address):
        fluid = fluid.invalidate_sum(address)
        fluid = replace(fluid, sums={**fluid.sums, address: number})
    return fluid


def _given(plan: Plan, fluid: FluidState, command: TrainPiece) -> FluidState:
    piece, address = command.piece, command.worker
    group = fluid.groups.get(piece.group)
    if group is not None and group.attempt > piece.attempt:
        return fluid
    if group is not None and group.attempt < piece.attempt:
        for owner in sorted(fluid.owners(piece.group)):
            fluid = fluid.invalidate_sum(owner)
        fluid, group = fluid.without_group(piece.group), None
    fluid = _member_sum(fluid, address, command.sum_number)
    group = fluid.groups.get(piece.group) or whole_group(plan, piece.attempt)
    again = [each for each in group.pieces if _overlap(each.piece, piece)]
    for owner in sorted({each.worker for each in again if each.worker} - {address}):
        fluid = fluid.invalidate_sum(owner)
    group = fluid.groups.get(piece.group) or group
    pieces = [each for each in group.pieces if not _overlap(each.piece, piece)]
    group = replace(
        group,
        pieces=(*pieces, PieceState(piece=piece, worker=address)),
        num_cut=max(group.num_cut, cut_to(plan, piece)),
        next_number=max(group.next_number, piece.number + 1),
    )
    fluid = fluid.with_group(piece.group, group)
    return _with_queues(fluid, piece.group)


def _with_queues(fluid: FluidState, index: int) -> FluidState:
    """Pieces of a group have other places now."""
    queues = {
        address: tuple(key for key in queue if key[0] != index)
        for address, queue in fluid.queues.items()
    }
    for place, each in enumerate(fluid.groups[index].pieces):
        if each.worker is not None and not each.trained:
            queues[each.worker] = (*queues.get(each.worker, ()), (index, place))
    for address, queue in queues.items():
        if queue != fluid.queues.get(address):
            fluid = fluid.with_queue(address, queue)
    return fluid


def _overlap(one: Piece, other: Piece) -> bool:
    return _meet(one.samples, other.samples) and _meet(one.steps, other.steps)


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _completed(plan: Plan, index: int, group: GroupPieces) -> GroupPieces:
    """Replace the waiting pieces by pieces for the part that is cut and not assigned."""
    given = [each for each in group.pieces if each.worker is not None]
    if not given:  # it is cut anew, in deterministic mode into one piece
        return replace(group, pieces=(), num_cut=0)
    has = {
        (sample, step)
        for each in given
        for sample in each.piece.samples
        for step in each.piece.steps
    }
    merged, added = plan.merged_steps, list[PieceState]()

    def add(first: int, count: int, steps: range) -> None:
        piece = Piece(
            group=index, attempt=group.attempt, number=0, first_sample=first, num_samples=count,
            first_step=steps.start, num_steps=len(steps),
        )  # fmt: skip
        added.append(PieceState(piece=piece))

    if merged and (0, 0) not in has:
        add(0, group.num_samples, range(merged))
    for sample in range(group.num_cut):
        begin: int | None = None
        for step in range(merged, plan.trained_steps + 1):
            lacks = step < plan.trained_steps and (sample, step) not in has
            if lacks and begin is None:
                begin = step
            if not lacks and begin is not None:
                add(sample, 1, range(begin, step))
                begin = None
    return replace(group, pieces=(*given, *added))
