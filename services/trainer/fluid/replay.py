"""Recomputes a version that is damaged in the store: restores the newest intact older version and
trains the batches since then again, from their stored commands.

This process computes the sum of every member and adds the sums in the members' order. With
`trainer.deterministic` the result has the same bits. Without it the bits are the same only if each
member trained its pieces in the order of the commit record. The checksum decides.
"""

from dataclasses import replace

import structlog

from services.trainer import limits
from services.trainer.batch.fetcher import AdmittedGroup, GroupFetcher
from services.trainer.engine.storing import store_version
from services.trainer.fluid.committing import SteppedVersion
from services.trainer.fluid.exchange import Exchange, MemberRound, Sum
from services.trainer.fluid.protocols import FluidDevice
from shared.devices.protocols import GroupData
from shared.errors import ContractError, IntegrityError
from shared.messages.fluid import ExchangeSums, Share
from shared.process.worker import WorkerContext
from shared.run.commands import read_commands
from shared.run.commits import CommitRecord, read_commit
from shared.run.shards import open_tensors
from shared.telemetry import CORRUPT

log = structlog.get_logger()


class Replay:
    def __init__(
        self,
        device: FluidDevice,
        exchange: Exchange,
        fetcher: GroupFetcher,
        context: WorkerContext,
        *,
        by_group: bool,
        num_updates: int,
        num_groups: int,
    ) -> None:
        self._device = device
        self._exchange = exchange
        self._fetcher = fetcher
        self._run, self._store = context.bus.run, context.store
        self._by_group = by_group
        self._groups_per_update = num_groups // num_updates
        """Number of groups of one update."""

    async def recompute(self, damaged: CommitRecord, error: Exception) -> SteppedVersion:
        """Recompute a damaged version, put it in use and store it. The caller holds the device.

        Raises:
            IntegrityError: if no older version is intact, or the result has other bits.
        """
        version = damaged.policy.version
        CORRUPT.labels(what="checkpoint").inc()
        remedy = "an older version is used, and the batches since then are trained again"
        log.error("version_damaged", version=version, error=str(error), then=remedy)
        first = await self._restore_intact(damaged)
        for number in range(first, version):
            record = damaged if number + 1 == version else await self._record(number + 1)
            await self._train(record)
        if await self._device.checksum() != damaged.checksum:
            raise IntegrityError(
                f"batches {first} to {version - 1}, trained again, give other bits"
            )
        await store_version(self._store, self._run, await self._device.weights())
        log.warning("version_made_again", version=version, since=first)
        return SteppedVersion(damaged.policy, damaged.checksum or "", damaged.shares)

    async def _restore_intact(self, damaged: CommitRecord) -> int:
        """Restore the newest older version that is intact, and return its number."""
        for version in range(damaged.policy.version - 1, -1, -1):
            record = await read_commit(self._store, self._run, version)
            if record is None or not await self._has_checkpoint(record):
                continue
            trained = record.learned
            try:
                weights = await open_tensors(self._store, trained.ref, trained.digest)
                checkpoint = await open_tensors(self._store, record.checkpoint, trained.digest)
                await self._device.restore(weights, checkpoint)
                return version
            except (IntegrityError, ContractError) as error:
                log.error("version_damaged", version=version, error=str(error))
        raise IntegrityError("no older version is intact")

    async def _has_checkpoint(self, record: CommitRecord) -> bool:
        """Whether the checkpoint of a version is still stored."""
        ref = record.checkpoint
        return await self._store.backend.size(ref.key) == ref.size

    async def _train(self, record: CommitRecord) -> None:
        """Train the batch of a version again, update by update."""
        commands = await read_commands(self._store, record)
        groups = {index: group async for index, group in self._fetcher.fetch_trained(commands)}
        for update, first in enumerate(range(0, len(groups), self._groups_per_update)):
            part = range(first, first + self._groups_per_update)
            shares = tuple(
                each for each in record.shares if each.pieces and each.pieces[0].group in part
            )
            await self._update(record, update, shares, groups)
        if self._device.steps_concurrently:
            self._device.take()
        log.info("batch_trained_again", batch=record.batch)

    async def _update(
        self, record: CommitRecord, update: int, shares: tuple[Share, ...],
        groups: dict[int, AdmittedGroup],
    ) -> None:  # fmt: skip
        sums = {share.worker: await self._compute_sum(share, groups) for share in shares}
        parent = await self._record(record.policy.version - 1)
        message = ExchangeSums(
            batch=parent.policy.version, attempt=0, update=update, round=0, policy=parent.policy,
            committer=shares[0].worker, shares=shares, max_seconds=limits.SOLO_MEETING_S,
            up=record.exchange.up,
        )  # fmt: skip
        me = shares[0].worker
        round_ = MemberRound.from_message(message, self._run, me, by_group=self._by_group)
        total = await self._exchange.local_total(round_, sums)
        measure = replace(await self._device.measure(total), level=record.exchange.down)
        await self._device.step(message.batch, total, measure)

    async def _compute_sum(self, share: Share, groups: dict[int, AdmittedGroup]) -> Sum:
        """Compute a member's sum again."""
        self._device.begin()
        for piece in share.pieces:
            work = groups[piece.group].work
            if isinstance(work, GroupData):
                await self._device.train(work, piece)
            else:
                await self._device.skip(piece)
        return await self._device.own_sum()

    async def _record(self, version: int) -> CommitRecord:
        record = await read_commit(self._store, self._run, version)
        if record is None:
            raise IntegrityError(f"the commit record of version {version} is missing")
        return record
