"""Members behind lines of any rate, in virtual time, around the scheduler's pure core.

Each member generates, trains, exchanges sums and steps as the services do; what crosses its line
takes seconds per byte. A round ends with a total, or at its limit with the members that are absent.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.core.fluid.cutting import group_share
from services.scheduler.core.fluid.events import MemberReported
from services.scheduler.core.inputs import LinkMeasured, RecoveryDone, Tick, WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import Plan, State
from shared.messages.contracts import GenerateFragment, PolicyPublished
from shared.messages.fluid import (
    CommitVersion,
    ExchangeMissed,
    ExchangeSums,
    PieceTrained,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
)
from shared.messages.workers import Holds
from tests import examples

CHECKSUM = "0" * 32
MBIT = 1e6 / 8
NEAR_MBIT = 10_000.0
VERSION_PARTS = 4


@dataclass
class Member:
    address: str
    mbits: float
    fragment_s: float
    """Seconds of a sample."""
    group_s: float
    """Seconds of the gradient of a group."""
    version: int = 0
    busy_until: float = 0.0
    sum_number: int = 0
    pieces: list[Any] = field(default_factory=list)
    hangs: bool = False

    def seconds(self, size: float) -> float:
        return size / (self.mbits * MBIT)


@dataclass
class SlowLines:
    """A run of these members; ``size``: bytes of a sum; ``by_group``: by a process group, unless
    the round before came to nothing."""

    plan: Plan
    members: Mapping[str, Member]
    size: int
    by_group: bool = False
    now: float = 0.0
    state: State = field(default_factory=lambda: State(recovering=True))
    rounds: list[ExchangeSums] = field(default_factory=list)
    committers: list[CommitVersion] = field(default_factory=list)
    _agenda: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def run(self, until: float) -> State:
        """Go on until the run ends, or nothing follows."""
        self._give(self._published(0), RecoveryDone())
        for member in self.members.values():
            name = member.address.removesuffix("-a")
            self._give(WorkerJoined(member.address, name, "trainer", concurrency=1))
            self._hold(member)
        self._after(1.0, self._tick)
        while self._agenda and self.now < until and self.state.phase == "running":
            self.now, _, act = heapq.heappop(self._agenda)
            act()
        return self.state

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), act))

    def _tick(self) -> None:
        self._give(Tick())
        self._after(1.0, self._tick)

    def _give(self, *events: Any) -> None:
        for event in events:
            self.state, commands = step(self.plan, self.state, event, self.now)
            for command in commands:
                self._after(0.01, lambda command=command: self._follow(command))  # type: ignore[misc]

    def _follow(self, command: Any) -> None:
        match command:
            case GenerateFragment():
                member = self.members[str(command.worker)]
                count = command.fragment.num_samples
                self._occupy(member, count * member.fragment_s, lambda: self._generated(command))
            case TrainPiece():
                member = self.members[command.worker]
                seconds = group_share(self.plan, command.piece) * member.group_s
                self._occupy(member, seconds, lambda: self._trained(member, command, seconds))
            case ExchangeSums():
                self.rounds.append(command)
                Round(self, command).begin()
            case TakeStep():
                for address in self._holders(command):
                    self._step(self.members[address], command)
            case CommitVersion():
                self.committers.append(command)

    def _occupy(self, member: Member, seconds: float, done: Callable[[], None]) -> None:
        if member.hangs:
            return
        member.busy_until = max(member.busy_until, self.now) + seconds
        self._after(member.busy_until - self.now, done)

    def _generated(self, task: GenerateFragment) -> None:
        self._give(examples.generated(task), examples.scored(task))

    def _trained(self, member: Member, command: TrainPiece, seconds: float) -> None:
        if command.sum_number < member.sum_number:
            return
        if command.sum_number > member.sum_number:
            member.sum_number, member.pieces = command.sum_number, []
        member.pieces.append(command.piece)
        self._give(PieceTrained(**command.answer_fields, seconds=seconds, pass_rows=0))

    def _holders(self, command: TakeStep) -> list[str]:
        fluid = self.state.fluid
        assert fluid is not None and fluid.step is not None
        return list(fluid.step.holders)

    def _step(self, member: Member, command: TakeStep) -> None:
        member.version, member.sum_number, member.pieces = command.batch + 1, 0, []
        is_reference = member.address == command.committer
        self._give(
            Stepped(
                **command.answer_fields, worker=member.address,
                policy=examples.policy(member.version), checksum=CHECKSUM,
                is_reference=is_reference, seconds=0.0,
            )
        )  # fmt: skip
        if is_reference:
            size = VERSION_PARTS * self.size
            self._after(member.seconds(size), lambda: self._commit(member, command.batch + 1))

    def _commit(self, member: Member, version: int) -> None:
        self.measure(member, up=VERSION_PARTS * self.size)
        self._give(self._published(version))
        for each in self.members.values():
            if each.version < version:
                self._load(each, version)

    def _load(self, member: Member, version: int) -> None:
        self._give(MemberReported(member.address, None))
        size = VERSION_PARTS * self.size

        def loaded() -> None:
            self.measure(member, down=size)
            member.version, member.sum_number, member.pieces = version, 0, []
            self._hold(member)

        self._after(member.seconds(size), loaded)

    def measure(self, member: Member, *, up: float = 0.0, down: float = 0.0) -> None:
        each = member.seconds(1)
        self._give(LinkMeasured(member.address, each if up else None, each if down else None))

    def _hold(self, member: Member) -> None:
        holds = Holds(version=member.version, checksum=CHECKSUM, update=0, sum_bytes=self.size)
        self._give(MemberReported(member.address, holds))

    def answer(self, event: ExchangeMissed | SumHeld | LinkMeasured) -> None:
        self._give(event)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._after(seconds, act)

    def _published(self, version: int) -> PolicyPublished:
        return examples.published(version).model_copy(update={"checksum": CHECKSUM})


@dataclass
class Round:
    run: SlowLines
    command: ExchangeSums
    come: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    is_over: bool = False

    @property
    def is_group(self) -> bool:
        return self.run.by_group and not self.command.num_failures

    def begin(self) -> None:
        size = self.run.size
        for share in self.command.shares:
            member = self.run.members[share.worker]
            if member.hangs:
                continue
            gives = share.pieces and share.worker != self.command.committer and not self.is_group
            seconds = member.seconds(size) if gives else 0.0
            self.run.after(seconds, lambda member=member: self._come(member))  # type: ignore[misc]
        self.run.after(self.command.max_seconds, self._end)

    def _come(self, member: Member) -> None:
        if self.is_over:
            return
        self.come.add(member.address)
        shares, size = self.command.shares, self.run.size
        if len(self.come) < len(shares):
            return
        members = [self.run.members[share.worker] for share in shares]
        committer = self.run.members[self.command.committer]
        if self.is_group:
            slowest = max(2 * each.seconds(size) for each in members)
            self.run.after(slowest, lambda: self._hold(members))
            return
        taken = committer.seconds(size * (len(shares) - 1))
        self.run.after(taken, lambda: self._hold([committer]))
        for each in members:
            if each is not committer:
                seconds = taken + committer.seconds(size) + each.seconds(size)
                self.run.after(seconds, lambda each=each: self._hold([each]))  # type: ignore[misc]

    def _hold(self, members: list[Member]) -> None:
        for member in () if self.is_over else members:
            self.held.add(member.address)
            self.run.measure(member, up=1.0, down=1.0)
            self.run.answer(
                SumHeld(
                    **self.command.answer_fields, worker=member.address, sum_id=f"{7:064x}",
                    norm=1.0, finite=True, scale=1.0, seconds=0.0,
                )
            )  # fmt: skip

    def _end(self) -> None:
        self.is_over = True
        names = [share.worker for share in self.command.shares]
        absent = set(names) - self.come
        if not absent and not self.is_group:
            absent = {self.command.committer}
        for name in absent & set(names) if not self.is_group else ():
            seconds = self.command.max_seconds / self.run.size  # no faster than this
            self.run.answer(LinkMeasured(name, seconds, None))
        for name in names:
            if name not in self.held and not self.run.members[name].hangs:
                missing = tuple(sorted(absent - {name}))
                self.run.answer(
                    ExchangeMissed(
                        **self.command.answer_fields, worker=name, missing=missing, reason=""
                    )
                )
