"""Makes the HTTP API's answers about what is committed, from the run's store alone.

The scheduler answers with them, and once it is gone the run's page does.
"""

import asyncio
from collections.abc import Sequence

from services.scheduler.shell.api_batches import (
    BatchDetail,
    BatchView,
    GroupView,
    TimelineView,
    UsageView,
    VersionView,
)
from shared.run.chain import CommitSummary
from shared.run.commits import CommitRecord, read_commit
from shared.run.layout import timeline_key, usage_key
from shared.run.usage import BatchUsage, Timeline
from shared.store import ObjectStore


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


async def stored_usage(store: ObjectStore, run: str, batch: int) -> UsageView | None:
    """Return what the devices did in a batch; None if it is not stored, or damaged."""
    usage = BatchUsage.decode(await store.read(usage_key(run, batch)))
    if usage is None:
        return None
    return UsageView(**usage.model_dump(include={*UsageView.model_fields}))


async def stored_timeline(store: ObjectStore, run: str, batch: int) -> TimelineView | None:
    """Return when devices changed what they did in a batch; None if that is not stored, or
    damaged."""
    data = await store.read(timeline_key(run, batch))
    if data is None:
        return None
    timeline = await asyncio.to_thread(Timeline.decode, data)
    return None if timeline is None else timeline_view(timeline)


def timeline_view(timeline: Timeline) -> TimelineView:
    return TimelineView(batch=timeline.batch, seconds=timeline.seconds, devices=timeline.devices)
