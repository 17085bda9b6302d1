"""The connections between simulated fluid devices, over which they exchange sums.

They go past the broker, from device to device; an exchange comes to nothing where a device of its
round is missing.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from services.scheduler.sim.history_events import SumName
from services.scheduler.sim.world import Process, World
from shared.messages.fluid import (
    ExchangeSums,
    Piece,
    Share,
)

Round = tuple[int, int, int]
"""Batch, attempt at it, and round."""


@dataclass(slots=True)
class Sum:
    """What a device has added up."""

    name: SumName
    pieces: tuple[Piece, ...] = ()


@dataclass
class Total:
    """What an exchange has made."""

    command: ExchangeSums
    sums: tuple[tuple[str, Sum], ...]

    @cached_property
    def sum_id(self) -> str:
        digest = hashlib.sha256()
        for device, made in self.sums:
            pieces = sorted((p.group, p.attempt, p.first_sample, p.first_step, p.num_samples,
                             p.num_steps, p.number) for p in made.pieces)  # fmt: skip
            digest.update(f"{device} {pieces}".encode())
        return digest.hexdigest()


class FluidDevice(Protocol):
    """What the connections need of a device at their ends."""

    process: Process
    address: str
    sum: Sum

    def received(self, total: Total) -> None:
        """Take the total of a round."""


@dataclass(slots=True)
class Meeting:
    """Where the devices of a round meet."""

    command: ExchangeSums
    shares: Mapping[str, Share]
    come: dict[str, tuple[FluidDevice, int, Sum]] = field(default_factory=dict)
    """Address -> device, its life, and a copy of its sum."""
    is_done: bool = False


@dataclass(slots=True)
class Fabric:
    """The connections between fluid devices."""

    world: World
    seconds: float
    """Seconds that an exchange takes from the last one's arrival."""
    slowest: float = 0.0
    """Seconds that one device may hold the total later than another."""
    meetings: dict[Round, Meeting] = field(default_factory=dict)

    def join(self, member: FluidDevice, command: ExchangeSums) -> None:
        """Bring a sum to the round; all begin when the last one is there."""
        meeting = self._meeting(command)
        name, pieces = member.sum.name, member.sum.pieces
        meeting.come[member.address] = member, member.process.life, Sum(name, pieces)
        if len(meeting.come) == len(meeting.shares):
            self.world.at(self.world.now + self.seconds / 2, lambda: self._sent(meeting))

    def shares(self, command: ExchangeSums) -> Mapping[str, Share]:
        """Return the shares of a round by their member."""
        return self._meeting(command).shares

    def _meeting(self, command: ExchangeSums) -> Meeting:
        key = command.batch, command.attempt, command.round
        if key not in self.meetings:
            shares = {share.worker: share for share in command.shares}
            self.meetings[key] = Meeting(command, shares)
        return self.meetings[key]

    def missing(self, command: ExchangeSums) -> list[str]:
        """Who has not come, or has died since."""
        meeting = self.meetings.get((command.batch, command.attempt, command.round))
        come = {} if meeting is None else meeting.come
        return [
            share.worker
            for share in command.shares
            if share.worker not in come or not _lives(come[share.worker])
        ]

    def _sent(self, meeting: Meeting) -> None:
        """Deliver the total: every sum is on its way, and who dies now is missed by nobody."""
        if meeting.is_done or not all(_lives(each) for each in meeting.come.values()):
            return
        meeting.is_done = True
        order = [share.worker for share in meeting.command.shares]
        total = Total(meeting.command, tuple((a, meeting.come[a][2]) for a in order))
        for member, life, _ in meeting.come.values():
            late = self.seconds / 2 + self.world.random.random() * self.slowest
            self._deliver(member, life, total, late)

    def _deliver(self, member: FluidDevice, life: int, total: Total, late: float) -> None:
        if member.process.life == life:
            member.process.after(late, lambda: member.received(total))


def _lives(each: tuple[FluidDevice, int, Sum]) -> bool:
    member, life, _ = each
    return member.process.alive and member.process.life == life
