"""The trainer: trains groups as they become whole, and commits one optimizer step per batch.

Its memory holds nothing that is not also elsewhere: the newest commit record says which weights
and optimizer state it starts from, and the stream of groups is read from the first group of the
batch. So a killed trainer does the batch again, and a zombie's commit is refused.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import structlog

from services.trainer.engine import TrainerEngine
from services.trainer.helper import Helper
from services.trainer.order import in_order
from shared import subjects
from shared.admission import Admissible, check_admission
from shared.bus import Bus
from shared.commits import CommitRecord, TrainedGroup, commit, newest_commit, read_commit
from shared.contracts import (
    FragmentFailed,
    FragmentScored,
    GroupTrained,
    ObjectRef,
    Policy,
    PolicyPublished,
    TrainGroup,
)
from shared.diffusion.generation import Generator
from shared.diffusion.publishing import FragmentPublisher
from shared.errors import AdmissionError, CommitConflict, ContractError, IntegrityError
from shared.loan import DeviceUse
from shared.recipe import Recipe
from shared.run_store import checkpoints_folder, weights_folder
from shared.store import ObjectStore
from shared.telemetry import FRAGMENTS, STAGE_SECONDS
from shared.worker import Worker

PREFETCHED_GROUPS = 2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FetchedGroup:
    command: TrainGroup
    trajectories: list[bytes]
    conditions: bytes


class TrainerApp:
    def __init__(
        self,
        engine: TrainerEngine,
        recipe: Recipe,
        bus: Bus,
        store: ObjectStore,
        worker: Worker,
        *,
        generator: Generator | None,
    ) -> None:
        """``generator``: over the engine's own network, if its device may be lent."""
        self._engine = engine
        self._recipe = recipe
        self._bus = bus
        self._store = store
        self._worker = worker
        self._conditions: dict[str, bytes] = {}
        self._device = asyncio.Lock()
        """Training and generation take turns; whoever asks first is next."""
        self._use = DeviceUse()
        self._helper: Helper | None = None
        if generator is not None:
            publisher = FragmentPublisher(generator, bus, store, worker)
            self._helper = Helper(generator, publisher, bus, worker, self._device, self._use)

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.report(self._bus))
            tasks.create_task(self._train())
            if self._helper is not None:
                tasks.create_task(self._helper.run())

    async def _train(self) -> None:
        head = await self._recover()
        while True:
            try:
                head = await self._train_batch(head)
            except CommitConflict as error:
                log.warning("commit_conflict", error=str(error))
                head = await self._recover()

    async def _recover(self) -> CommitRecord:
        """Go back to the newest commit, or make the first one; announce it either way."""
        self._worker.activity = "loading_weights"
        head = await newest_commit(self._store, self._bus.run)
        if head is None:
            with contextlib.suppress(CommitConflict):  # another trainer was first: believe it
                await self._commit(parent=None, trained=(), metrics={})
            head = await newest_commit(self._store, self._bus.run)
            assert head is not None
        adapter = await self._store.get(head.weights)
        checkpoint = await self._store.get(head.checkpoint)
        async with self._device:
            await asyncio.to_thread(self._engine.restore, adapter, checkpoint)
        if self._engine.weights_digest() != head.policy.weights_digest:
            raise IntegrityError(f"version {head.policy.version}: its weights have another digest")
        log.info("recovered", version=head.policy.version)
        await self._announce(head)
        return head

    async def _train_batch(self, head: CommitRecord) -> CommitRecord:
        """Train batch k from version k, commit version k + 1."""
        self._worker.activity = self._worker.idle
        self._worker.policy_version = head.policy.version
        self._engine.begin()
        admissible = await self._admissible(head)
        trained: dict[int, TrainedGroup] = {}
        busy = 0.0
        async with contextlib.aclosing(self._groups(admissible)) as groups:
            ordered = in_order(groups, self._recipe.trainer.order)
            async for index, group in ordered:
                if index in trained:
                    continue
                busy += await self._train_group(head, group)
                trained[index] = _record(group.command)
                if len(trained) == self._recipe.batch.groups:
                    break
        began = time.monotonic()
        in_index_order = tuple(trained[index] for index in sorted(trained))
        metrics = _reward_metrics(in_index_order) | {"train_seconds": busy}
        async with self._device:
            with self._worker.doing("committing"), self._use.use("training"):
                metrics |= await asyncio.to_thread(self._engine.step, head.policy.version)
                record = await self._commit(parent=head, trained=in_index_order, metrics=metrics)
        seconds = time.monotonic() - began
        STAGE_SECONDS.labels(stage="commit").observe(seconds)
        await self._announce(record, seconds)
        return record

    async def _admissible(self, head: CommitRecord) -> Admissible:
        """The versions that may have generated what is trained into ``head``, newest first."""
        version = head.policy.version
        if self._recipe.schedule.max_staleness == 0 or version == 0:
            return (head.policy,)
        before = await read_commit(self._store, self._bus.run, version - 1)
        return (head.policy,) if before is None else (head.policy, before.policy)

    async def _train_group(self, head: CommitRecord, group: FetchedGroup) -> float:
        """Add its gradient; gives the seconds that the device took."""
        command = group.command
        staleness = head.policy.version - command.policy.version
        async with self._device:
            began = time.monotonic()
            with self._worker.doing("training"), self._use.use("training"):
                await asyncio.to_thread(
                    self._engine.accumulate,
                    group.trajectories, group.conditions, command.advantages, staleness,
                )  # fmt: skip
            seconds = time.monotonic() - began
        STAGE_SECONDS.labels(stage="trainer").observe(seconds)
        self._worker.num_done += 1
        await self._bus.publish(
            GroupTrained(
                batch=command.batch,
                group=command.group,
                attempt=command.attempt,
                worker=self._worker.address,
                seconds=seconds,
            )
        )
        return seconds

    async def _groups(self, admissible: Admissible) -> AsyncGenerator[tuple[int, FetchedGroup]]:
        """The admitted groups of the batch, fetched ahead of their training."""
        batch = admissible[0].version
        fetched: asyncio.Queue[FetchedGroup] = asyncio.Queue(PREFETCHED_GROUPS)

        async def fetch() -> None:
            subject = subjects.batch_subject(self._bus.run, subjects.TRAIN, batch)
            async with contextlib.aclosing(self._bus.follow(subjects.TRAIN, [subject])) as stream:
                async for received in stream:
                    if isinstance(received.message, TrainGroup):
                        group = await self._admitted(received.message, admissible)
                        if group is not None:
                            await fetched.put(group)

        fetching = asyncio.create_task(fetch())
        upcoming = asyncio.create_task(fetched.get())
        try:
            while True:
                await asyncio.wait({upcoming, fetching}, return_when=asyncio.FIRST_COMPLETED)
                if not upcoming.done():
                    await fetching  # raises what ended it
                group = await upcoming
                upcoming = asyncio.create_task(fetched.get())
                yield group.command.group, group
        finally:
            upcoming.cancel()
            fetching.cancel()
            await asyncio.gather(upcoming, fetching, return_exceptions=True)

    async def _admitted(self, command: TrainGroup, admissible: Admissible) -> FetchedGroup | None:
        """The group with its tensors; None, and its faulty fragments reported, if it may not
        be trained."""
        trajectories, refused = [], False
        for fragment in command.fragments:
            try:
                check_admission(fragment, command, admissible)
                trajectories.append(await self._store.get(fragment.stored.trajectory))
                conditions = await self._fetch_conditions(fragment.stored.conditions)
            except (AdmissionError, IntegrityError, ContractError) as error:
                refused = True
                await self._refuse(fragment, error)
        return None if refused else FetchedGroup(command, trajectories, conditions)

    async def _fetch_conditions(self, ref: ObjectRef) -> bytes:
        if ref.sha256 not in self._conditions:
            self._conditions[ref.sha256] = await self._store.get(ref)
        return self._conditions[ref.sha256]

    async def _refuse(self, fragment: FragmentScored, error: Exception) -> None:
        log.error("fragment_refused", slot=str(fragment.fragment.slot), error=str(error))
        FRAGMENTS.labels(stage="admission", outcome="refused").inc()
        await self._bus.publish(
            FragmentFailed(slot=fragment.fragment.slot, stage="admission", reason=str(error)[:4000])
        )

    async def _commit(
        self,
        *,
        parent: CommitRecord | None,
        trained: tuple[TrainedGroup, ...],
        metrics: dict[str, float],
    ) -> CommitRecord:
        """Raises CommitConflict if the version exists already."""
        weights = await asyncio.to_thread(self._engine.weights)
        run = self._bus.run
        adapter, checkpoint = await asyncio.gather(
            self._store.put(weights_folder(run), weights.adapter, suffix=".safetensors"),
            self._store.put(checkpoints_folder(run), weights.checkpoint, suffix=".safetensors"),
        )
        version = 0 if parent is None else parent.policy.version + 1
        record = CommitRecord(
            run=run,
            policy=Policy(version=version, weights_digest=weights.digest),
            parent=None if parent is None else parent.digest(),
            weights=adapter,
            checkpoint=checkpoint,
            trained=trained,
            metrics=metrics,
            worker=self._worker.address,
        )
        await commit(self._store, record)
        log.info("committed", version=version, **metrics)
        return record

    async def _announce(self, record: CommitRecord, seconds: float = 0.0) -> None:
        self._worker.policy_version = record.policy.version
        await self._bus.publish(
            PolicyPublished(
                policy=record.policy,
                weights=record.weights,
                worker=self._worker.address,
                seconds=seconds,
            )
        )


def _record(command: TrainGroup) -> TrainedGroup:
    names = command.fragments[0].parts
    return TrainedGroup(
        group=command.group,
        attempt=command.attempt,
        policy_version=command.policy.version,
        fragments=tuple(
            (f.fragment.first_sample, f.fragment.num_samples, f.fragment.attempt)
            for f in command.fragments
        ),
        workers=tuple(f.generated_by for f in command.fragments),
        rewards=tuple(reward for f in command.fragments for reward in f.rewards),
        parts={name: tuple(s for f in command.fragments for s in f.parts[name]) for name in names},
    )


def _reward_metrics(trained: tuple[TrainedGroup, ...]) -> dict[str, float]:
    rewards = [reward for group in trained for reward in group.rewards]
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    return {"reward_mean": mean, "reward_std": variance**0.5}
