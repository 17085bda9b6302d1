"""Cuts whole groups into pieces and gives them to members that have nothing left to generate.

A piece takes half of a fair share of what is left of the batch's training, by the member's learned
speed, so pieces shrink towards the end of a batch, down to a part of the trained steps of one
sample. It goes to whoever is free first; at the end not to one that would finish it later than
another that is still at work.
"""

import heapq
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.fluid.members import may_step
from services.scheduler.core.fluid.state import FluidState, GroupPieces, PieceState
from services.scheduler.core.state import Plan, State, WorkerState
from shared.messages.fluid import MAX_PIECES, Piece, TrainPiece

AHEAD = 2
"""Fragments and pieces that a member has: one in work, and one waiting, so that it never waits for
a message."""
FINE_PARTS = 3
"""Parts into which the trained steps of a sample are divided at most."""
LEAST_ROWS = 3
"""Rows of a piece at least: a call of fewer (sample, step) takes nearly as long."""
UNLIKE = 1.1
"""Devices whose speeds differ by less are taken as equal."""

Issued = tuple[State, list[TrainPiece]]


@dataclass(frozen=True, slots=True)
class Member:
    """A member that could take a piece."""

    worker: WorkerState
    free_at: float
    group_seconds: float
    """Device time of a whole group; 1 if nobody has trained anything yet."""


def train_pieces(plan: Plan, state: State, now: float) -> Issued:
    """Give pieces out while some wait and members have room for them."""
    fluid, commands = state.fluid, list[TrainPiece]()
    if fluid is None or not fluid.ready or fluid.step is not None or state.policy is None:
        return state, commands
    members = {
        worker.address: _member(plan, state, fluid, worker, now)
        for worker in state.workers.values()
        if may_step(state, worker)
    }
    free = [
        (member.free_at, address)
        for address, member in members.items()
        if _num_ahead(fluid, member.worker) < AHEAD
    ]
    heapq.heapify(free)
    left = _groups_left(plan, fluid)
    rate = sum(1 / each.group_seconds for each in members.values())
    while free and fluid.ready:
        _, address = heapq.heappop(free)
        member = members[address]
        share = left / (2 * rate * member.group_seconds)
        if _another_is_sooner(plan, members.values(), member, share):
            continue
        fluid, key = _next_piece(plan, fluid, min(fluid.ready), share, len(members))
        fluid, command = _given(state, fluid, member, key, now)
        commands.append(command)
        part = part_of_group(plan, command.piece)
        left -= part
        member = replace(member, free_at=member.free_at + part * member.group_seconds)
        members[address] = member
        if _num_ahead(fluid, member.worker) < AHEAD:
            heapq.heappush(free, (member.free_at, address))
    return replace(state, fluid=fluid), commands


def whole_group(plan: Plan, attempt: int) -> GroupPieces:
    """A group that was just sent to be trained, of which nothing is cut yet."""
    return GroupPieces(attempt=attempt, num_samples=plan.trained_samples or plan.group_size)


def in_one_piece(plan: Plan, attempt: int) -> GroupPieces:
    """A group that one member takes whole."""
    group = whole_group(plan, attempt)
    piece = Piece(
        group=0, attempt=attempt, number=0, first_sample=0, num_samples=group.num_samples,
        first_step=0, num_steps=plan.trained_steps,
    )  # fmt: skip
    return replace(group, num_cut=group.num_samples, pieces=(PieceState(piece=piece),))


def part_of_group(plan: Plan, piece: Piece) -> float:
    """Return the share of a whole group's rows that a piece has."""
    samples, merged = plan.trained_samples or plan.group_size, plan.merged_steps
    rows = samples * (plan.trained_steps - merged) + merged
    own = [step for step in piece.steps if step >= merged]
    return (piece.num_samples * len(own) + piece.num_steps - len(own)) / rows


def cut_to(plan: Plan, piece: Piece) -> int:
    """Return how many of a group's first samples are cut once this piece is."""
    apart = piece.steps.stop > plan.merged_steps or plan.trained_steps == plan.merged_steps
    return piece.samples.stop if apart else 0


def _groups_left(plan: Plan, fluid: FluidState) -> float:
    """What no member has yet of the batch's training, in groups."""
    left = float(plan.num_groups - len(fluid.groups))
    for index in fluid.ready:
        group = fluid.groups[index]
        left += 1 - group.num_cut / group.num_samples
        left += sum(part_of_group(plan, each.piece) for each in group.pieces if each.worker is None)
    return left


