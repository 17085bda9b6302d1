"""Gives pieces of groups to members that have nothing left to generate.

A piece takes half of a fair share of what is left of the batch's training, by the member's learned
speed, so pieces shrink towards the end of a batch, down to a part of the trained steps of one
sample. It goes to whoever is free first; at the end not to one that would finish it later than
another that is still at work, unless that is before all are done in any case.
"""

import heapq
import math
from dataclasses import dataclass, replace

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.fluid.cutting import (
    groups_left,
    min_part,
    next_piece,
    part_of_group,
    trained_samples,
)
from services.scheduler.core.fluid.members import member_addresses
from services.scheduler.core.fluid.modes import has_loans
from services.scheduler.core.fluid.state import (
    AHEAD,
    FluidState,
    Pace,
    PieceState,
)
from services.scheduler.core.state import AssignedFragment, Plan, State, WorkerState
from services.scheduler.core.workers import HasFewOf, HasNextOf, Workers
from shared.messages.fluid import TrainPiece

UNLIKE = 1.1
"""Devices whose speeds differ by less are taken as equal."""
MEMBERS_PER_EVENT = 64
"""On average: what follows from all of more members holds for some events. Of so many members it is
known which would finish a small piece first."""

Issued = tuple[State, list[TrainPiece]]


@dataclass(frozen=True, slots=True)
class Member:
    """A member that could take a piece."""

    worker: WorkerState
    free_at: float
    group_seconds: float
    """Device time of a whole group; 1 if nobody has trained anything yet."""

    def end(self, part: float) -> float:
        """When it would be done with such a part of a group."""
        return self.free_at + part * self.group_seconds


def train_pieces(plan: Plan, state: State, now: float) -> Issued:
    """Give pieces out while some wait and members have room for them."""
    fluid, commands = state.fluid, list[TrainPiece]()
    if fluid is None or fluid.step is not None or state.policy is None:
        return state, commands
    if not trainable(plan, fluid):
        return state, commands
    members = AvailableMembers(plan, state, fluid, now)
    if not members.has_room:
        return state, commands
    left, (at_hand, least) = groups_left(plan, fluid), _at_hand_now(plan, fluid)
    while (ready := trainable(plan, fluid)) and (address := members.take_first()) is not None:
        member = members.member(address)
        share = min(
            left / (2 * members.pace.rate * member.group_seconds),
            max(at_hand / len(members.addresses), least),
        )
        if members.another_is_sooner(member, share, left):
            continue
        fluid, key = next_piece(
            plan, fluid, min(ready), share, len(members.addresses), member.worker.ranks
        )
        fluid, command = _given(state, fluid, member, key, now)
        commands.append(command)
        part = part_of_group(plan, command.piece)
        left, at_hand = left - part, at_hand - part
        member = replace(member, free_at=member.free_at + part * member.group_seconds)
        members.put_back(member, fluid)
    return replace(state, fluid=replace(fluid, pace=members.pace, pause=members.pause)), commands


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

    def __init__(self, plan: Plan, state: State, fluid: FluidState, now: float) -> None:
        self._plan, self._state, self._fluid, self._now = plan, state, fluid, now
        self.addresses = member_addresses(state)
        self._known: dict[str, Member] = {}
        """Members by address, as of what they were given so far."""
        idle, self._others = _with_room(plan, state)
        self._idle = sorted(idle, reverse=True)
        self._free: list[tuple[float, str]] = []
        """Heap of the others: when each is free. It is made when nobody idles."""
        self.pace = _pace(state, fluid, self.addresses)
        self._may_look = not fluid.pause or fluid.num_given <= fluid.pause  # so many events come
        self._soonest: list[str] | None = None
        """Members that would be the first to finish a small piece."""
        self._even_end = 0.0
        """When all would be done if what is left were divided evenly."""
        self._least: float | None = None
        """Share of a group that the smallest piece has."""

    @property
    def has_room(self) -> bool:
        return bool(self._idle or self._others)

    def take_first(self) -> str | None:
        """The member that is free first; None if no other has room."""
        if self._idle:
            return self._idle.pop()
        for address in self._others:
            if _num_ahead(self._fluid, self._state.workers[address]) < AHEAD:
                heapq.heappush(self._free, (self.member(address).free_at, address))
        self._others = frozenset()
        return heapq.heappop(self._free)[1] if self._free else None

    def put_back(self, member: Member, fluid: FluidState) -> None:
        """Record what a member was given; ``fluid``: the state with it."""
        address = member.worker.address
        self._known[address] = member
        if _num_ahead(fluid, member.worker) < AHEAD:
            heapq.heappush(self._free, (member.free_at, address))

    @property
    def pause(self) -> int:
        """Events that pass before all are looked at again."""
        if self._soonest is not None:
            return len(self.addresses) // MEMBERS_PER_EVENT
        return max(0, self._fluid.pause - 1)

    def member(self, address: str) -> Member:
        found = self._known.get(address)
        if found is None:
            worker, others = self._state.workers[address], self.pace.others
            found = _member(self._state, self._fluid, worker, self._now, self._plan, others)
            self._known[address] = found
        return found

    def another_is_sooner(self, member: Member, share: float, left: float) -> bool:
        """Whether the batch would end later with this member's small piece: another, busy as it is,
        would finish it sooner, and all could be done by then. It is taken for granted where that
        was found only some events ago.

        Args:
            share: part of a group that the piece is meant to have.
            left: groups that no member has yet.
        """
        if self._least is None:
            self._least = min_part(self._plan, self._fluid, len(self.addresses))
        least = self._least
        is_small = share < max(least, 1 / trained_samples(self._plan))
        if not is_small or member.group_seconds < UNLIKE * self.pace.fastest:
            return False
        if not self._may_look:
            return True
        if self._soonest is None:
            addresses = sorted(self.addresses)
            self._soonest = heapq.nsmallest(
                MEMBERS_PER_EVENT, addresses, key=lambda a: self.member(a).end(least)
            )
            self._even_end = _even_end([self.member(address) for address in addresses], left)
        end = member.end(max(share, least))
        if end <= self._even_end and not self._plan.early_groups:
            return False
        return any(self.member(a).end(max(share, least)) < end for a in self._soonest)


