"""Rounds and steps: a member's part in the total of a batch, and the step that all take of it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

import structlog

from services.trainer.batch.measures import merge_step_metrics
from services.trainer.fluid.committing import SteppedVersion
from services.trainer.fluid.exchange import Exchange, ExchangeIncomplete, MemberRound
from services.trainer.fluid.protocols import FluidDevice, TotalMeasure
from services.trainer.fluid.residuals import Residuals
from services.trainer.fluid.state import HeldTotal, MemberState, ReferenceVersion, Updates
from services.trainer.fluid.versions import MemberVersions
from shared.errors import BatchFailed, OutOfMemory
from shared.messages import subjects
from shared.messages.contracts import Policy, RunFailed
from shared.messages.fluid import (
    BeginAgain,
    CommitVersion,
    ExchangeMissed,
    ExchangeSums,
    FluidMessage,
    Stepped,
    SumHeld,
    TakeStep,
)
from shared.messages.records import ExchangeLevels
from shared.process.failpoints import reach
from shared.process.worker import WorkerContext

log = structlog.get_logger()


class Rounds:
    def __init__(
        self,
        device: FluidDevice,
        exchange: Exchange,
        state: MemberState,
        versions: MemberVersions,
        context: WorkerContext,
        *,
        by_group: bool,
        num_updates: int,
    ) -> None:
        self._device = device
        self._exchange = exchange
        self._state = state
        self._versions = versions
        self._bus = context.bus
        self._worker = context.worker
        self._by_group = by_group
        self._num_updates = num_updates
        state.steps_concurrently = device.steps_concurrently
        self._round: asyncio.Task[None] | None = None
        """The round that this member takes part in."""
        self._committers: dict[tuple[int, int, int], set[str]] = {}
        """Members whose step is the reference for a (batch, attempt, update)."""
        self._steps: dict[str, Stepped] = {}
        """The newest step of each member that was named to commit."""
        self._stepped_at = time.monotonic()
        self._residuals = Residuals()

    async def follow(self, tasks: asyncio.TaskGroup) -> None:
        """Follow all messages to members, without end; rounds and commits continue in ``tasks``."""
        run = self._bus.run
        async for received in self._bus.follow(subjects.FLUID, subjects.fluid_subjects(run)):
            match received.message:
                case ExchangeSums() as message:
                    await self._hear_round(message, tasks)
                case TakeStep() as message:
                    await self._hear_step(message, tasks)
                case Stepped() as message:
                    self._steps[message.worker] = message
                    self._compare(message)
                case CommitVersion() as message:
                    await self._hear_committer(message, tasks)
                case BeginAgain() as message if self._is_over(message):
                    await self._end_round()
                    await self._go_back(message)
                case _:
                    pass

    async def _hear_committer(self, message: CommitVersion, tasks: asyncio.TaskGroup) -> None:
        last = self._num_updates - 1
        self._name_committer(message.batch, message.attempt, last, message.worker)
        if message.worker != self._worker.address:
            return
        self._versions.commit(message.batch, tasks)
        version = self._versions.made
        if version is not None and (version.batch, version.attempt) == (
            message.batch,
            message.attempt,
        ):
            await self._bus.publish(self._stepped(version, last, is_reference=True))

    async def _hear_round(self, message: ExchangeSums, tasks: asyncio.TaskGroup) -> None:
        if self._is_over(message):
            await self._go_back(message)
        verdict = self._state.ledger.hear_round(message)
        if verdict == "drop":
            return
        await self._end_round()  # each round ends every one before it
        me = self._worker.address
        if verdict == "missed":
            await self._missed(message, ExchangeIncomplete("its sum is not its share", (me,)))
        elif verdict == "follow":
            self._round = tasks.create_task(self._take_part(message))

    async def _end_round(self) -> None:
        ended, self._round, self._state.held = self._round, None, None
        if ended is not None:
            ended.cancel()
            await asyncio.wait({ended})

    async def _take_part(self, message: ExchangeSums) -> None:
        """Form the total of a round with the others, and report its checksum."""
        began, me = time.monotonic(), self._worker.address
        try:
            with self._worker.doing("committing"):
                total = await self._total(message)
                measure = await self._device.measure(total)
        except (ExchangeIncomplete, OutOfMemory) as error:
            missed = (
                error
                if isinstance(error, ExchangeIncomplete)
                else ExchangeIncomplete(str(error), (me,))
            )
            await self._missed(message, missed)
            return
        except BatchFailed as error:
            await self._fail(message, error)
            return
        if not self._state.ledger.is_current(message):
            return
        self._state.ledger.hold(message, measure.sum_id)
        self._state.held = HeldTotal(message, total)
        await self._bus.publish(
            SumHeld(
                **message.answer_fields, worker=me, sum_id=measure.sum_id, norm=measure.norm,
                finite=measure.finite, scale=measure.scale, seconds=time.monotonic() - began,
            )
        )  # fmt: skip
        reach("fluid.holds")

    async def _total(self, message: ExchangeSums) -> object:
        me, ledger = self._worker.address, self._state.ledger
        share = next(each for each in message.shares if each.worker == me)
        async with self._state.sums:
            own = await self._device.own_sum() if share.pieces else {}
            if not ledger.is_current(message) or not ledger.is_exactly(message, share):
                raise ExchangeIncomplete("its sum is no longer its share", (me,))
        reach("fluid.exchanges")
        round_ = MemberRound.from_message(
            message, self._bus.run, me, by_group=self._by_group, residuals=self._residuals
        )
        total: object = await self._exchange.total(round_, own)
        return total

    async def _missed(self, message: ExchangeSums, missed: ExchangeIncomplete) -> None:
        log.warning("exchange_missed", batch=message.batch, round=message.round, error=str(missed))
        await self._bus.publish(
            ExchangeMissed(
                **message.answer_fields, worker=self._worker.address, missing=missed.missing,
                reason=str(missed)[:4000],
            )
        )  # fmt: skip

    async def _fail(self, message: ExchangeSums, error: BatchFailed) -> None:
        """Report a batch that cannot be trained; the committer does it for all."""
        me = self._worker.address
        log.error("run_failed", batch=message.batch, reason=str(error))
        if message.committer == me:
            failed = RunFailed(batch=message.batch, worker=me, reason=str(error)[:4000])
            await self._bus.publish(failed)
        await self._missed(message, ExchangeIncomplete(str(error), (me,)))

    async def _hear_step(self, message: TakeStep, tasks: asyncio.TaskGroup) -> None:
        self._residuals.count(message)
        self._name_committer(message.batch, message.attempt, message.update, message.committer)
        total = self._state.held
        if total is None or not self._state.ledger.hear_step(message):
            return  # what it lacks, it fetches once it is published
        if message.update < self._num_updates - 1:
            await self._step_between(message, total)
            return
        step = self._step_concurrently if self._device.steps_concurrently else self._step
        version = await step(message, total)
        self._versions.made = version
        if message.committer == self._worker.address:
            self._versions.commit(message.batch, tasks)
        is_reference = message.committer == self._worker.address
        await self._bus.publish(self._stepped(version, message.update, is_reference=is_reference))
        reach("fluid.stepped")
        for stepped in self._steps.values():
            self._compare(stepped)
        if self._device.steps_concurrently:
            tasks.create_task(self._take(version))

    def _stepped(self, version: SteppedVersion, update: int, *, is_reference: bool) -> Stepped:
        return Stepped(
            batch=version.batch, attempt=version.attempt, update=update,
            worker=self._worker.address, policy=version.policy, checksum=version.checksum,
            is_reference=is_reference, seconds=time.monotonic() - version.began,
        )  # fmt: skip

    async def _step_between(self, message: TakeStep, total: HeldTotal) -> None:
        """Take an update that makes no version: its weights exist nowhere else."""
        began, state = time.monotonic(), self._state
        policy, earlier = total.message.policy, state.updates
        await self._take_what_is_made()
        with self._worker.doing("committing"):
            async with self._changing():
                metrics = await self._take_step(message, total)
                checksum = await self._device.checksum()
                updates = Updates(
                    message.attempt,
                    checksum,
                    (*(earlier.shares if earlier else ()), *total.message.shares),
                    (*(earlier.metrics if earlier else ()), metrics),
                )
                state.go_on(policy, updates)
        log.info("update_taken", batch=message.batch, update=message.update, checksum=checksum)
        await self._bus.publish(
            Stepped(
                batch=message.batch, attempt=message.attempt, update=message.update,
                worker=self._worker.address, policy=policy, checksum=checksum,
                is_reference=message.committer == self._worker.address,
                seconds=time.monotonic() - began,
            )
        )  # fmt: skip
        reach("fluid.updated")
        for stepped in self._steps.values():
            self._compare(stepped)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Lock the part of the device that a step changes: the device itself, or only the second
        set of weights."""
        if self._device.steps_concurrently:
            async with self._state.sums:
                yield
        else:
            async with self._state.lock, self._state.sums:
                self._state.change()
                yield

    async def _take(self, version: SteppedVersion) -> None:
        """Use what the step has made, between two pieces of work."""
        async with self._state.lock, self._state.sums:
            if self._state.ahead is not None and self._state.ahead[0] == version.policy:
                self._use_what_is_made()

    async def _take_what_is_made(self) -> None:
        """Adopt the batch's version before its weights change: a fragment of the version before may
        take as long as the training of a part of the batch."""
        if self._state.ahead is None:
            return
        async with self._state.lock, self._state.sums:
            if self._state.ahead is not None:
                self._use_what_is_made()

    def _use_what_is_made(self) -> None:
        self._device.take()
        self._state.take()
        log.info("version_taken", version=self._state.version_in_use)

    async def _step_concurrently(self, message: TakeStep, total: HeldTotal) -> SteppedVersion:
        """Take the step, at most once, concurrently with the version in use, which continues to
        generate."""
        began, earlier = time.monotonic(), self._state.updates
        async with self._changing():
            metrics, policy, checksum = await self._new_version(message, total)
            self._state.make(policy, checksum)
        log.info("stepped", version=policy.version, checksum=checksum)
        return self._made(message, policy, checksum, total, metrics, earlier, began)

    async def _take_step(self, message: TakeStep, total: HeldTotal) -> Mapping[str, float]:
        with self._worker.progress.running("the optimizer step"):
            return await self._device.step(message.batch, total.total, _total_measure(message))

    async def _new_version(
        self, message: TakeStep, total: HeldTotal
    ) -> tuple[Mapping[str, float], Policy, str]:
        """Take the step; return its metrics, and the version that it makes with its checksum."""
        metrics = await self._take_step(message, total)
        digest = await asyncio.to_thread(self._device.weights_digest)
        checksum = await self._device.checksum()
        return metrics, Policy(version=message.batch + 1, weights_digest=digest), checksum

    async def _step(self, message: TakeStep, total: HeldTotal) -> SteppedVersion:
        """Take the step, at most once, and use the version that it makes."""
        began, earlier = time.monotonic(), self._state.updates
        with self._worker.doing("committing"):
            async with self._changing():
                metrics, policy, checksum = await self._new_version(message, total)
                self._state.use(policy, checksum)
        log.info("stepped", version=policy.version, checksum=checksum)
        return self._made(message, policy, checksum, total, metrics, earlier, began)

    def _made(
        self, message: TakeStep, policy: Policy, checksum: str, total: HeldTotal,
        metrics: Mapping[str, float], earlier: Updates | None, began: float,
    ) -> SteppedVersion:  # fmt: skip
        """Return the version that the last of a batch's updates has made."""
        shares = (*(earlier.shares if earlier else ()), *total.message.shares)
        all_metrics = [dict(each) for each in (*(earlier.metrics if earlier else ()), metrics)]
        paced = self._paced(merge_step_metrics(all_metrics))
        return SteppedVersion(
            policy, checksum, shares, paced, began, message.attempt,
            ExchangeLevels(down=message.down, up=total.message.up),
            base=total.message.policy.weights_digest,
        )  # fmt: skip

    def _paced(self, metrics: Mapping[str, float]) -> dict[str, float]:
        now = time.monotonic()
        seconds, self._stepped_at = now - self._stepped_at, now
        return {**metrics, "step_seconds": seconds}

    def _compare(self, step: Stepped) -> None:
        """Compare with the committer's step of the same attempt: another attempt may have trained
        other samples."""
        version, updates = self._versions.made, self._state.updates
        own = None if version is None else (version.batch, version.attempt)
        if updates is not None:
            own = self._state.version, updates.attempt
        if (step.batch, step.attempt) != own:
            return
        if step.worker in self._committers.get((step.batch, step.attempt, step.update), ()):
            update = 0 if step.policy.version > step.batch else step.update + 1
            self._versions.compare(
                ReferenceVersion(step.policy, step.checksum, step.worker, update)
            )

    def _name_committer(self, batch: int, attempt: int, update: int, worker: str) -> None:
        newest = max((batch_attempt[0] for batch_attempt in self._committers), default=batch)
        kept = {
            batch_attempt: each
            for batch_attempt, each in self._committers.items()
            if batch_attempt[0] >= newest - 1
        }
        kept.setdefault((batch, attempt, update), set()).add(worker)
        self._committers = kept

    def _is_over(self, message: ExchangeSums | BeginAgain) -> bool:
        """Whether others train again a batch, or an update, that this member has stepped: all other
        members that had are lost, and no commit exists."""
        version, updates = self._versions.made, self._state.updates
        if updates is not None:
            is_here = message.batch == self._state.version
            return is_here and message.attempt > updates.attempt
        return (
            version is not None
            and version.policy == self._state.newest
            and version.batch == message.batch
            and message.attempt > version.attempt
        )

    async def _go_back(self, message: FluidMessage) -> None:
        log.warning("step_undone", batch=message.batch, attempt=message.attempt)
        await self._versions.go_back()


def _total_measure(message: TakeStep) -> TotalMeasure:
    """Return what all members step by."""
    norm = message.norm if message.finite else None
    return TotalMeasure(message.sum_id, norm, message.scale, message.down)
