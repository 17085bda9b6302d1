"""The epochs of a run's schedulers, one object each, made by exclusive create: no two schedulers
have one epoch, and no epoch is reused, even if the broker loses its data."""

from shared.messages.epochs import EpochRecord, next_epoch
from shared.run.layout import epoch_key, numbers_in
from shared.store import ObjectStore

MAX_KEPT_EPOCHS = 64
"""Newest epochs whose objects are kept."""


async def newest_epoch(store: ObjectStore, run: str) -> int:
    """Return the newest epoch of the run, 0 if it has none."""
    return max(await numbers_in(store, run, "epochs"), default=0)


async def claim_epoch(store: ObjectStore, run: str, revision: int, scheduler: str) -> int:
    """Make a new epoch, and return its number."""
    while True:
        numbers = await numbers_in(store, run, "epochs")
        epoch = next_epoch(revision, max(numbers, default=0))
        record = EpochRecord(epoch=epoch, scheduler=scheduler)
        if await store.create(epoch_key(run, epoch), record.model_dump_json().encode()):
            await store.delete([epoch_key(run, old) for old in numbers[: 1 - MAX_KEPT_EPOCHS]])
            return epoch
