"""A scheduler in mid-run without brokers, and what its HTTP API is asked."""

from shared.messages.contracts import Message
from shared.run.commits import CommitRecord, StoredRecord, record_digest
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
    if not version:
        return examples.record(0)
    group = examples.trained_group(version=version - 1)
    return examples.record(version, trained=(group,), metrics=METRICS)


def stored(version: int) -> StoredRecord:
    record = commit(version)
    return StoredRecord(record, record_digest(record.encode()))
