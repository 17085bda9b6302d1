"""Gives pieces of groups to members that have nothing left to generate.

A piece takes half of a fair share of the batch's remaining training, by the member's learned speed.
Pieces therefore shrink towards the end of a batch, down to a part of the trained steps of one
sample if passes cost little (`ending`). One step ahead nothing waits for the end of a batch, and a
piece takes the whole fair share. It goes to the member that is free first. At the end a member that
is busy or slow is given a small piece only if it finishes that before all are done in any case.
"""

import heapq
import math
from dataclasses import replace
from functools import cached_property

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.fluid.cutting import (
    MIN_ROWS,
    PieceLimits,
    group_share,
    groups_left,
    next_piece,
    piece_sizes,
    rows_per_group,
    trained_samples,
)
from services.scheduler.core.fluid.ending import Member, best_ending
from services.scheduler.core.fluid.fluid_state import (
    WORK_PER_MEMBER,
    FluidState,
    PieceState,
    TrainingPace,
    num_rows,
)
from services.scheduler.core.fluid.members import member_addresses
from services.scheduler.core.fluid.modes import has_loans
from services.scheduler.core.state import AssignedFragment, Plan, State, WorkerState
from services.scheduler.core.workers import FewerThan, HoldsNext, Workers
from shared.messages.fluid import TrainPiece

SAME_SPEED_FACTOR = 1.1
"""Devices whose speeds differ by less are taken as equal."""
MEMBERS_PER_EVENT = 16
"""On average: what follows from all of more members holds for some events."""
MAX_SECOND_PIECE_OVERHEAD = 1 / 16
"""Overhead of a pass, as a share of its rows, below which two pieces cost little more than one; a
member that has time takes the second."""
MIN_ROWS_IN_OVERHEADS = 3
"""Overheads of a pass that the smallest piece has in rows where members are unlike: half of it
saves less at the end than the additional passes cost. Groups arrive late there, which no forecast
of pieces includes."""
MAX_LATE_SHARE = 0.1
"""Part of a piece by which a member may end later than forecast and still be given it."""

IssuedPieces = tuple[State, list[TrainPiece]]


def train_pieces(plan: Plan, state: State, now: float) -> IssuedPieces:
    """Give pieces out while some wait and members have room for them."""
    fluid, commands = state.fluid, list[TrainPiece]()
    if fluid is None or fluid.step is not None or state.policy is None:
        return state, commands
    if not trainable(plan, fluid):
        return state, commands
    left, (at_hand, least) = groups_left(plan, fluid), _at_hand_now(plan, fluid)
    members = AvailableMembers(plan, state, fluid, now, min(left, at_hand))
    if not members.has_room:
        return state, commands
    while (ready := trainable(plan, fluid)) and (address := members.take_first()) is not None:
        member = members.member(address)
        share = min(
            left / (2 * members.pace.rate * member.group_seconds),
            max(at_hand / len(members.addresses), least),
        )
        if members.others_are_sooner(member, share):
            continue
        fluid, key = next_piece(plan, fluid, min(ready), share, members.limits(member))
        fluid, command = _given(state, fluid, member, key, now)
        commands.append(command)
        part = group_share(plan, command.piece)
        left, at_hand = left - part, at_hand - part
        rows = num_rows(command.piece, plan.merged_steps, member.worker.ranks)
        member = replace(member, free_at=member.free_at + member.seconds(rows))
        members.put_back(member, fluid)
    return replace(state, fluid=replace(fluid, pace=members.pace)), commands


def _at_hand_now(plan: Plan, fluid: FluidState) -> tuple[float, float]:
    """Return how many groups are divided among all members now, and the part of a group that each
    gets at least: half of a pass. Where groups come while members wait for them, they divide those
    that are ready; else there is no such limit."""
    if not has_loans(plan):
        return math.inf, 0.0
    groups = (fluid.groups[index] for index in trainable(plan, fluid))
    own = max(1, plan.trained_steps - plan.merged_steps)
    samples = max(1.0, plan.group_size / 2 / own)
    return sum(1 - g.num_cut / g.num_samples for g in groups), samples / trained_samples(plan)


def trainable(plan: Plan, fluid: FluidState) -> frozenset[int]:
    """Groups of the update that is trained for of which something waits for a member."""
    if plan.updates == 1:
        return fluid.ready
    part = plan.part(fluid.update)
    return frozenset(index for index in fluid.ready if index in part)


