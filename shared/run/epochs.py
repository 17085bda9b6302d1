"""The epochs of a run's schedulers, one object each, made by exclusive create: no two schedulers
have one epoch, and none is given out again, whatever the broker has lost."""

from shared.messages.epochs import EpochRecord, next_epoch
from shared.run.layout import epoch_key, epochs_folder
from shared.store import ObjectStore

KEPT = 64
"""Newest epochs whose objects are kept."""


async def newest_epoch(store: ObjectStore, run: str) -> int:
    """Return the newest epoch of the run, 0 if it has none."""
    keys = await store.keys(epochs_folder(run))
    return _number(keys[-1]) if keys else 0


async def claim_epoch(store: ObjectStore, run: str, revision: int, scheduler: str) -> int:
    """Make a new epoch, and return its number."""
    while True:
        keys = await store.keys(epochs_folder(run))
        epoch = next_epoch(revision, _number(keys[-1]) if keys else 0)
        record = EpochRecord(epoch=epoch, scheduler=scheduler)
        if await store.create(epoch_key(run, epoch), record.model_dump_json().encode()):
            await store.delete(keys[: 1 - KEPT])
            return epoch


def _number(key: str) -> int:
    return int(key.rsplit("/", 1)[1].removesuffix(".json"))
