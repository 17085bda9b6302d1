"""Commits the version that members have stepped to: any of them can, from the same list."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from services.trainer.batch.measures import batch_metrics, trained_group
from services.trainer.engine.storing import store_sets, store_states
from shared.bus.traces import TracedWork, did
from shared.devices.protocols import Snapshot
from shared.errors import ContractError
from shared.messages import subjects
from shared.messages.contracts import ObjectRef, Policy, TrainGroup
from shared.messages.fluid import Share, WeightsStored
from shared.messages.records import ExchangeLevels, WeightsChange
from shared.process.failpoints import reach
from shared.process.worker import WorkerContext, patiently
from shared.run.commands import store_commands
from shared.run.commits import CommitRecord, commit, stored_digest
from shared.run.layout import weights_folder
from shared.run.manifest import CHANGE
from shared.telemetry import STAGE_SECONDS

WHOLE_EVERY = 50
"""Versions from one without a stored change to the next: every device reads all of its weights."""

log = structlog.get_logger()
EXACT = ExchangeLevels()


@dataclass(frozen=True, slots=True)
class SteppedVersion:
    """A version that this member has stepped to; other members may lack it."""

    policy: Policy
    checksum: str
    shares: tuple[Share, ...] = ()
    """Owners and content of the totals, one update after the other; empty for the first version."""
    metrics: Mapping[str, float] | None = None
    """Metrics of the optimizer step."""
    began: float = 0.0
    """Monotonic seconds at the beginning of the step."""
    attempt: int = 0
    """Attempt at the batch whose step it was."""
    exchange: ExchangeLevels = EXACT
    base: str | None = None
    """Digest of the weights from which the batch's first step went."""

    @property
    def batch(self) -> int:
        return self.policy.version - 1


class GroupsLost(ContractError):
    """The bus has lost what was sent of groups that are in a step."""


class VersionCommits:
    def __init__(self, context: WorkerContext) -> None:
        self._bus = context.bus
        self._store = context.store
        self._worker = context.worker

    async def commit(self, version: SteppedVersion, snapshot: Snapshot) -> CommitRecord:
        """Store a version and commit it; retry until the store responds.

        Raises:
            CommitConflict: if it is committed already.
        """
        record = await patiently(lambda: self._committed(version, snapshot), "store_unavailable")
        seconds = time.monotonic() - version.began if version.shares else 0.0
        if version.shares:
            STAGE_SECONDS.labels(stage="commit").observe(seconds)
        await self.announce(record, seconds)
        for group in record.trained:
            place = TracedWork(version.batch, group.group)
            did("commit", place, seconds=seconds, version=version.policy.version)
        return record

    async def announce(
        self, record: CommitRecord, seconds: float = 0.0, *, again: bool = False
    ) -> None:
        """Announce that a version is committed; ``again``: as every starting member does. All
        members receive each announcement, so one is enough."""
        policy = record.policy
        once = f"again.{policy.version}.{policy.weights_digest}" if again else None
        news = record.announcement(worker=self._worker.address, seconds=seconds)
        await self._bus.publish(news, once=once)

    async def _committed(self, stepped: SteppedVersion, snapshot: Snapshot) -> CommitRecord:
        run, version = self._bus.run, stepped.policy.version
        trained, sampling = await store_sets(self._store, run, snapshot)
        weights = await self._with_change(stepped, snapshot, sampling or trained)
        if stepped.shares:
            await self._offer(stepped, weights)
        groups = await self._groups(stepped)
        commands = None
        if groups:  # so that the version can be made again, if it is damaged in the store
            commands = await store_commands(self._store, run, stepped.batch, groups)
        checkpoint = await store_states(self._store, run, snapshot)
        trained_groups = tuple(trained_group(each) for each in groups)
        metrics = dict(stepped.metrics or {})
        if groups:
            advantages = [each for group in groups for each in group.advantages]
            metrics = {**batch_metrics(stepped.batch, trained_groups, advantages), **metrics}
            if seconds := metrics.get("step_seconds"):
                metrics["samples_per_second"] = len(advantages) / seconds
        record = CommitRecord(
            run=run,
            policy=stepped.policy,
            parent=await stored_digest(self._store, run, version - 1) if version else None,
            weights=weights,
            trained_digest=snapshot.digest if sampling else None,
            trained_weights=trained if sampling else None,
            checkpoint=checkpoint,
            commands=commands,
            trained=trained_groups,
            metrics=metrics,
            worker=self._worker.address,
            checksum=stepped.checksum,
            shares=stepped.shares,
            exchange=stepped.exchange,
        )
        reach("fluid.commits")
        await commit(self._store, record)
        log.info("committed", version=version, **metrics)
        return record

    async def _with_change(
        self, stepped: SteppedVersion, snapshot: Snapshot, weights: ObjectRef
    ) -> ObjectRef:
        """Store the change that has made a version next to its weights."""
        is_whole = stepped.policy.version % WHOLE_EVERY == 0
        if snapshot.change is None or stepped.base is None or is_whole:
            return weights
        folder = weights_folder(self._bus.run)
        ref = await self._store.put(folder, snapshot.change, suffix=CHANGE)
        change = WeightsChange(base=stepped.base, ref=ref)
        return weights.model_copy(update={"change": change})

    async def _offer(self, version: SteppedVersion, weights: ObjectRef) -> None:
        """Publish the location of the weights before the states: generating workers wait for the
        weights only."""
        await self._bus.publish(
            WeightsStored(
                batch=version.batch,
                attempt=version.attempt,
                worker=self._worker.address,
                policy=version.policy,
                weights=weights,
            )
        )
        reach("fluid.offered")

    async def _groups(self, version: SteppedVersion) -> list[TrainGroup]:
        """Return the groups that the shares name, by their index.

        Raises:
            GroupsLost: if one is not on the bus.
        """
        if not version.shares:
            return []
        wanted = {(p.group, p.attempt) for share in version.shares for p in share.pieces}
        subject = subjects.batch_subject(self._bus.run, subjects.TRAIN, version.batch)
        stored, _ = await self._bus.stored(subjects.TRAIN, [subject])
        messages = [each.message for each in stored]
        groups = {
            (each.group, each.attempt): each
            for each in messages
            if isinstance(each, TrainGroup) and (each.group, each.attempt) in wanted
        }
        if groups.keys() != wanted:
            lacking = sorted(wanted - groups.keys())[0]
            raise GroupsLost(f"group {lacking} of batch {version.batch} is not on the bus")
        return [groups[which] for which in sorted(wanted)]