class AvailableMembers:
    """Knows the members while pieces are given out: of many, it looks at all only now and then."""

    def __init__(
        self, plan: Plan, state: State, fluid: FluidState, now: float, left: float
    ) -> None:
        """``left``: groups that are divided among them now."""
        self._plan, self._state, self._fluid, self._now = plan, state, fluid, now
        self._left = left
        self.addresses = member_addresses(state)
        self._usual_seconds = state.costs.gradient_seconds("") or 1.0
        """Device time of a whole group on a member that was not measured yet."""
        self._known: dict[str, Member] = {}
        """Members by address, as of what they were given so far."""
        idle, self._others = _with_room(plan, state)
        self._idle = sorted(idle, reverse=True)
        self._free: list[tuple[float, str]] = []
        """Heap of the others: when each is free. It is made when no member idles."""

    @property
    def has_room(self) -> bool:
        return bool(self._idle or self._others)

    def take_first(self) -> str | None:
        """The member that is free first; None if no other has room."""
        if self._idle:
            return self._idle.pop()
        for address in self._others:
            if _num_ahead(self._fluid, self._state.workers[address]) < WORK_PER_MEMBER:
                heapq.heappush(self._free, (self.member(address).free_at, address))
        self._others = frozenset()
        return heapq.heappop(self._free)[1] if self._free else None

    def put_back(self, member: Member, fluid: FluidState) -> None:
        """Record what a member was given; ``fluid``: the state with it."""
        address = member.worker.address
        self._known[address] = member
        if _num_ahead(fluid, member.worker) < WORK_PER_MEMBER:
            heapq.heappush(self._free, (member.free_at, address))

    def member(self, address: str) -> Member:
        available = self._known.get(address)
        if available is None:
            available = self._known[address] = _member(
                self._plan, self._state, self._fluid, address, self._now, self._usual_seconds
            )
        return available

    def limits(self, member: Member) -> PieceLimits:
        """Limits on a member's next piece. One step ahead no member waits at the end, and all are
        to train as long: it takes its fair share of the batch in whole passes, in two pieces where
        the overhead of a pass is small, unless members wait for groups."""
        plan, ranks, least = self._plan, member.worker.ranks, self.pace.ending.min_rows
        if plan.early_groups and not has_loans(plan) and self._state.costs.passes.is_known:
            groups = plan.num_groups / plan.updates
            share = min(1.0, groups / self.pace.rate / member.group_seconds)
            halves = 1 + (member.overhead < MAX_SECOND_PIECE_OVERHEAD * member.pass_rows)
            rows = share / halves * rows_per_group(plan, ranks)
            least = max(least, rows - rows % member.pass_rows if rows > member.pass_rows else rows)
        return PieceLimits(
            len(self.addresses), min_rows=least * ranks, pass_rows=member.pass_rows * ranks,
            ranks=ranks,
        )  # fmt: skip

    def others_are_sooner(self, member: Member, share: float) -> bool:
        """Whether the update would end later with a small piece of a member that is busy or slow.

        Args:
            share: part of a group that the piece is meant to have.
        """
        rows = share * rows_per_group(self._plan, member.worker.ranks)
        least = self.limits(member).min_rows / member.worker.ranks
        is_slow = member.group_seconds >= SAME_SPEED_FACTOR * self.pace.fastest
        if rows > least or (member.free_at <= self._now and not is_slow):
            return False
        seconds, ending = member.seconds(max(rows, least)), self.pace.ending
        if is_slow:
            return member.free_at + seconds > ending.even
        return member.free_at + (1 - MAX_LATE_SHARE) * seconds > ending.at

    @cached_property
    def pace(self) -> TrainingPace:
        """How fast all members train, and when they are done; found some events ago if they are
        many."""
        number, cached = len(self.addresses), self._fluid.pace
        is_known = cached is not None and cached.members is self.addresses
        if cached is not None and is_known and cached.times + 1 < number / MEMBERS_PER_EVENT:
            return replace(cached, times=cached.times + 1)
        all_members = [self.member(address) for address in sorted(self.addresses)]
        seconds = [each.group_seconds for each in all_members]
        first, plan = all_members[0], self._plan
        sizes = [max(MIN_ROWS, min(first.pass_rows, MIN_ROWS_IN_OVERHEADS * first.overhead))]
        if plan.schedule.deterministic or max(seconds) < SAME_SPEED_FACTOR * min(seconds):
            is_learned, ranks = self._state.costs.passes.is_known, first.worker.ranks
            sizes = piece_sizes(plan, self._fluid, number, ranks, is_learned=is_learned)
        left = self._left * rows_per_group(plan, first.worker.ranks)
        ending = best_ending(all_members, left, sizes)
        return TrainingPace(self.addresses, sum(1 / each for each in seconds), min(seconds), ending)


