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
from services.trainer.order import in_order
from shared import subjects
from shared.bus import Bus
from shared.commits import CommitRecord, TrainedGroup, commit, newest_commit
from shared.contracts import (
    FragmentFailed,
    FragmentScored,
    ObjectRef,
    Policy,
    PolicyPublished,
    TrainGroup,
)
from shared.errors import AdmissionError, CommitConflict, ContractError, IntegrityError
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
        self, engine: TrainerEngine, recipe: Recipe, bus: Bus, store: ObjectStore, worker: Worker
    ) -> None:
        self._engine = engine
        self._recipe = recipe
        self._bus = bus
        self._store = store
        self._worker = worker
        self._conditions: dict[str, bytes] = {}

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.report(self._bus))
            tasks.create_task(self._train())

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
        trained: dict[int, TrainedGroup] = {}
        busy = 0.0
        async with contextlib.aclosing(self._groups(head.policy)) as groups:
            ordered = in_order(groups, self._recipe.trainer.order)
            async for index, group in ordered:
                if index in trained:
                    continue
                began = time.monotonic()
                with self._worker.doing("training"):
                    await asyncio.to_thread(
                        self._engine.accumulate,
                        group.trajectories, group.conditions, group.command.advantages,
                    )  # fmt: skip
                seconds = time.monotonic() - began
                busy += seconds
                STAGE_SECONDS.labels(stage="trainer").observe(seconds)
                trained[index] = _record(group.command)
                self._worker.num_done += 1
                if len(trained) == self._recipe.batch.groups:
                    break
        with self._worker.doing("committing"):
            began = time.monotonic()
            metrics = await asyncio.to_thread(self._engine.step, head.policy.version)
            in_index_order = tuple(trained[index] for index in sorted(trained))
            metrics |= _reward_metrics(in_index_order) | {"train_seconds": busy}
            record = await self._commit(parent=head, trained=in_index_order, metrics=metrics)
            STAGE_SECONDS.labels(stage="commit").observe(time.monotonic() - began)
        await self._announce(record)
        return record

    async def _groups(self, policy: Policy) -> AsyncGenerator[tuple[int, FetchedGroup]]:
        """The admitted groups of the batch, fetched ahead of their training."""
        batch = policy.version
        fetched: asyncio.Queue[FetchedGroup] = asyncio.Queue(PREFETCHED_GROUPS)

        async def fetch() -> None:
            subject = subjects.batch_subject(self._bus.run, subjects.TRAIN, batch)
            async with contextlib.aclosing(self._bus.follow(subjects.TRAIN, [subject])) as stream:
                async for received in stream:
                    if isinstance(received.message, TrainGroup):
                        group = await self._admitted(received.message, policy)
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

    async def _admitted(self, command: TrainGroup, policy: Policy) -> FetchedGroup | None:
        """The group with its tensors; None, and its faulty fragments reported, if it may not
        be trained."""
        trajectories, refused = [], False
        for fragment in command.fragments:
            try:
                check_admission(fragment, command, policy)
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
            worker=self._worker.name,
        )
        await commit(self._store, record)
        log.info("committed", version=version, **metrics)
        return record

    async def _announce(self, record: CommitRecord) -> None:
        self._worker.policy_version = record.policy.version
        await self._bus.publish(
            PolicyPublished(policy=record.policy, weights=record.weights, worker=self._worker.name)
        )


def check_admission(fragment: FragmentScored, command: TrainGroup, policy: Policy) -> None:
    """Staleness 0, and generated by the very weights that are about to be trained.

    Raises:
        AdmissionError: saying which of these does not hold.
    """
    if command.batch != policy.version or command.policy != policy or fragment.policy != policy:
        raise AdmissionError(
            f"batch {command.batch} by version {fragment.policy.version} may not be trained "
            f"into version {policy.version}"
        )
    if fragment.stored.weights_digest != policy.weights_digest:
        raise AdmissionError(
            f"it was generated by weights {fragment.stored.weights_digest[:12]}, "
            f"version {policy.version} is {policy.weights_digest[:12]}"
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
        rewards=tuple(reward for f in command.fragments for reward in f.rewards),
        parts={name: tuple(s for f in command.fragments for s in f.parts[name]) for name in names},
    )


def _reward_metrics(trained: tuple[TrainedGroup, ...]) -> dict[str, float]:
    rewards = [reward for group in trained for reward in group.rewards]
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    return {"reward_mean": mean, "reward_std": variance**0.5}
