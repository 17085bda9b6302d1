"""The messages sent about the groups of a batch, from which a damaged version is made again."""

from collections.abc import Sequence

import msgpack

from shared.errors import ContractError, IntegrityError
from shared.limits import MAX_MESSAGE_BYTES
from shared.messages.codec import decode, encode
from shared.messages.contracts import ObjectRef, TrainGroup
from shared.run.commits import CommitRecord
from shared.run.layout import KEPT_BATCHES, batch_folder
from shared.store import ObjectStore

COMMANDS = ".groups"
"""Suffix of an object with the commands of a batch."""


async def store_commands(
    store: ObjectStore, run: str, batch: int, commands: Sequence[TrainGroup]
) -> ObjectRef:
    """Store the messages sent about the groups of a batch, next to its trajectories."""
    data: bytes = msgpack.packb([encode(each) for each in commands])
    return await store.put(batch_folder(run, batch), data, suffix=COMMANDS)


async def read_commands(store: ObjectStore, record: CommitRecord) -> list[TrainGroup]:
    """Return what was sent of the groups that a version was trained from.

    Raises:
        IntegrityError: if it is not in the store, or of other groups.
    """
    if record.commands is None:
        raise IntegrityError(f"version {record.policy.version} names no commands of its batch")
    data = await store.get(record.commands)
    try:
        packed = msgpack.unpackb(data, max_bin_len=MAX_MESSAGE_BYTES)
        commands = [decode(each) for each in packed]
    except (ContractError, ValueError, TypeError, msgpack.UnpackException) as error:
        raise IntegrityError(f"{record.commands.key} holds no commands") from error
    groups = [each for each in commands if isinstance(each, TrainGroup)]
    wanted = [(record.batch, each.group, each.attempt) for each in record.trained]
    if [(each.batch, each.group, each.attempt) for each in groups] != wanted:
        raise IntegrityError(f"{record.commands.key} belongs to other groups than were trained")
    return groups


def oldest_needed_batch(newest: CommitRecord) -> int:
    """Return the oldest batch whose trajectories are kept: for inspection, and to make a damaged
    version again from the one before."""
    return max(0, newest.policy.version - KEPT_BATCHES)