def _with_room(plan: Plan, state: State) -> tuple[frozenset[str], frozenset[str]]:
    """Members that have nothing to do; and all others that may have room for a piece."""
    fluid, workers, able = state.fluid, state.workers, member_addresses(state)
    assert fluid is not None
    if workers.roles.lendable:  # one that is lent finishes what it generates first
        able -= workers.roles.places.keys()
    if plan.early_groups:  # pieces go before fragments of the next batch
        return frozenset(), _at_hand(fluid, workers, able)
    only_train = frozenset(workers.roles.only_train)
    room = _without_two(fluid, able, workers.with_room(WORK_PER_MEMBER) | only_train)
    without = room & (workers.with_room(1) | only_train)  # a fragment
    with_one = room - without - fluid.queued
    return without - fluid.queued, with_one | (without & fluid.queued)


def _without_two(fluid: FluidState, able: frozenset[str], few: frozenset[str]) -> frozenset[str]:
    """Members with less than two pieces, of those with ``few`` fragments. Most of thousands have
    enough of either, so that the smaller of the two sets is gone through first."""
    if len(few) < len(able) - len(fluid.loaded):
        return (few & able) - fluid.loaded
    return (able - fluid.loaded) & few


def _at_hand(fluid: FluidState, workers: Workers, able: frozenset[str]) -> frozenset[str]:
    """Members that may have room and do nothing for the next batch now, if there are any who do
    nothing for it: pieces would wait for the others, and the batch for those."""
    batch = fluid.batch
    room = _without_two(fluid, able, workers.asked(FewerThan(batch, WORK_PER_MEMBER)))
    others = workers.asked(HoldsNext(batch))

    def is_at_hand(address: str) -> bool:
        """Whether it has the pieces for longer than what it has of the next batch."""
        before = _before_pieces(fluid, workers[address])
        return all(assigned.slot.batch <= batch for assigned in before)

    free, with_pieces = room - others, room & fluid.queued & others
    addresses = free - fluid.queued | (
        free & fluid.queued & workers.asked(FewerThan(batch, WORK_PER_MEMBER - 1))
    )
    addresses |= frozenset(filter(is_at_hand, with_pieces))
    if addresses or not able <= others or any(map(is_at_hand, able & fluid.queued)):
        return addresses
    return room


def _member(
    plan: Plan, state: State, fluid: FluidState, address: str, now: float, others: float
) -> Member:
    """``others``: device time of a whole group on a member that was not measured yet."""
    worker, learned = state.workers[address], state.costs.gradient.get(address)
    seconds = others if learned is None else learned.value or others
    passes = state.costs.passes
    pass_rows, group_rows = passes.rows_of(address), rows_per_group(plan, worker.ranks)
    member = Member(
        worker=worker, free_at=now, group_seconds=seconds, pass_rows=pass_rows,
        row_seconds=seconds / passes.work(group_rows, pass_rows), overhead=passes.overhead_rows,
    )  # fmt: skip
    free_at = now
    for place, assigned in enumerate(_before_pieces(fluid, worker)):
        each = state.costs.whole_samples(assigned.num_samples) * sample_seconds(state, worker)
        free_at += max(0.0, each - (0.0 if place else now - assigned.since))
    for place, (index, at) in enumerate(fluid.queues.get(worker.address, ())):
        held_piece = fluid.groups[index].pieces[at]
        each = member.seconds(num_rows(held_piece.piece, plan.merged_steps, worker.ranks))
        begun = not place and not worker.assigned
        free_at += max(0.0, each - (now - held_piece.since if begun else 0.0))
    return replace(member, free_at=free_at)


def _num_ahead(fluid: FluidState, worker: WorkerState) -> int:
    return len(_before_pieces(fluid, worker)) + len(fluid.queues.get(worker.address, ()))


def _before_pieces(fluid: FluidState, worker: WorkerState) -> tuple[AssignedFragment, ...]:
    """Fragments that a member makes before any piece that it is given now: all of the batch, and
    one of the next that it was at before it had pieces. Others of the next batch wait, and so does
    what a member that is not lent has kept."""
    if not worker.concurrency:
        return ()
    if all(assigned.slot.batch <= fluid.batch for assigned in worker.assigned):
        return worker.assigned
    has_pieces = worker.address in fluid.queued
    since = fluid.began.get(worker.address, 0.0) if has_pieces else math.inf
    return tuple(
        assigned
        for place, assigned in enumerate(worker.assigned)
        if assigned.slot.batch <= fluid.batch
        or (place < worker.concurrency and assigned.since < since)
    )


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
    if address not in fluid.queued:
        fluid = replace(fluid, began={**fluid.began, address: now})
    fluid = fluid.with_queue(address, (*fluid.queues.get(address, ()), key))
    assert state.policy is not None
    command = TrainPiece(
        batch=fluid.batch, attempt=fluid.attempt, update=fluid.update, worker=address, piece=piece,
        sum_number=fluid.sum_number(address), policy=state.policy,
    )  # fmt: skip
    return fluid, command