def _member(plan: Plan, state: State, fluid: FluidState, worker: WorkerState, now: float) -> Member:
    seconds = state.costs.gradient_seconds(worker.address) or 1.0
    free_at = now
    for place, held in enumerate(worker.assigned):
        each = state.costs.whole_samples(held.num_samples) * sample_seconds(state, worker)
        free_at += max(0.0, each - (0.0 if place else now - held.since))
    for place, (index, at) in enumerate(fluid.queues.get(worker.address, ())):
        held_piece = fluid.groups[index].pieces[at]
        each = seconds * part_of_group(plan, held_piece.piece)
        begun = not place and not worker.assigned
        free_at += max(0.0, each - (now - held_piece.since if begun else 0.0))
    return Member(worker, free_at, seconds)


def _num_ahead(fluid: FluidState, worker: WorkerState) -> int:
    return len(worker.assigned) + len(fluid.queues.get(worker.address, ()))


def _another_is_sooner(
    plan: Plan, members: Collection[Member], member: Member, share: float
) -> bool:
    """Whether another member, busy as it is, would finish the last pieces before this one."""
    samples = plan.trained_samples or plan.group_size
    if share * samples >= 1:
        return False
    fastest = min(each.group_seconds for each in members)
    if member.group_seconds < UNLIKE * fastest:
        return False
    each = max(share, 1 / (samples * FINE_PARTS))
    end = member.free_at + each * member.group_seconds
    return any(m.free_at + each * m.group_seconds < end for m in members)


def _next_piece(
    plan: Plan, fluid: FluidState, index: int, share: float, num_members: int
) -> tuple[FluidState, tuple[int, int]]:
    """The place of the next piece of a group, which is cut if none waits."""
    group = fluid.groups[index]
    for place, each in enumerate(group.pieces):
        if each.worker is None:
            return fluid, (index, place)
    pieces = [PieceState(piece=piece) for piece in _cut(plan, group, index, share, num_members)]
    first, end = len(group.pieces), max(cut_to(plan, each.piece) for each in pieces)
    cut = replace(group, pieces=(*group.pieces, *pieces), num_cut=max(group.num_cut, end))
    return fluid.with_group(index, cut), (index, first)


def _cut(plan: Plan, group: GroupPieces, index: int, share: float, num_members: int) -> list[Piece]:
    """The next piece, or all parts of the next sample; at first what a group computes once."""

    def piece(first: int, count: int, steps: range) -> Piece:
        return Piece(
            group=index, attempt=group.attempt, number=0, first_sample=first, num_samples=count,
            first_step=steps.start, num_steps=len(steps),
        )  # fmt: skip

    left, merged = group.num_samples - group.num_cut, plan.merged_steps
    own = range(merged, plan.trained_steps)
    if plan.schedule.deterministic or (num_members == 1 and not group.pieces):
        return [piece(0, group.num_samples, range(plan.trained_steps))]
    if merged and not group.pieces:
        return [piece(0, group.num_samples, range(merged))]
    samples = share * group.num_samples
    least = _least_samples(plan)
    if samples >= 1 or least > 1:
        return [piece(group.num_cut, min(left, max(least, math.floor(samples))), own)]
    parts = min(
        FINE_PARTS,
        max(1, len(own) // LEAST_ROWS),
        math.ceil(1 / max(samples, 1e-9)),
        _most_parts(plan),
    )
    ends = [merged + len(own) * n // parts for n in range(parts + 1)]
    return [piece(group.num_cut, 1, range(begin, end)) for begin, end in itertools.pairwise(ends)]


def _least_samples(plan: Plan) -> int:
    """Samples of a piece at least; so that one message can name all of a batch, too."""
    samples = plan.trained_samples or plan.group_size
    own = max(1, plan.trained_steps - plan.merged_steps)
    nameable = math.ceil(plan.num_groups * samples / (MAX_PIECES // 2))
    return min(samples, max(nameable, math.ceil(LEAST_ROWS / own)))


def _most_parts(plan: Plan) -> int:
    samples = plan.trained_samples or plan.group_size
    return max(1, MAX_PIECES // 2 // (plan.num_groups * samples))


def _given(
    state: State, fluid: FluidState, member: Member, key: tuple[int, int], now: float
) -> tuple[FluidState, TrainPiece]:
    """Give a piece to a member, under a number that it has never had."""
    index, place = key
    address, group = member.worker.address, fluid.groups[index]
    waiting = group.pieces[place].piece
    piece = waiting.model_copy(update={"group": index, "number": group.next_number})
    given = PieceState(piece=piece, worker=address, since=now)
    pieces = (*group.pieces[:place], given, *group.pieces[place + 1 :])
    fluid = fluid.with_group(
        index, replace(group, pieces=pieces, next_number=group.next_number + 1)
    )
    queue = (*fluid.queues.get(address, ()), key)
    fluid = replace(fluid, queues={**fluid.queues, address: queue})
    assert state.policy is not None
    command = TrainPiece(
        batch=fluid.batch, attempt=fluid.attempt, worker=address, piece=piece,
        sum_number=fluid.sum_number(address), policy=state.policy,
    )  # fmt: skip
    return fluid, command
