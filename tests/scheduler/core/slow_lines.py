"""Members behind lines of any rate, in virtual time, around the scheduler's pure core.

Each member generates, trains, exchanges sums and steps as the services do; what crosses its line
takes seconds per byte. A round ends with a total, or at its limit with the members that are absent.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.scheduler.core.fluid.cutting import group_share
from services.scheduler.core.fluid.events import MemberReported, VersionLoaded
from services.scheduler.core.inputs import LinkMeasured, RecoveryDone, Tick, WorkerJoined
from services.scheduler.core.machine import step
from services.scheduler.core.state import Plan, State
from shared.messages.contracts import FragmentReleased, GenerateFragment
from shared.messages.fluid import (
    CommitVersion,
    ExchangeMissed,
    ExchangeSums,
    PieceTrained,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
    WeightsStored,
)
from shared.messages.workers import Holds
from tests import examples

CHECKSUM = "0" * 32
MBIT = 1e6 / 8
NEAR_MBIT = 10_000.0
VERSION_PARTS = 4
TICK_S = 4.0


@dataclass
class Member:
    address: str
    mbits: float
    fragment_s: float
    """Seconds of a sample."""
    group_s: float
    """Seconds of the gradient of a group."""
    service: str = "trainer"
    version: int = 0
    sum_number: int = 0
    pieces: list[Any] = field(default_factory=list)
    hangs: bool = False
    fetches: int = 0
    """Version that it fetches."""
    work: deque[GenerateFragment | TrainPiece] = field(default_factory=deque)
    is_busy: bool = False
    up_until: float = 0.0
    """Until when samples are on the way up."""

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
    sample_bytes: int = 1
    changes: Sequence[tuple[int, str, float]] = ()
    """From a batch on, a member's line has so many Mbit/s."""
    restarts_at: int | None = None
    """Version with whose announcement the scheduler restarts."""
    now: float = 0.0
    state: State = field(default_factory=lambda: State(recovering=True))
    rounds: list[ExchangeSums] = field(default_factory=list)
    committers: list[CommitVersion] = field(default_factory=list)
    opened: dict[int, float] = field(default_factory=dict)
    """Batch -> when it was opened."""
    issued: list[GenerateFragment] = field(default_factory=list)
    generated: list[tuple[int, str]] = field(default_factory=list)
    """Batch and device of each fragment."""
    _agenda: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def run(self, until: float) -> State:
        """Go on until the run ends, or nothing follows."""
        self._publish(0)
        self._give(RecoveryDone())
        for member in self.members.values():
            if member.service == "rollout":
                member.version = member.fetches = -1
            self._join(member)
            self._fetch(member, 0)
        self._after(TICK_S, self._tick)
        while self._agenda and self.now < until and self.state.phase == "running":
            self.now, _, act = heapq.heappop(self._agenda)
            act()
        return self.state

    def _join(self, member: Member) -> None:
        name = member.address.removesuffix("-a")
        self._give(WorkerJoined(member.address, name, member.service, concurrency=1))
        self._report(member)

    def _restart(self, version: int) -> None:
        """Have another scheduler read what is issued; workers join it with all that they have
        transferred, the one with the slowest line before the others."""
        self.state = State(recovering=True)
        self._announce(version)
        self._give(*(each for each in self.issued if each.fragment.batch == version))
        self._give(RecoveryDone())
        slowest = min(self.members.values(), key=lambda each: each.mbits)
        for member in self.members.values():
            self._after(2.0 * (member is not slowest), partial(self._join_again, member))

    def _join_again(self, member: Member) -> None:
        self.measure(member, up=1.0, down=1.0)
        self._join(member)

    def seconds_per_batch(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.opened.values())]

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), act))

    def _tick(self) -> None:
        self._give(Tick())
        self._after(TICK_S, self._tick)

    def _give(self, *events: Any) -> None:
        for event in events:
            self.state, commands = step(self.plan, self.state, event, self.now)
            self.issued += [each for each in commands if isinstance(each, GenerateFragment)]
            for command in commands:
                self._after(0.01, lambda command=command: self._follow(command))  # type: ignore[misc]

    def _follow(self, command: Any) -> None:
        match command:
            case GenerateFragment() | TrainPiece():
                member = self.members[str(command.worker)]
                member.work.append(command)
                if isinstance(command, GenerateFragment):
                    self._fetch(member, command.policy.version)
                self._next(member)
            case ExchangeSums():
                self.rounds.append(command)
                Round(self, command).begin()
            case TakeStep():
                for address in self._holders(command):
                    self._step(self.members[address], command)
            case CommitVersion():
                self.committers.append(command)

    def _next(self, member: Member) -> None:
        """Begin what comes first, unless the member lacks its version."""
        if member.is_busy or member.hangs or not member.work:
            return
        task = member.work[0]
        if task.policy.version > member.version:
            return
        member.work.popleft()
        member.is_busy = True
        if isinstance(task, TrainPiece):
            seconds = group_share(self.plan, task.piece) * member.group_s
            self._after(seconds, lambda: self._trained(member, task, seconds))
        elif member.version > task.policy.version and not self.plan.early_groups:
            member.is_busy = False
            slot = task.fragment.slot
            self._give(FragmentReleased(slot=slot, worker=member.address, reason="stale"))
            self._next(member)
        else:
            seconds = task.fragment.num_samples * member.fragment_s
            self._after(seconds, lambda: self._made(member, task, seconds))

    def _made(self, member: Member, task: GenerateFragment, seconds: float) -> None:
        """Send a fragment's samples up, concurrently with what follows."""
        size = self.sample_bytes * task.fragment.num_samples
        member.is_busy = False
        member.up_until = max(member.up_until, self.now) + member.seconds(size)

        def sent() -> None:
            if self.sample_bytes > 1:
                self.measure(member, up=size)
            event = examples.generated(task)
            trajectory = event.stored.trajectory.model_copy(update={"size": size})
            stored = event.stored.model_copy(update={"trajectory": trajectory})
            event = event.model_copy(update={"stored": stored, "seconds": seconds})
            self.generated.append((task.fragment.batch, member.address))
            self._give(event, examples.scored(task))

        self._after(member.up_until - self.now, sent)
        self._next(member)

    def _trained(self, member: Member, command: TrainPiece, seconds: float) -> None:
        member.is_busy = False
        if command.sum_number > member.sum_number:
            member.sum_number, member.pieces = command.sum_number, []
        if command.sum_number == member.sum_number:
            member.pieces.append(command.piece)
            self._give(PieceTrained(**command.answer_fields, seconds=seconds, pass_rows=0))
        self._next(member)

    def _holders(self, command: TakeStep) -> list[str]:
        fluid = self.state.fluid
        assert fluid is not None and fluid.step is not None
        return list(fluid.step.holders)

    def _step(self, member: Member, command: TakeStep) -> None:
        makes_version = command.update == self.plan.updates - 1
        member.version, member.sum_number, member.pieces = command.batch + makes_version, 0, []
        member.fetches = member.version
        is_reference = member.address == command.committer
        self._give(
            Stepped(
                **command.answer_fields, worker=member.address,
                policy=examples.policy(member.version), checksum=CHECKSUM,
                is_reference=is_reference, seconds=0.0,
            )
        )  # fmt: skip
        if is_reference and makes_version:
            self._after(member.seconds(self.size), lambda: self._store(member, command))
        self._next(member)

    def _store(self, member: Member, command: TakeStep) -> None:
        """Store the weights of a version, and then the rest of it."""
        version = command.batch + 1
        self._give(WeightsStored(
            batch=command.batch, attempt=command.attempt, worker=member.address,
            policy=examples.policy(version), weights=examples.ref("weights"),
        ))  # fmt: skip
        rest = member.seconds((VERSION_PARTS - 1) * self.size)
        self._after(rest, lambda: self._commit(member, version))

    def _commit(self, member: Member, version: int) -> None:
        for batch, address, mbits in self.changes:
            if batch == version and address in self.members:
                self.members[address].mbits = mbits
        self.measure(member, up=VERSION_PARTS * self.size)
        self._publish(version)
        for each in self.members.values():
            self._fetch(each, version)

    def _publish(self, version: int) -> None:
        self.opened.setdefault(version, self.now)
        if version == self.restarts_at:
            self._restart(version)
        else:
            self._announce(version)

    def _announce(self, version: int) -> None:
        self._give(examples.published(version).model_copy(update={"checksum": CHECKSUM}))

    def _fetch(self, member: Member, version: int) -> None:
        """Fetch a version, unless it is there; a device that only generates stops fetching an older
        one."""
        if version <= member.fetches or (
            member.service == "trainer" and member.fetches > member.version
        ):
            return
        member.fetches = version
        if member.service == "trainer":
            self._give(MemberReported(member.address, None))
        parts = VERSION_PARTS - 1 if member.service == "trainer" else 0

        def loaded() -> None:
            if parts:
                self.measure(member, down=parts * self.size)
            if member.fetches == version and member.version < version:
                member.version, member.sum_number, member.pieces = version, 0, []
                self._report(member)
                self._fetch(member, max(self.opened))
                self._next(member)

        def weights_loaded() -> None:
            self.measure(member, down=self.size)
            self._after(member.seconds(parts * self.size), loaded)

        self._after(member.seconds(self.size), weights_loaded)

    def measure(self, member: Member, *, up: float = 0.0, down: float = 0.0) -> None:
        each = member.seconds(1)
        self._give(LinkMeasured(member.address, each if up else None, each if down else None))

    def _report(self, member: Member) -> None:
        if member.service == "rollout":
            self._give(VersionLoaded(member.address, member.version))
            return
        holds = Holds(version=member.version, checksum=CHECKSUM, update=0, sum_bytes=self.size)
        self._give(MemberReported(member.address, holds))

    def answer(self, event: ExchangeMissed | SumHeld | LinkMeasured) -> None:
        self._give(event)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._after(seconds, act)


@dataclass
class Round:
    run: SlowLines
    command: ExchangeSums
    come: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    is_over: bool = False

    @property
    def is_group(self) -> bool:
        return self.run.by_group and not self.command.by_store

    def begin(self) -> None:
        size = self.run.size
        for share in self.command.shares:
            member = self.run.members[share.worker]
            if member.hangs:
                continue
            gives = share.pieces and share.worker != self.command.committer and not self.is_group
            sent = size if gives else 0
            self.run.after(member.seconds(sent), partial(self._come, member, sent))
        self.run.after(self.command.max_seconds, self._end)

    def _come(self, member: Member, sent: int) -> None:
        if self.is_over:
            return
        if sent:
            self.run.measure(member, up=sent)
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
