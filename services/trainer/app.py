"""The trainer: trains groups as they become whole, and commits one optimizer step per batch.

Its memory holds nothing that is not also elsewhere: the commit records say which weights and
optimizer state it starts from (resuming.py), and the stream of groups is read from the first
group of the batch. So a killed trainer does the batch again, and a zombie's commit is refused.

The devices are held for the optimizer step alone, and the first of them for a copy of what it has
made. With one-step asynchrony the next batch's groups are then trained while the version is still
being digested and stored: those of the version before may be trained, and are there. Nothing is
generated before the digest is known. The next optimizer step waits for the commit, and if it copies
the optimizer's state for that of the one before to be stored.

                     begin     groups, in slices     step begin     groups
    first device  ---|---------|=====|=====|=====|---|-copy-|-------|=====|=====|---
    others        ---|---------|=====|=====|=====|---|------|-------|=====|=====|---
    beside        -------------------------------------------digest, weights, record, news, states
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import structlog

from services.trainer.batch.fetcher import CheckStored, GroupFetcher, TrajectoryCache
from services.trainer.batch.training import BatchTraining
from services.trainer.devices.device import LoanableGenerator, TrainerDevice
from services.trainer.devices.loan_agent import LoanAgent
from services.trainer.devices.pool import DevicePool
from services.trainer.resuming import Resuming
from services.trainer.versions import NewVersion, Versions
from shared.devices.conditions import EncodedConditions
from shared.devices.protocols import GeneratingDevice, Snapshot, Training
from shared.devices.publisher import FragmentPublisher
from shared.errors import (
    BatchFailed,
    CommitConflict,
    DigenRLError,
    IntegrityError,
    OutOfMemory,
    Untrainable,
)
from shared.learning.metrics import ALARMING_RATIO_ERROR
from shared.messages import subjects
from shared.messages.contracts import OperatorRequest, Policy, RunFailed
from shared.messages.workers import MemoryShortage
from shared.process.failpoints import reach
from shared.process.worker import WorkerContext
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, admissible_versions, newest_commit
from shared.run.previews import PreviewRule

AGAIN = {True: "the batch begins again, in smaller passes", False: "the batch begins again"}
ATTEMPTS = 2
"""Number of attempts at a batch that is out of memory and cannot be trained in smaller passes: what
another process on the device has taken may be given back by then."""


@dataclass(slots=True)
class Failures:
    """Counts the failures of the newest batch that has failed."""

    batch: int = -1
    count: int = 0

    def is_final(self, batch: int, error: BatchFailed | OutOfMemory) -> bool:
        """Count this failure; return whether another attempt would end in the same way."""
        if isinstance(error, BatchFailed):
            return True
        if error.smaller:
            return False
        self.count = self.count + 1 if batch == self.batch else 1
        self.batch = batch
        return self.count % ATTEMPTS == 0


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ParentVersion:
    """Version that a batch is trained from."""

    version: int
    before: Policy | None
    """The version before it, if that may have generated some of what is trained."""
    committed: asyncio.Future[CommitRecord]
    """Done when it is announced; raises CommitConflict if another trainer has made that version."""


def _loanable(
    generators: Sequence[GeneratingDevice],
    recipe: Recipe,
    context: WorkerContext,
    encoded: EncodedConditions | None,
    cache: TrajectoryCache,
) -> Iterator[LoanableGenerator]:
    publisher = partial(
        FragmentPublisher, context=context, encoded=encoded, keep=cache.keep,
        lossless=recipe.rollout.media == "lossless", previews=PreviewRule.of(recipe),
    )  # fmt: skip
    return (LoanableGenerator(each, publisher(each)) for each in generators)


class TrainerApp:
    def __init__(
        self,
        training: Training,
        recipe: Recipe,
        context: WorkerContext,
        *,
        generators: Sequence[GeneratingDevice] = (),
        encoded: EncodedConditions | None = None,
        check: CheckStored | None = None,
    ) -> None:
        """``generators``: one for each of the devices of ``training``, over the same weights; none
        if they may not be lent. ``encoded``: where conditions come from, if they do not encode.
        ``check``: looks at what is stored of a fragment."""
        self._training, self._recipe = training, recipe
        self._bus, self._store, self._worker = context.bus, context.store, context.worker
        self._max_staleness = recipe.schedule.staleness_limit
        self._exact = recipe.largest_weight is None
        """Whether everybody computes with the same weights."""
        assert len(generators) in (0, len(training.devices))
        cache = TrajectoryCache()
        loanable = _loanable(generators, recipe, context, encoded, cache)
        devices = [TrainerDevice(*each) for each in zip_longest(training.devices, loanable)]
        self._agent = LoanAgent(devices, context, encoded) if generators else None
        self._pool = DevicePool(
            devices, self._worker, self._agent, trained_steps=recipe.sampling.window,
            trained_samples=recipe.trained_samples, merged_steps=recipe.sampling.merged_steps,
            divides_steps=recipe.run_schedule.tsp,
        )  # fmt: skip
        self._versions = Versions(context)
        self._storing: asyncio.Task[None] | None = None
        """Stores the optimizer's state of a version that is committed."""
        self._fetcher = GroupFetcher(recipe, context, cache, check)
        self._batches = BatchTraining(training, self._pool, self._fetcher, recipe, context)
        self._resuming = Resuming(
            training, self._pool, self._batches, self._fetcher, self._versions, recipe, context
        )
        self._failures, self._batch = Failures(), 0
        """Number of the batch in training."""
        self._stepped_at = 0.0
        """Monotonic seconds at the last optimizer step, or at the beginning."""

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.report(self._bus))
            tasks.create_task(self._train())
            tasks.create_task(self._pool.run())
            if self._agent is not None:
                tasks.create_task(self._agent.run())

    async def _train(self) -> None:
        parent: ParentVersion | None = None
        newest = await newest_commit(self._store, self._bus.run)
        await self._wait_if_failed(0 if newest is None else newest.policy.version)
        while True:
            try:
                parent = await (self._recover() if parent is None else self._train_batch(parent))
            except CommitConflict as error:
                log.warning("commit_conflict", error=str(error))
                parent = None
            except Untrainable as error:
                log.warning("batch_begun_again", reason=str(error))
                parent = None
            except (BatchFailed, OutOfMemory) as error:
                batch = self._batch if parent is None else parent.version
                parent, is_final = None, self._failures.is_final(batch, error)
                if isinstance(error, OutOfMemory):
                    since = "the run has failed" if is_final else AGAIN[error.smaller]
                    self._worker.note_shortage(MemoryShortage.of(error, since))
                if is_final:
                    await self._fail_run(batch, error)

    def _failure(self, batch: int, error: DigenRLError) -> RunFailed:
        self._worker.rest()
        failed = RunFailed(batch=batch, worker=self._worker.address, reason=str(error)[:4000])
        log.error("run_failed", batch=batch, reason=failed.reason)
        return failed

    async def _fail_run(self, batch: int, error: DigenRLError) -> None:
        """Report why the run cannot go on, and wait until somebody resumes it."""
        failed = self._failure(batch, error)
        await self._bus.publish(failed)
        await self._wait_for_resume(failed)

    async def _wait_for_resume(self, failed: RunFailed) -> None:
        told = False
        wanted = self._of_failures
        async with contextlib.aclosing(self._bus.follow(subjects.EVT, wanted)) as events:
            async for received in events:
                told = told or received.message == failed
                event = received.message
                if told and isinstance(event, OperatorRequest) and event.action == "resume":
                    log.info("resumed", batch=failed.batch)
                    return

    @property
    def _of_failures(self) -> list[str]:
        kinds = ("run_failed", "operator_request")
        return [subjects.event_subject(self._bus.run, kind) for kind in kinds]

    async def _wait_if_failed(self, version: int) -> None:
        """Wait until somebody resumes a run whose next batch has failed before this process was
        started: it would fail once more."""
        told, _ = await self._bus.stored(subjects.EVT, self._of_failures)
        failed: RunFailed | None = None
        for received in told:
            event = received.message
            if isinstance(event, RunFailed):
                failed = event
            elif isinstance(event, OperatorRequest) and event.action == "resume":
                failed = None
        if failed is not None and failed.batch == version:
            log.warning("waits_for_resume", batch=failed.batch, reason=failed.reason)
            self._worker.rest()
            await self._wait_for_resume(failed)

    async def _recover(self) -> ParentVersion:
        """Go back to the newest commit, or make the first one; announce it either way."""
        self._worker.activity = "loading_weights"
        await self._states_are_stored()
        while (record := await newest_commit(self._store, self._bus.run)) is None:
            with contextlib.suppress(CommitConflict):  # another trainer was first: believe it
                taken = await self._training.copy(states=True)
                await self._versions.commit(NewVersion(await taken()))
        try:
            self._use(None)
            self._batch = record.policy.version
            await self._resuming.to(record)
            self._use(record.policy)
            await self._store_states_of(record)
        except IntegrityError:  # deleted meanwhile, if another trainer has made newer ones
            newest = await newest_commit(self._store, self._bus.run)
            if newest is None or newest.policy.version == record.policy.version:
                raise
            return await self._recover()
        log.info("recovered", version=record.policy.version)
        await self._versions.announce(record)
        self._stepped_at = time.monotonic()
        committed = asyncio.get_running_loop().create_future()
        committed.set_result(record)
        admissible = await admissible_versions(
            self._store, self._bus.run, record.policy, self._max_staleness
        )
        before = admissible[1] if len(admissible) > 1 else None
        return ParentVersion(record.policy.version, before, committed)

    async def _train_batch(self, parent: ParentVersion) -> ParentVersion:
        """Train batch k from version k, and make version k + 1.

        Raises:
            CommitConflict: if another trainer has made version k, or k + 1.
        """
        self._worker.rest()
        self._batch = parent.version
        batch = self._batches.open(parent.version)
        groups = self._fetcher.groups(
            parent.version, parent.before, batch.counted, parent.committed,
            partial(self._batches.sent_again, batch),
        )  # fmt: skip
        await self._batches.run(batch, groups, parent_commit=parent.committed)
        parent_record, version = await parent.committed, parent.version + 1
        with_states = self._recipe.commits_with_states(version)
        if states := with_states or version % self._recipe.checkpoint_every == 0:
            await self._states_are_stored()
        began = time.monotonic()
        with self._worker.doing("committing"):
            async with self._pool.all_held() as held:
                reach("trainer.before-step")
                with self._worker.progress.of("the optimizer step"):
                    step = await self._training.step(batch.number, batch.scale)
                reach("trainer.after-step")
                self._use(None)
                first = held.first()
            num_samples = sum(len(group.rewards) for group in batch.in_index_order)
            metrics = batch.metrics(step) | self._pace(num_samples)
            if self._exact:
                _watch_ratio(metrics)
            new = partial(
                NewVersion, parent=parent_record, trained=batch.in_index_order, metrics=metrics,
                began=began, commands=batch.commands_in_order, with_states=with_states,
            )  # fmt: skip
            committed = asyncio.create_task(self._commit(first, new, states=states))
            if self._max_staleness == 0:
                await committed
        before = parent_record.policy if self._max_staleness else None
        return ParentVersion(version, before, committed)

    async def _commit(
        self,
        first: contextlib.AsyncExitStack,
        new: Callable[[Snapshot], NewVersion],
        *,
        states: bool,
    ) -> CommitRecord:
        """Copy a version, for which the first device is held, and let that go; then digest, store,
        commit and announce it, and begin to store what its commit does not wait for."""
        async with first:
            taken = await self._training.copy(states=states)
        snapshot = await taken()
        version = new(snapshot)
        self._use(version.policy)
        record = await self._versions.publish(version)
        if snapshot.checkpoint and not version.with_states:
            self._storing = asyncio.create_task(self._versions.add_states(record, snapshot))
        return record

    async def _store_states_of(self, record: CommitRecord) -> None:
        """Begin to store the state that batches which were trained again have led to, if that of
        this version or of one since the newest state should be there.

        So each start makes up for what the one before has not stored, and a record is never
        resumed from more than twice `checkpoint_every` less one versions before, however often a
        trainer ends while it stores.
        """
        at, every = self._versions.resumption, self._recipe.checkpoint_every
        if at is not None and at.version // every < record.policy.version // every:
            async with self._pool.all_held():
                taken = await self._training.copy(states=True)
            adding = self._versions.add_states(record, await taken())
            self._storing = asyncio.create_task(adding)

    async def _states_are_stored(self) -> None:
        """Wait until nothing is stored any more but a version's weights."""
        storing, self._storing = self._storing, None
        if storing is not None:
            await storing

    def _pace(self, num_samples: int) -> dict[str, float]:
        """Return the metrics of the time since the last optimizer step."""
        now = time.monotonic()
        seconds, self._stepped_at = now - self._stepped_at, now
        return {"step_seconds": seconds, "samples_per_second": num_samples / seconds}

    def _use(self, policy: Policy | None) -> None:
        """Say which version the devices generate by; None while its digest is not known."""
        if self._agent is not None:
            self._agent.use(policy)


def _watch_ratio(metrics: Mapping[str, float]) -> None:
    """Warn of an error that rounding hardly explains; larger ones end the run before their step is
    taken."""
    error = metrics.get("onpolicy_ratio_error", 0.0)
    if error > ALARMING_RATIO_ERROR:
        log.warning("onpolicy_ratio_alarm", error=error, alarm_above=ALARMING_RATIO_ERROR)
