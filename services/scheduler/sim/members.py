"""Fluid devices of the simulated cluster: each generates, trains pieces, exchanges sums and steps.

    fragments and pieces -> exchange -> step -> (committer: snapshot, store, record, announcement)

What counts is what a device has in memory: the pieces in its sum, the total that it holds, and a
checksum of its weights, moments and average. The exchange itself goes past the broker, from device
to device, and comes to nothing where one of them is missing.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.core.fluid.pieces import part_of_group
from services.scheduler.core.state import Plan
from services.scheduler.sim.batches import ANNOUNCE_S
from services.scheduler.sim.broker import Broker
from services.scheduler.sim.commits import Commit, Commits
from services.scheduler.sim.devices import REF, result_of
from services.scheduler.sim.history import History
from services.scheduler.sim.history_events import Moved, Summed, SumName, Totalled
from services.scheduler.sim.timing import Timing
from services.scheduler.sim.world import Process, World
from shared.messages import subjects
from shared.messages.contracts import (
    FragmentReleased,
    GenerateFragment,
    Message,
    Policy,
    PolicyPublished,
    TrainGroup,
)
from shared.messages.fluid import (
    CommitVersion,
    ExchangeMissed,
    ExchangeSums,
    FluidMessage,
    Piece,
    PieceReleased,
    PieceTrained,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
)
from shared.messages.workers import Holds

Round = tuple[int, int, int]
"""Batch, attempt at it, and round."""


@dataclass(slots=True)
class Sum:
    """What a device has added up."""

    name: SumName
    pieces: tuple[Piece, ...] = ()


@dataclass(slots=True)
class Total:
    """What an exchange has made."""

    command: ExchangeSums
    sums: tuple[tuple[str, Sum], ...]

    @property
    def sum_id(self) -> str:
        digest = hashlib.sha256()
        for device, made in self.sums:
            pieces = sorted((p.group, p.attempt, p.first_sample, p.first_step, p.num_samples,
                             p.num_steps, p.number) for p in made.pieces)  # fmt: skip
            digest.update(f"{device} {pieces}".encode())
        return digest.hexdigest()


@dataclass(slots=True)
class Meeting:
    """Where the devices of a round meet."""

    command: ExchangeSums
    come: dict[str, tuple["SimMember", int, Sum]] = field(default_factory=dict)
    """Address -> device, its life, and a copy of its sum."""
    is_done: bool = False


@dataclass(slots=True)
class Fabric:
    """The connections between fluid devices."""

    world: World
    seconds: float
    """Of an exchange, from the last one's arrival."""
    slowest: float = 0.0
    """Seconds that one device may hold the total later than another."""
    meetings: dict[Round, Meeting] = field(default_factory=dict)

    def join(self, member: "SimMember", command: ExchangeSums) -> None:
        """Bring a sum to the round; all begin when the last one is there."""
        key = command.batch, command.attempt, command.round
        meeting = self.meetings.setdefault(key, Meeting(command))
        name, pieces = member.sum.name, member.sum.pieces
        meeting.come[member.address] = member, member.process.life, Sum(name, pieces)
        if {share.worker for share in command.shares} <= meeting.come.keys():
            self.world.at(self.world.now + self.seconds / 2, lambda: self._sent(meeting))

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
        """By now every sum is on its way: who dies later is missed by nobody."""
        if meeting.is_done or not all(_lives(each) for each in meeting.come.values()):
            return
        meeting.is_done = True
        order = [share.worker for share in meeting.command.shares]
        total = Total(meeting.command, tuple((a, meeting.come[a][2]) for a in order))
        for member, life, _ in meeting.come.values():
            late = self.seconds / 2 + self.world.random.random() * self.slowest
            self._deliver(member, life, total, late)

    def _deliver(self, member: "SimMember", life: int, total: Total, late: float) -> None:
        if member.process.life == life:
            member.process.after(late, lambda: member.received(total))


