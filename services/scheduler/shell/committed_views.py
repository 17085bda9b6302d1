"""Makes the HTTP API's answers about what is committed, from the run's store alone.

The scheduler answers with them, and once it is gone the run's page does.
"""

import asyncio
from collections.abc import Sequence

from services.scheduler.shell.api_batches import BatchDetail, BatchView, GroupView, VersionView
from shared.run.chain import CommitSummary
from shared.run.commits import CommitRecord, read_commit
from shared.run.layout import timeline_key, usage_key
from shared.run.usage import BatchUsage, Timeline
from shared.store import ObjectStore

MAX_LOOK_BACK = 8
"""Batches before one that are searched for a record of devices."""


def committed_batch(step: CommitSummary) -> BatchView:
    assert step.batch is not None
    return BatchView(
        batch=step.batch,
        status="committed",
        staleness=dict(step.staleness),
        reward_mean=step.metrics["reward_mean"],
        metrics=dict(step.metrics),
    )


async def committed_detail(store: ObjectStore, run: str, batch: int) -> BatchDetail | None:
    """Return a committed batch with its groups; None if it is not committed."""
    record = await read_commit(store, run, batch + 1)
    return None if record is None else await asyncio.to_thread(_detail, record)


def _detail(record: CommitRecord) -> BatchDetail:
    assert record.batch is not None
    return BatchDetail(
        batch=record.batch,
        status="committed",
        staleness=record.staleness,
        reward_mean=record.metrics["reward_mean"],
        metrics=dict(record.metrics),
        groups=[
            GroupView(
                **group.model_dump(include=GroupView.model_fields.keys() - {"stages"}),
                stages=["trained"] * len(group.fragments),
            )
            for group in record.trained
        ],
    )


def version_view(step: CommitSummary, adopted_by: Sequence[str] = ()) -> VersionView:
    return VersionView(
        version=step.version,
        weights_digest=step.policy.weights_digest,
        weights=step.weights.key,
        trained_from_batch=step.batch,
        reward_mean=step.metrics.get("reward_mean"),
        onpolicy_ratio_error=step.metrics.get("onpolicy_ratio_error"),
        adopted_by=sorted(adopted_by),
    )


async def stored_usage(store: ObjectStore, run: str, batch: int) -> BatchUsage | None:
    """Return what the devices did in a batch; None if it is not stored, or damaged."""
    return BatchUsage.decode(await store.read(usage_key(run, batch)))


async def device_hours(store: ObjectStore, run: str, before: int) -> float:
    """Return the hours of all devices in the recorded batches before one; after a restart of the
    scheduler, one batch is not recorded."""
    for batch in range(before - 1, max(-1, before - 1 - MAX_LOOK_BACK), -1):
        usage = await stored_usage(store, run, batch)
        if usage is not None:
            return usage.device_hours or 0.0
    return 0.0


async def stored_timeline(store: ObjectStore, run: str, batch: int) -> Timeline | None:
    """Return when devices changed what they did in a batch; None if that is not stored, or
    damaged."""
    data = await store.read(timeline_key(run, batch))
    return None if data is None else await asyncio.to_thread(Timeline.decode, data)