def _even_end(members: list[Member], left: float) -> float:
    """When all members would be done if what is left were to end on all of them at once. To give
    some of it out does not change that."""
    begun = sum(each.free_at / each.group_seconds for each in members)
    return (left + begun) / sum(1 / each.group_seconds for each in members)


def _with_room(plan: Plan, state: State) -> tuple[frozenset[str], frozenset[str]]:
    """Members that have nothing to do; and all others that may have room for a piece."""
    fluid, workers, able = state.fluid, state.workers, member_addresses(state)
    assert fluid is not None
    if workers.roles.lendable:  # one that is lent finishes what it generates first
        able -= workers.roles.places.keys()
    if plan.early_groups:  # pieces go before fragments of the next batch
        return frozenset(), _at_hand(fluid, workers, able)
    only_train = frozenset(workers.roles.only_train)
    room = _without_two(fluid, able, workers.with_room(AHEAD) | only_train)
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
    room = _without_two(fluid, able, workers.asked(HasFewOf(batch, AHEAD)))
    others = workers.asked(HasNextOf(batch))

    def is_at_hand(address: str) -> bool:
        """Whether it has the pieces for longer than what it has of the next batch."""
        before = _before_pieces(fluid, workers[address])
        return all(held.slot.batch <= batch for held in before)

    free, with_pieces = room - others, room & fluid.queued & others
    found = free - fluid.queued | (free & fluid.queued & workers.asked(HasFewOf(batch, AHEAD - 1)))
    found |= frozenset(filter(is_at_hand, with_pieces))
    if found or not able <= others or any(map(is_at_hand, able & fluid.queued)):
        return found
    return room


def _pace(state: State, fluid: FluidState, addresses: frozenset[str]) -> Pace:
    """How fast the members train, found some events ago if there are many."""
    known = fluid.pace
    is_known = known is not None and known.members is addresses
    if known is not None and is_known and known.times < len(addresses) // MEMBERS_PER_EVENT:
        return replace(known, times=known.times + 1)
    others = state.costs.gradient_seconds("") or 1.0
    learned = state.costs.gradient
    seconds = [learned[a].value or others if a in learned else others for a in sorted(addresses)]
    fastest = min(seconds, default=others)
    return Pace(addresses, sum(1 / each for each in seconds), fastest, others)


def _member(
    state: State, fluid: FluidState, worker: WorkerState, now: float, plan: Plan, others: float
) -> Member:
    """``others``: device time of a whole group on a member that was not measured yet."""
    learned = state.costs.gradient.get(worker.address)
    seconds = others if learned is None else learned.value or others
    free_at = now
    for place, held in enumerate(_before_pieces(fluid, worker)):
        each = state.costs.whole_samples(held.num_samples) * sample_seconds(state, worker)
        free_at += max(0.0, each - (0.0 if place else now - held.since))
    for place, (index, at) in enumerate(fluid.queues.get(worker.address, ())):
        held_piece = fluid.groups[index].pieces[at]
        each = seconds * part_of_group(plan, held_piece.piece)
        begun = not place and not worker.assigned
        free_at += max(0.0, each - (now - held_piece.since if begun else 0.0))
    return Member(worker, free_at, seconds)


def _num_ahead(fluid: FluidState, worker: WorkerState) -> int:
    return len(_before_pieces(fluid, worker)) + len(fluid.queues.get(worker.address, ()))


def _before_pieces(fluid: FluidState, worker: WorkerState) -> tuple[AssignedFragment, ...]:
    """Fragments that a member makes before any piece that it is given now: all of the batch, and
    one of the next that it was at before it had pieces. Others of the next batch wait, and so does
    what a member that is not lent has kept."""
    if not worker.concurrency:
        return ()
    if all(held.slot.batch <= fluid.batch for held in worker.assigned):
        return worker.assigned
    has_pieces = worker.address in fluid.queued
    since = fluid.began.get(worker.address, 0.0) if has_pieces else math.inf
    return tuple(
        held
        for place, held in enumerate(worker.assigned)
        if held.slot.batch <= fluid.batch or (place < worker.concurrency and held.since < since)
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