def _lives(each: tuple["SimMember", int, Sum]) -> bool:
    member, life, _ = each
    return member.process.alive and member.process.life == life


@dataclass(slots=True)
class SimMember:
    process: Process
    broker: Broker
    history: History
    timing: Timing
    kind: str
    address: str
    plan: Plan
    commits: Commits
    fabric: Fabric
    report: Callable[[], None] = lambda: None
    """Tells the scheduler at once what it holds."""
    piece_failure: float = 0.0
    """Probability that a piece fails."""
    steps_wrongly: bool = False
    """A fault: its next step gives other bits than everybody else's."""
    hangs: bool = False
    """A fault: it reports, and finishes nothing any more."""
    on: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Faults: what happens to it at a point of its work."""
    newest: int = -1
    """Version that it has heard of."""
    policy: Policy | None = None
    """Version whose weights are in memory."""
    checksum: str = ""
    holds: Holds | None = None
    sum: Sum = field(default_factory=lambda: Sum((-1, 0, 0)))
    total: Total | None = None
    made: tuple[int, int, Policy] | None = None
    """Batch and attempt of its own step, and what that made."""
    _before: Policy | None = None
    _busy: bool = False
    _tasks: deque[GenerateFragment] = field(default_factory=deque)
    _pieces: deque[TrainPiece] = field(default_factory=deque)
    _round: Round = (-1, 0, 0)
    _waits_for: Policy | None = None
    """A version to load before anything else."""

    def start(self) -> None:
        """Load the newest version, or make the first one."""
        if not self.commits.versions:
            weights = hashlib.sha256(b"seed").hexdigest()
            policy = Policy(version=0, weights_digest=weights)
            self.commits.create(policy, None, (), self.address, checksum=weights[:32])
        self.broker.subscribe(self.process, subjects.EVT, self._published, _is_publication)
        self.broker.subscribe(
            self.process, subjects.TASK, self._given,
            lambda m: isinstance(m, GenerateFragment) and m.worker == self.address,
        )  # fmt: skip
        self.broker.subscribe(self.process, subjects.FLUID, self._told, self._is_mine)
        newest = self.commits.versions[-1]
        self.newest = newest.policy.version
        self._announce(newest)
        self._load(newest)

    @property
    def idles(self) -> bool:
        return not self._busy and not self._tasks and not self._pieces

    def drain(self) -> None:
        """Give back what is not done and end, as on SIGTERM."""
        for task in self._tasks:
            self._release(task, "draining")
        for piece in self._pieces:
            self._give_back(piece, "draining")
        self.process.kill()

    def _is_mine(self, message: Message) -> bool:
        if isinstance(message, TrainPiece | CommitVersion):
            return message.worker == self.address
        return isinstance(message, ExchangeSums | TakeStep | Stepped)

    # --- generating ---

    def _given(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        self._tasks.append(message)
        self._next()

    def _next(self) -> None:
        """Fragments before pieces; nothing while weights change."""
        while not self._busy and (self._tasks or self._pieces):
            if self._tasks:
                self._begin_fragment(self._tasks.popleft())
            else:
                self._begin_piece(self._pieces.popleft())

    def _begin_fragment(self, task: GenerateFragment) -> None:
        if self.newest > task.policy.version:
            self._release(task, "stale")
        elif task.policy == self.policy:
            self._generate(task)
        else:
            found = self._committed(task.policy)
            if found is None:
                self._release(task, "stale")
            else:
                self._tasks.appendleft(task)
                self._load(found)

    def _generate(self, task: GenerateFragment) -> None:
        assert self.policy is not None
        weights = self.policy.weights_digest
        seconds = self.history.drawn(
            self.process.name, self.timing.fragment(self.kind, task.fragment.num_samples)
        )
        generation = self.history.begins(self.address, task, self.newest, weights)
        self.history.works(f"{self.address}/0", "generate", 0.0, seconds)
        self._point("generates", seconds)

        def done() -> None:
            self.broker.send(
                self.process, result_of(task, weights, self.address, seconds, generation)
            )

        self._occupy(seconds, done)

    def _occupy(self, seconds: float, done: Callable[[], None]) -> None:
        self._busy = True

        def end() -> None:
            if not self.hangs:
                self._busy = False
                done()
                self._next()

        self.process.after(seconds, end)

    def _release(self, task: GenerateFragment, reason: Literal["stale", "draining"]) -> None:
        slot = task.fragment.slot
        self.broker.send(
            self.process, FragmentReleased(slot=slot, worker=self.address, reason=reason)
        )

    # --- loading ---

    def _published(self, message: Message) -> None:
        assert isinstance(message, PolicyPublished)
        version = message.policy.version
        if version <= self.newest:
            return
        self.newest = version
        held = self.holds
        if held is not None and (held.version, held.checksum) == (version, message.checksum):
            return
        found = self._committed(message.policy)
        if found is not None:
            self._let_go()
            self._load(found)

    def _committed(self, policy: Policy) -> Commit | None:
        versions = self.commits.versions
        if policy.version >= len(versions) or versions[policy.version].policy != policy:
            return None
        return versions[policy.version]

    def _load(self, commit: Commit) -> None:
        """Load weights, moments and average, as soon as it does nothing else."""
        if self._busy:
            self.process.after(0.05, lambda: self._load(commit))
            return
        if self.holds is not None and self.policy == commit.policy:
            return
        self.holds = None

        def loaded() -> None:
            before, self.made = self.checksum, None
            self.policy, self.checksum = commit.policy, commit.checksum or ""
            self.newest = max(self.newest, commit.policy.version)
            self.history.note(Moved(
                self.process.world.now, self.address, commit.policy.version - 1, 0, None, before,
                self.checksum,
            ))  # fmt: skip
            newest = self.commits.versions[-1]
            if newest.policy.version > commit.policy.version:
                self._load(newest)
                return
            self._hold()

        self.history.works(f"{self.address}/0", "load", self.timing.adopt_state, 0.0)
        self._occupy(self.timing.adopt_state, loaded)

    def _let_go(self) -> None:
        self.holds = None
        self.report()

    def _hold(self) -> None:
        assert self.policy is not None
        self.holds = Holds(version=self.policy.version, checksum=self.checksum)
        self.report()

    # --- training ---

    def _told(self, message: Message) -> None:
        assert isinstance(message, FluidMessage)
        self._go_back(message)
        match message:
            case TrainPiece():
                self._pieces.append(message)
                self._next()
            case ExchangeSums():
                self._exchange(message)
            case TakeStep():
                self._step(message)
            case Stepped():
                self._compare(message)
            case CommitVersion():
                self._commit(message.batch, message.attempt)

    def _go_back(self, message: FluidMessage) -> None:
        """Load the batch's version again, if its step was taken in an attempt that is over."""
        if isinstance(message, Stepped | CommitVersion) or self.made is None:
            return
        batch, attempt, policy = self.made
        if message.batch != batch or message.attempt <= attempt or policy != self.policy:
            return
        versions = self.commits.versions
        if len(versions) == batch + 1:
            self.made = None
            self._let_go()
            self._load(versions[-1])

    def _begin_sum(self, name: SumName) -> bool:
        """Begin with zeros if the sum is newer than what is here; False if it is older."""
        if name > self.sum.name:
            self.sum = Sum(name)
            self.history.note(
                Summed(self.process.world.now, self.address, name, None, self.checksum)
            )
        return name == self.sum.name

    def _is_at(self, batch: int) -> bool:
        """Whether it holds the version that the batch is trained from."""
        return self.holds is not None and self.holds.version == batch

    def _begin_piece(self, command: TrainPiece) -> None:
        name = command.batch, command.attempt, command.sum_number
        if not self._is_at(command.batch) or not self._begin_sum(name):
            return
        piece = command.piece
        if piece in self.sum.pieces:
            return  # it came twice
        seconds = self._seconds(piece)
        seconds = self.history.drawn(self.process.name, seconds)
        self.history.works(f"{self.address}/0", "train", 0.0, seconds)
        self._point("trains", seconds)
        fails = self.piece_failure and self.process.world.random.random() < self.piece_failure

        def done() -> None:
            if self.sum.name != name:
                return
            if fails:
                self._give_back(command, "failed")
                return
            self._add(name, piece)
            self.broker.send(self.process, PieceTrained(
                batch=command.batch, attempt=command.attempt, worker=self.address, piece=piece,
                sum_number=command.sum_number, seconds=seconds,
            ))  # fmt: skip

        self._occupy(seconds, done)

    def _add(self, name: SumName, piece: Piece) -> None:
        assert self.policy is not None
        self.sum.pieces = (*self.sum.pieces, piece)
        self.history.note(Summed(
            self.process.world.now, self.address, name, piece, self.policy.weights_digest
        ))  # fmt: skip

    def _give_back(self, command: TrainPiece, reason: Literal["draining", "failed"]) -> None:
        self.broker.send(self.process, PieceReleased(
            batch=command.batch, attempt=command.attempt, worker=self.address,
            piece=command.piece, sum_number=command.sum_number, reason=reason,
        ))  # fmt: skip

    def _seconds(self, piece: Piece) -> float:
        if self.timing.piece is not None:
            return self.timing.piece(self.kind, piece.num_samples, piece.num_steps)
        samples = self.plan.trained_samples or self.plan.group_size
        return part_of_group(self.plan, piece) * self.timing.gradient(self.kind, samples)

    # --- the exchange, and the step ---

    def _exchange(self, command: ExchangeSums) -> None:
        here = command.batch, command.attempt, command.round
        shares = {share.worker: share for share in command.shares}
        if self.address not in shares or here <= self._round or not self._is_at(command.batch):
            return
        self._round, share = here, shares[self.address]
        self._begin_sum((command.batch, command.attempt, share.sum_number))
        if self._is_other(share.pieces, share.sum_number, command):
            self._miss(command, (self.address,))
            return
        self._point("exchanges", self.fabric.seconds)
        self.fabric.join(self, command)
        self.process.after(command.max_seconds, lambda: self._expire(command))

    def _is_other(self, pieces: tuple[Piece, ...], number: int, command: ExchangeSums) -> bool:
        """Whether its sum is not its share."""
        name = command.batch, command.attempt, number
        return self.sum.name != name or Counter(self.sum.pieces) != Counter(pieces)

    def _expire(self, command: ExchangeSums) -> None:
        here = command.batch, command.attempt, command.round
        if here == self._round and (self.total is None or self.total.command is not command):
            self._miss(command, tuple(self.fabric.missing(command)))

    def _miss(self, command: ExchangeSums, missing: tuple[str, ...]) -> None:
        self.broker.send(self.process, ExchangeMissed(
            batch=command.batch, attempt=command.attempt, round=command.round,
            worker=self.address, missing=missing,
        ))  # fmt: skip

    def received(self, total: Total) -> None:
        """The total of the round is here, if it is still the newest."""
        command = total.command
        if (command.batch, command.attempt, command.round) != self._round:
            return
        self.total = total
        self.history.works(f"{self.address}/0", "exchange", -self.fabric.seconds,
                           self.fabric.seconds)  # fmt: skip
        self.history.note(Totalled(
            self.process.world.now, self.address, *self._round,
            tuple((address, made.name) for address, made in total.sums),
        ))  # fmt: skip
        self.broker.send(self.process, SumHeld(
            batch=command.batch, attempt=command.attempt, round=command.round,
            worker=self.address, sum_id=total.sum_id, norm=1.0, finite=True,
        ))  # fmt: skip
        self._point("holds", self.timing.step)

    def _step(self, command: TakeStep) -> None:
        total = self.total
        if total is None or total.sum_id != command.sum_id or not self._is_at(command.batch):
            return
        if self.made is not None and self.made[0] == command.batch:
            return
        self.made = command.batch, command.attempt, self._next_policy(command)
        self.history.works(f"{self.address}/0", "commit", 0.0, self.timing.step)

        def done() -> None:
            if self.made is None or self.policy is None:
                return  # another version was loaded first
            before, self._before = self.checksum, self.policy
            self.policy = self.made[2]
            self.checksum = self.policy.weights_digest[:32]
            self.history.note(Moved(
                self.process.world.now, self.address, command.batch, command.attempt,
                command.sum_id, before, self.checksum,
            ))  # fmt: skip
            self._hold()
            self.broker.send(self.process, Stepped(
                batch=command.batch, attempt=command.attempt, worker=self.address,
                policy=self.policy, checksum=self.checksum,
            ))  # fmt: skip
            self._point("stepped", self.timing.snapshot + self.timing.publish)
            if command.committer == self.address:
                self._commit(command.batch, command.attempt)

        self._occupy_when_free(self.timing.step, done)

    def _occupy_when_free(self, seconds: float, done: Callable[[], None]) -> None:
        if self._busy:
            self.process.after(0.01, lambda: self._occupy_when_free(seconds, done))
        else:
            self._occupy(seconds, done)

    def _next_policy(self, command: TakeStep) -> Policy:
        wrong = " wrongly" if self.steps_wrongly else ""
        self.steps_wrongly = False
        text = f"{self.checksum} {command.sum_id}{wrong}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Policy(version=command.batch + 1, weights_digest=digest)

    def _compare(self, message: Stepped) -> None:
        """The committer's step is the reference: who has made another version loads that one."""
        if self.made is None or self.total is None:
            return
        batch, attempt, policy = self.made
        if (message.batch, message.attempt) != (batch, attempt) or message.policy == policy:
            return
        if message.worker == self.total.command.committer and self.policy == policy:
            self.history.fault("differs", self.address)
            self._let_go()

    # --- the commit ---

    def _commit(self, batch: int, attempt: int) -> None:
        if self.made is None or self.made[:2] != (batch, attempt) or self.policy != self.made[2]:
            return
        policy, parent, total = self.policy, self._before, self.total
        assert total is not None

        def store() -> None:
            trained = self._trained(total.command)
            accepted = self.commits.create(
                policy, parent, trained, self.address, checksum=policy.weights_digest[:32],
                shares=total.command.shares,
            )  # fmt: skip
            self.history.committed(self.address, policy.version, accepted)
            self._point("committed", ANNOUNCE_S)
            self.process.after(
                ANNOUNCE_S, lambda: self._announce(self.commits.versions[policy.version])
            )

        def copied() -> None:
            self._point("commits", self.timing.publish)
            self.process.after(self.timing.publish, store)

        self.history.works(f"{self.address}/0", "commit", 0.0, self.timing.snapshot)
        self._occupy_when_free(self.timing.snapshot, copied)

    def _announce(self, commit: Commit) -> None:
        self.broker.send(self.process, PolicyPublished(
            policy=commit.policy, weights=REF, worker=self.address, checksum=commit.checksum
        ))  # fmt: skip

    def _trained(self, command: ExchangeSums) -> tuple[TrainGroup, ...]:
        """The groups of the shares, as they were sent to be trained."""
        named = {(p.group, p.attempt) for share in command.shares for p in share.pieces}
        found = {
            (m.group, m.attempt): m
            for m in self.broker.stored.get(subjects.TRAIN.name, [])
            if isinstance(m, TrainGroup) and m.batch == command.batch
        }
        return tuple(found[key] for key in sorted(named))

    def _point(self, name: str, seconds: float) -> None:
        """A fault may wait for this."""
        fault = self.on.pop(name, None)
        if fault is not None:
            self.process.after(seconds * self.process.world.random.random(), fault)


def _is_publication(message: Message) -> bool:
    return isinstance(message, PolicyPublished)
