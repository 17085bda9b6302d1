"""Members of the simulated cluster: each generates, trains pieces, exchanges sums and steps.

fragments and pieces -> exchange -> step
-> (committer: snapshot, weights, states, record, announcement)
"""

import hashlib
from dataclasses import dataclass

from services.scheduler.core.fluid.cutting import group_share
from services.scheduler.core.fluid.fluid_state import num_rows
from services.scheduler.core.state import Plan
from services.scheduler.sim.commits import Commit
from services.scheduler.sim.fabric import Fabric
from services.scheduler.sim.generating_member import GeneratingMember
from services.scheduler.sim.history import SimUse
from services.scheduler.sim.sites import REF
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
    ExchangeSums,
    Piece,
    PieceTrained,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
    WeightsStored,
)

ANNOUNCE_S = 0.01
"""Seconds from a commit to its announcement."""


@dataclass(slots=True, kw_only=True)
class SimMember(GeneratingMember):
    plan: Plan
    fabric: Fabric
    _has_total: bool = False
    """Whether it may take the next step."""

    def start(self) -> None:
        """Load the first version, which the first member makes."""
        self._subscribe()
        is_first = not self.commits
        if is_first:
            weights = hashlib.sha256(b"seed").hexdigest()
            self.commits.append(Commit(Policy(version=0, weights_digest=weights), ()))
        policy = self.commits[0].policy
        self.newest = policy.version
        if is_first:
            self._announce(policy)
        self._load(policy)

    def _subscribe(self) -> None:
        own = self.address
        self.broker.subscribe(subjects.EVT, self._published, kinds=(PolicyPublished,))
        self.broker.subscribe(subjects.TASK, self._given, kinds=(GenerateFragment,), address=own)
        self.broker.subscribe(
            subjects.FLUID, self._told, kinds=(TrainPiece, ExchangeSums, TakeStep), address=own
        )
        if self.loan is not None:
            self.broker.subscribe(subjects.DEVICE, self._lend, kinds=(SetDevice,), address=own)

    # --- training ---

    def _told(self, message: Message) -> None:
        match message:
            case TrainPiece():
                self._pieces.append(message)
                self._call_back()
                self._next()
            case ExchangeSums():
                if any(share.worker == self.address for share in message.shares):
                    self.fabric.join(self, message)
            case TakeStep() if self._has_total:
                self._has_total = False
                self._step(message)

    def _begin_piece(self, command: TrainPiece) -> None:
        self.gathered = None
        limit = self.timing.pass_rows
        pass_rows = 0 if limit is None else limit(self.kind)
        seconds = self.history.drawn(self.name, self._seconds(command.piece))
        self.history.works(f"{self.address}/0", "train", 0.0, seconds)

        def done() -> None:
            self.broker.publish(PieceTrained(
                **command.answer_fields, seconds=seconds, pass_rows=pass_rows,
            ))  # fmt: skip

        self._occupy(seconds, done)

    def _seconds(self, piece: Piece) -> float:
        if self.timing.piece is not None:
            rows = num_rows(piece, self.plan.merged_steps, self.timing.ranks)
            return self.timing.piece(self.kind, rows)
        samples = self.plan.trained_samples or self.plan.group_size
        return group_share(self.plan, piece) * self.timing.gradient(self.kind, samples)

    # --- the exchange, and the step ---

    def received(self, command: ExchangeSums) -> None:
        """Report the total of the round."""
        self._has_total = True
        since = self.world.now - self.fabric.seconds
        self.history.worked(f"{self.address}/0", "exchange", since)
        total = f"total of {command.batch} {command.attempt} {command.round}"
        self.broker.publish(SumHeld(
            **command.answer_fields, worker=self.address,
            sum_id=hashlib.sha256(total.encode()).hexdigest(), norm=1.0,
            finite=True, scale=1.0, seconds=0.0,
        ))  # fmt: skip

    def _step(self, command: TakeStep) -> None:
        makes_version = command.update == self.plan.updates - 1
        self.comes_to = command.batch + makes_version
        if not makes_version and (self.policy is None or self.policy.version != command.batch):
            self._occupy_when_free(0.0, lambda: self._step(command))
            return
        policy = self._next_policy(command)
        use: SimUse = "exchange" if self.one_step else "commit"  # beside what it generates
        self.history.works(f"{self.address}/0", use, 0.0, self.timing.step)

        def done() -> None:
            next_policy = self._move(command, policy, makes_version)
            self._hold()
            is_committer = command.committer == self.address
            self.broker.publish(Stepped(
                **command.answer_fields, worker=self.address, policy=next_policy,
                checksum=checksum_of(policy), is_reference=is_committer, seconds=0.0,
            ))  # fmt: skip
            if is_committer and makes_version:
                self._commit(command, policy)
            self._next()

        if self.one_step:
            self.overhead_s += self.timing.step
            self.world.after(self.timing.step, done)
        else:
            self._occupy_when_free(self.timing.step, done)

    def _move(self, command: TakeStep, policy: Policy, makes_version: bool) -> Policy:
        """Have the weights of a step; return the version that it is part of. Groups of an
        intermediate step replace the batch's version, unless it is the second set."""
        assert self.policy is not None
        if not makes_version:
            self.update, self.inner = command.update + 1, policy.weights_digest
            return self.policy
        self.update, self.inner = 0, ""
        if self.one_step:
            self.ahead = policy
        else:
            self.policy = policy
        return policy

    def _next_policy(self, command: TakeStep) -> Policy:
        text = f"{self.state} {command.sum_id}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Policy(version=command.batch + 1, weights_digest=digest)

    # --- the commit ---

    def _commit(self, command: TakeStep, policy: Policy) -> None:
        def store() -> None:
            self.commits.append(Commit(policy, self._trained(command.batch)))
            self.history.committed()
            self.world.after(ANNOUNCE_S, lambda: self._announce(policy))

        def weights_stored() -> None:
            self.broker.publish(WeightsStored(
                batch=command.batch, attempt=command.attempt, worker=self.address, policy=policy,
                weights=REF,
            ))  # fmt: skip
            self.world.after(self.timing.states, store)

        def copied() -> None:
            self.world.after(self.timing.publish, weights_stored)

        if self.one_step:
            self.overhead_s += self.timing.snapshot
            self.world.after(self.timing.snapshot, copied)
            return
        self.history.works(f"{self.address}/0", "commit", 0.0, self.timing.snapshot)
        self._occupy_when_free(self.timing.snapshot, copied)

    def _announce(self, policy: Policy) -> None:
        self.broker.publish(PolicyPublished(
            policy=policy, weights=REF, worker=self.address, seconds=0.0,
            checksum=checksum_of(policy),
        ))  # fmt: skip

    def _trained(self, batch: int) -> tuple[TrainGroup, ...]:
        """Return the batch's groups as they were sent to be trained."""
        sent = self.broker.stored.get(subjects.TRAIN.name, [])
        groups = [each for each in sent if isinstance(each, TrainGroup) and each.batch == batch]
        return tuple(sorted(groups, key=lambda each: each.group))


def checksum_of(policy: Policy) -> str:
    """Return the checksum of a version's weights, moments and average."""
    return policy.weights_digest[:32]
