"""Goes back to the newest commit of a run: to its weights, and to the optimizer's state.

That state is stored after the commit, or not of every version. Then the newest one that is complete
is put in use, and the batches since then are trained again from what is stored of them, without new
records. With `trainer.deterministic` that ends in the same bits. Without it, or on other hardware,
gradients are rounded otherwise, and so is the optimizer's state: the weights that were committed
take the place of those that were trained again, so that no version has two sets of weights. If a
batch is no longer there, the state is older, which the log says.

Where weights or state are damaged, an older version that is whole is gone back to in the same way.
"""

import asyncio
import contextlib

import structlog

from services.trainer.batch.fetcher import GroupFetcher
from services.trainer.batch.training import BatchTraining
from services.trainer.devices.pool import DevicePool
from services.trainer.versions import Versions
from shared.devices.protocols import Training
from shared.errors import BatchFailed, ContractError, IntegrityError
from shared.process.worker import WorkerContext
from shared.recipe.recipe import Recipe
from shared.run.checkpoints import (
    Resumption,
    forget_checkpoint,
    newest_checkpoint,
    older_checkpoints,
    read_commands,
)
from shared.run.commits import CommitRecord, newest_commit, read_commit, remedy
from shared.run.shards import is_whole, open_tensors
from shared.telemetry import CORRUPT

log = structlog.get_logger()


class Resuming:
    def __init__(
        self,
        training: Training,
        pool: DevicePool,
        batches: BatchTraining,
        fetcher: GroupFetcher,
        versions: Versions,
        recipe: Recipe,
        context: WorkerContext,
    ) -> None:
        self._training = training
        self._pool = pool
        self._batches = batches
        self._fetcher = fetcher
        self._versions = versions
        self._deterministic = recipe.trainer.deterministic
        self._run, self._store = context.bus.run, context.store
        self._worker = context.worker

    async def to(self, newest: CommitRecord) -> None:
        """Put the run's newest version in use.

        Raises:
            IntegrityError: if something of it is not in the store, or not what its record says.
        """
        at, is_damaged = await self._restored(newest)
        self._versions.resumption = at
        if at.version == newest.policy.version:
            return
        numbers = range(at.version, newest.policy.version)
        note = f"trains batches {numbers[0]} to {numbers[-1]} again: the optimizer's state is of "
        with self._worker.saying(f"{note}version {at.version} (trainer.checkpoint_every)"):
            log.warning("batches_trained_again", first=numbers[0], last=numbers[-1])
            await self._train_again(numbers)
        await self._settle(newest, is_damaged=is_damaged)

    async def _restored(self, newest: CommitRecord) -> tuple[Resumption, bool]:
        """Restore the newest version whose weights and optimizer state are whole; return it, and
        whether a newer one is damaged.

        Raises:
            IntegrityError, ContractError: of the newest one, if none is.
        """
        at = await newest_checkpoint(self._store, newest)
        try:
            await self._restore(newest, at)
            return at, False
        except (IntegrityError, ContractError) as error:
            first = error
        latest = await newest_commit(self._store, self._run)
        if latest is not None and latest.policy.version > newest.policy.version:
            raise first  # deleted, since another trainer has made newer ones
        await self._count_damage(at, first)
        older = older_checkpoints(self._store, newest, at.version)
        async with contextlib.aclosing(older):
            async for at in older:
                try:
                    await self._restore(newest, at)
                    return at, True
                except (IntegrityError, ContractError) as error:
                    await self._count_damage(at, error)
        raise first

    async def _count_damage(self, at: Resumption, error: Exception) -> None:
        CORRUPT.labels(what="checkpoint").inc()
        then = "an older version is used, and the batches since are trained again"
        log.error("version_damaged", version=at.version, error=str(error), then=then)
        await forget_checkpoint(self._store, self._run, at.version)

    async def _restore(self, newest: CommitRecord, at: Resumption) -> None:
        is_newest = at.version == newest.policy.version
        record = newest if is_newest else await self._record(at.version)
        trained = record.learned
        weights = await open_tensors(self._store, trained.ref, trained.digest)
        checkpoint = await open_tensors(self._store, at.checkpoint, trained.digest)
        async with self._pool.all_held():
            await self._training.restore(weights, checkpoint)
            self._check(record)

    async def _train_again(self, numbers: range) -> None:
        for batch in numbers:
            try:
                await self._train_batch(await self._record(batch + 1), batch)
            except IntegrityError as error:  # the run goes on, with what it has
                log.error("optimizer_state_is_older", batch=batch, error=str(error))
                return

    async def _train_batch(self, record: CommitRecord, number: int) -> None:
        commands = await read_commands(self._store, record)
        batch = self._batches.open(number, is_again=True)
        begun = asyncio.get_running_loop().create_future()
        begun.set_result(None)
        await self._batches.run(batch, self._fetcher.again(commands), parent_commit=begun)
        async with self._pool.all_held():
            await self._training.step(number, batch.scale)
        log.info("batch_trained_again", batch=number)

    async def _settle(self, newest: CommitRecord, *, is_damaged: bool) -> None:
        """Have the weights be those that were committed, whatever has come out.

        Raises:
            BatchFailed: if those are damaged, and others have come out.
        """
        async with self._pool.all_held():
            trained = newest.learned
            found = await (await self._training.copy(states=False))()
            digests = (found.digest, (found.sampling or found).digest)
            if digests == (trained.digest, newest.policy.weights_digest):
                if is_damaged:
                    await self._versions.store_again(found)
                return
            if is_damaged and not await is_whole(self._store, trained.ref, trained.digest):
                raise BatchFailed(
                    f"the weights of version {newest.policy.version} are damaged in the store, and "
                    f"training again led to other bits; {remedy(self._run)}"
                )
            weights = await open_tensors(self._store, trained.ref, trained.digest)
            sampling = None
            if newest.trained_weights is not None:
                digest = newest.policy.weights_digest
                sampling = await open_tensors(self._store, newest.weights, digest)
            await self._training.replace(weights, sampling)
            self._check(newest)
        say = log.error if self._deterministic else log.info
        say("trained_again_to_other_bits", version=newest.policy.version)

    def _check(self, record: CommitRecord) -> None:
        found = (self._training.weights_digest(), self._training.sampling_digest())
        if found != (record.learned.digest, record.policy.weights_digest):
            version = record.policy.version
            raise IntegrityError(f"version {version}: its weights have another digest")

    async def _record(self, version: int) -> CommitRecord:
        record = await read_commit(self._store, self._run, version)
        if record is None:
            raise IntegrityError(f"the commit record of version {version} is missing")
        return record
