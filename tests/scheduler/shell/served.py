"""A scheduler in mid-run without brokers, and what its HTTP API is asked."""

from shared.messages.contracts import Message
from shared.run.commits import CommitRecord, StoredRecord, TrainedGroup, record_digest
from shared.store.folder import FolderBackend
from tests import examples

METRICS = {"reward_mean": 0.5, "onpolicy_ratio_error": 1e-8, "reward_mean/proxy": 0.25}


class Outbox:
    """Stands where the bus is; keeps what was published."""

    run = "test"

    def __init__(self) -> None:
        self.published: list[Message] = []

    async def publish(self, message: Message) -> bool:
        self.published.append(message)
        return True


def commit(version: int) -> CommitRecord:
    group = TrainedGroup(
        group=0,
        attempt=0,
        policy_version=version - 1 if version else 0,
        fragments=((0, 4, 0),),
        rewards=(0.0, 1.0, 1.0, 0.0),
        parts={},
        workers=("rollout-0-a",),
    )
    return CommitRecord(
        run="test",
        policy=examples.policy(version),
        parent=None,
        weights=examples.ref("weights"),
        checkpoint=examples.ref("checkpoint"),
        trained=(group,) if version else (),
        metrics=METRICS if version else {},
        worker="trainer-0",
    )


def stored(version: int) -> StoredRecord:
    record = commit(version)
    return StoredRecord(record, record_digest(record.encode()))


class CountedReads(FolderBackend):
    """A folder that counts what is read of it."""

    num_reads = 0

    async def read(self, key: str) -> bytes | None:
        self.num_reads += 1
        return await super().read(key)
