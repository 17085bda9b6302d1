"""Members of the simulated cluster: each generates, trains pieces, exchanges sums and steps.

    fragments and pieces -> exchange -> step
    -> (committer: snapshot, weights, states, record, announcement)

What counts is what a device has in memory: the pieces in its sum, the total that it holds, and a
checksum of its weights, moments and average.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from services.scheduler.core.fluid.cutting import part_of_group
from services.scheduler.core.fluid.state import num_rows
from services.scheduler.core.state import Plan
from services.scheduler.sim.commits import Commit
from services.scheduler.sim.devices import REF
from services.scheduler.sim.fabric import Fabric, Round, Sum, Total
from services.scheduler.sim.generating_member import GeneratingMember
from services.scheduler.sim.history_events import SumName, Use
from shared.messages import subjects
from shared.messages.contracts import (
    GenerateFragment,
    Message,
    Policy,
    PolicyPublished,
    SetDevice,
    TrainGroup,
)
from shared.messages.fluid import (
    BeginAgain,
    CommitVersion,
    ExchangeMissed,
    ExchangeSums,
    FluidMessage,
    Piece,
    PieceTrained,
    Share,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
    WeightsStored,
)

ANNOUNCE_S = 0.01
"""Seconds from a commit to its announcement: a member may die in between."""
HEARD = (TrainPiece, CommitVersion, ExchangeSums, TakeStep, Stepped, BeginAgain)
"""What a member follows of the stream of fluid devices."""


@dataclass(slots=True, kw_only=True)
class SimMember(GeneratingMember):
    plan: Plan
    fabric: Fabric
    sum: Sum = field(default_factory=lambda: Sum((-1, 0, 0, 0)))
    total: Total | None = None
    shares: tuple[Share, ...] = ()
    """What the updates of the batch were made of so far."""
    _before: Policy | None = None
    _round: Round = (-1, 0, 0)
    _attempt: int = 0
    """Attempt at the batch of which its updates are."""

    def start(self) -> None:
        """Load the newest version, or make the first one."""
        if not self.commits.versions:
            weights = hashlib.sha256(b"seed").hexdigest()
            policy = Policy(version=0, weights_digest=weights)
            self.commits.create(policy, None, (), self.address, checksum=weights[:32])
        self.broker.subscribe(
            self.process, subjects.EVT, self._published, _is_publication, kinds=(PolicyPublished,)
        )
        self.broker.subscribe(
            self.process, subjects.TASK, self._given,
            lambda m: isinstance(m, GenerateFragment) and m.worker == self.address,
            address=self.address,
        )  # fmt: skip
        self.broker.subscribe(
            self.process, subjects.FLUID, self._told, self._is_mine, kinds=HEARD,
            address=self.address,
        )  # fmt: skip
        if self.loan is not None:
            self.broker.subscribe(
                self.process, subjects.DEVICE, self._lend,
                lambda m: isinstance(m, SetDevice) and m.worker == self.address,
                address=self.address,
            )  # fmt: skip
        newest = self.commits.versions[-1]
        self.newest = newest.policy.version
        self._announce(newest, once=f"again.{newest.policy.version}.{newest.policy.weights_digest}")
        self._load(newest)

    def _is_mine(self, message: Message) -> bool:
        if isinstance(message, TrainPiece | CommitVersion):
            return message.worker == self.address
        if isinstance(message, Stepped):
            return message.is_reference
        return isinstance(message, ExchangeSums | TakeStep | BeginAgain)

    # --- training ---

    def _told(self, message: Message) -> None:
        assert isinstance(message, FluidMessage)
        if self.hangs:
            return
        self._go_back(message)
        match message:
            case TrainPiece():
                self._pieces.append(message)
                self._call_back()
                self._next()
            case ExchangeSums():
                self._exchange(message)
            case TakeStep():
                self._step(message)
            case Stepped():
                self._compare(message)
            case CommitVersion():
                self._hear_committer(message)

    def _go_back(self, message: FluidMessage) -> None:
        """Load the batch's version again, if its step was taken in an attempt that is over."""
        if isinstance(message, Stepped | CommitVersion):
            return
        is_here = self.policy is not None and self.policy.version == message.batch
        if self.update and is_here and message.attempt > self._attempt:
            self._attempt = message.attempt
            self._let_go()
            self._load(self.commits.versions[-1])
        if self.made is None:
            return
        batch, attempt, policy = self.made
        if message.batch != batch or message.attempt <= attempt or policy != self.last:
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
        return name == self.sum.name

    def _is_at(self, batch: int, update: int) -> bool:
        """Whether it holds what the update goes from, and uses the batch's version."""
        return self._is_in_use(batch) and self._has(batch, update)

    def _is_in_use(self, batch: int) -> bool:
        return self.policy is not None and self.policy.version == batch

    def _has(self, batch: int, update: int) -> bool:
        """Whether it holds what the update goes from: a step ahead, a fragment that takes long may
        still be generated by the version before."""
        held = self.holds
        return held is not None and (held.version, held.update) == (batch, update)

    def _begin_piece(self, command: TrainPiece) -> None:
        name = command.batch, command.attempt, command.update, command.sum_number
        if not self._is_at(command.batch, command.update) or not self._begin_sum(name):
            return
        piece = command.piece
        if piece in self.sum.pieces:
            return  # it came twice
        self.gathered = None
        seconds, limit = self._seconds(piece), self.timing.pass_rows
        pass_rows = 0 if limit is None else limit(self.kind)
        seconds = self.history.drawn(self.process.name, seconds)
        self.history.works(f"{self.address}/0", "train", 0.0, seconds)

        def done() -> None:
            if self.sum.name != name:
                return
            self.sum.pieces = (*self.sum.pieces, piece)
            self.broker.send(self.process, PieceTrained(
                **command.answer_fields, seconds=seconds, pass_rows=pass_rows,
            ))  # fmt: skip

        self._occupy(seconds, done)

    def _seconds(self, piece: Piece) -> float:
        if self.timing.piece is not None:
            rows = num_rows(piece, self.plan.merged_steps, self.timing.ranks)
            return self.timing.piece(self.kind, rows)
        samples = self.plan.trained_samples or self.plan.group_size
        return part_of_group(self.plan, piece) * self.timing.gradient(self.kind, samples)

    # --- the exchange, and the step ---

    def _exchange(self, command: ExchangeSums) -> None:
        here = command.batch, command.attempt, command.round
        shares = self.fabric.shares(command)
        is_at = self._has(command.batch, command.update)
        if self.address not in shares or here <= self._round or not is_at:
            return
        self._round, share = here, shares[self.address]
        self._begin_sum((command.batch, command.attempt, command.update, share.sum_number))
        if self._is_other(share.pieces, share.sum_number, command):
            self._miss(command, (self.address,))
            return
        self.fabric.join(self, command)
        self.process.after(command.max_seconds, lambda: self._expire(command))

    def _is_other(self, pieces: tuple[Piece, ...], number: int, command: ExchangeSums) -> bool:
        """Whether its sum is not its share."""
        name = command.batch, command.attempt, command.update, number
        return self.sum.name != name or Counter(self.sum.pieces) != Counter(pieces)

    def _expire(self, command: ExchangeSums) -> None:
        here = command.batch, command.attempt, command.round
        if self.hangs:
            return
        if here == self._round and (self.total is None or self.total.command is not command):
            self._miss(command, tuple(self.fabric.missing(command)))

    def _miss(self, command: ExchangeSums, missing: tuple[str, ...]) -> None:
        self.broker.send(self.process, ExchangeMissed(
            **command.answer_fields, worker=self.address, missing=missing, reason="",
        ))  # fmt: skip

    def received(self, total: Total) -> None:
        """The total of the round is here, if it is still the newest."""
        command = total.command
        if self.hangs or (command.batch, command.attempt, command.round) != self._round:
            return
        self.total = total
        since = self.process.world.now - self.fabric.seconds
        self.history.worked(f"{self.address}/0", "exchange", since)
        self.broker.send(self.process, SumHeld(
            **command.answer_fields, worker=self.address, sum_id=total.sum_id, norm=1.0,
            finite=True, scale=1.0, seconds=0.0,
        ))  # fmt: skip

    def _step(self, command: TakeStep) -> None:
        total, batch = self.total, command.batch
        if total is None or total.sum_id != command.sum_id or not self._has(batch, command.update):
            return
        if self.made is not None and self.made[0] == batch:
            return
        makes_version = command.update == self.plan.updates - 1
        if not makes_version and not self._is_in_use(batch):
            self._occupy_when_free(0.0, lambda: self._step(command))
            return
        before, policy = self.state, self._next_policy(command)
        made = self.made = (batch, command.attempt, policy) if makes_version else None
        shares = (*(self.shares if self.update else ()), *total.command.shares)
        use: Use = "exchange" if self.one_step else "commit"  # beside what it generates
        self.history.works(f"{self.address}/0", use, 0.0, self.timing.step)

        def done() -> None:
            if self.made is not made or self.policy is None or self.state != before:
                return  # another version was loaded first
            self.shares, checksum = shares, policy.weights_digest[:32]
            of = self._move(command, policy, makes_version)
            self._hold()
            is_committer = command.committer == self.address
            self.broker.send(self.process, Stepped(
                **command.answer_fields, worker=self.address, policy=of, checksum=checksum,
                is_reference=is_committer, seconds=0.0,
            ))  # fmt: skip
            if is_committer:
                self._commit(batch, command.attempt)
            self._next()

        if self.one_step:
            self.beside += self.timing.step
            self.process.after(self.timing.step, done)
        else:
            self._occupy_when_free(self.timing.step, done)

    def _move(self, command: TakeStep, policy: Policy, makes_version: bool) -> Policy:
        """Have the weights of a step; return the version that it is part of. Those of a step that
        makes none take the place of the batch's version, unless they are beside."""
        assert self.policy is not None
        if not makes_version:
            self.update, self._attempt = command.update + 1, command.attempt
            self.inner = policy.weights_digest
            return self.policy
        self.update, self.inner, self._before = 0, "", self.policy
        if self.one_step:
            self.ahead = policy, policy.weights_digest[:32]
        else:
            self.policy, self.checksum = policy, policy.weights_digest[:32]
        return policy

    def _next_policy(self, command: TakeStep) -> Policy:
        text = f"{self.state} {command.sum_id}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Policy(version=command.batch + 1, weights_digest=digest)

    def _compare(self, message: Stepped) -> None:
        """The committer's step is the reference: who has made another version loads that one."""
        if self.made is None or self.total is None:
            return
        batch, attempt, policy = self.made
        if (message.batch, message.attempt) != (batch, attempt) or message.policy == policy:
            return
        if message.worker == self.total.command.committer and self.last == policy:
            self._let_go()

    # --- the commit ---

    def _hear_committer(self, command: CommitVersion) -> None:
        """Commit what it has made, and say what that is."""
        if self.made is None or self.made[:2] != (command.batch, command.attempt):
            return
        policy = self.made[2]
        self._commit(command.batch, command.attempt)
        self.broker.send(self.process, Stepped(
            batch=command.batch, attempt=command.attempt, update=self.plan.updates - 1,
            worker=self.address, policy=policy, checksum=policy.weights_digest[:32],
            is_reference=True, seconds=0.0,
        ))  # fmt: skip

    def _commit(self, batch: int, attempt: int) -> None:
        if self.made is None or self.made[:2] != (batch, attempt) or self.last != self.made[2]:
            return
        policy, parent, total = self.made[2], self._before, self.total
        shares = self.shares
        assert total is not None

        def store() -> None:
            trained = self._trained(batch, shares)
            accepted = self.commits.create(
                policy, parent, trained, self.address, checksum=policy.weights_digest[:32],
                shares=shares,
            )  # fmt: skip
            if accepted:
                self.history.committed()
            self.process.after(
                ANNOUNCE_S, lambda: self._announce(self.commits.versions[policy.version])
            )

        def weights_stored() -> None:
            self.broker.send(self.process, WeightsStored(
                batch=batch, attempt=attempt, worker=self.address, policy=policy, weights=REF
            ))  # fmt: skip
            self.process.after(self.timing.states, store)

        def copied() -> None:
            self.process.after(self.timing.publish, weights_stored)

        if self.one_step:
            self.beside += self.timing.snapshot
            self.process.after(self.timing.snapshot, copied)
            return
        self.history.works(f"{self.address}/0", "commit", 0.0, self.timing.snapshot)
        self._occupy_when_free(self.timing.snapshot, copied)

    def _announce(self, commit: Commit, once: str | None = None) -> None:
        self.broker.send(self.process, PolicyPublished(
            policy=commit.policy, weights=REF, worker=self.address, seconds=0.0,
            checksum=commit.checksum,
        ), once)  # fmt: skip

    def _trained(self, batch: int, shares: tuple[Share, ...]) -> tuple[TrainGroup, ...]:
        """The groups of the shares, as they were sent to be trained."""
        named = {(p.group, p.attempt) for share in shares for p in share.pieces}
        found = {
            (m.group, m.attempt): m
            for m in self.broker.stored.get(subjects.TRAIN.name, [])
            if isinstance(m, TrainGroup) and m.batch == batch
        }
        return tuple(found[key] for key in sorted(named))


def _is_publication(message: Message) -> bool:
    return isinstance(message, PolicyPublished)
