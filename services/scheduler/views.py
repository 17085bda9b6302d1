"""What the HTTP API answers with: typed views of the scheduler's state and the commit records."""

import itertools
import time
from typing import Literal

from pydantic import BaseModel

from services.scheduler.app import Scheduler
from services.scheduler.state import BatchState, Phase, Stage
from shared.commits import CommitRecord
from shared.contracts import Activity, Service


class RunView(BaseModel):
    run: str
    phase: Phase
    step: int
    """Optimizer steps committed."""
    steps: int
    policy_version: int | None
    reward_mean: float | None
    """Of the newest committed batch."""
    seconds_per_step: float | None
    eta_seconds: float | None
    waiting_for: Literal["rollout", "reward", "trainer", "nothing"]
    """What the batch in flight waits for."""
    num_workers: dict[Service, int]
    num_quarantined: int
    failure: str | None


class WorkerView(BaseModel):
    worker: str
    service: Service
    activity: Activity
    policy_version: int | None
    num_done: int
    busy_seconds: float
    num_quarantined: int
    device: str
    seconds_since_seen: float


class BatchView(BaseModel):
    batch: int
    status: Literal["in_flight", "committed"]
    policy_version: int
    """The version that generated it."""
    reward_mean: float | None = None
    metrics: dict[str, float] = {}
    num_fragments: dict[str, int] = {}
    """By stage, while the batch is in flight."""


class GroupView(BaseModel):
    group: int
    attempt: int
    stages: list[str]
    """Of its fragments."""
    rewards: list[float]


class BatchDetail(BatchView):
    groups: list[GroupView]


class VersionView(BaseModel):
    version: int
    weights_digest: str
    weights: str
    """Object key."""
    trained_from_batch: int | None
    onpolicy_ratio_error: float | None


class Accepted(BaseModel):
    action: Literal["pause", "resume", "stop"]
    id: str


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


def run_view(scheduler: Scheduler) -> RunView:
    state, plan = scheduler.state, scheduler.plan
    step = max(0, len(scheduler.chain) - 1)
    pace = seconds_per_step(scheduler.committed_at)
    counts: dict[Service, int] = {"rollout": 0, "reward": 0, "trainer": 0}
    for seen in scheduler.seen.values():
        counts[seen.status.service] += 1
    newest = scheduler.chain[-1].metrics if scheduler.chain else {}
    return RunView(
        run=scheduler.bus.run,
        phase=state.phase,
        step=step,
        steps=plan.num_batches,
        policy_version=None if state.policy is None else state.policy.version,
        reward_mean=newest.get("reward_mean"),
        seconds_per_step=pace,
        eta_seconds=None if pace is None else pace * (plan.num_batches - step),
        waiting_for=_waiting_for(state.batch),
        num_workers=counts,
        num_quarantined=scheduler.num_quarantined,
        failure=state.failure,
    )


def seconds_per_step(committed_at: list[float], *, window: int = 10) -> float | None:
    """Median time between the newest commits."""
    recent = committed_at[-window - 1 :]
    gaps = sorted(after - before for before, after in itertools.pairwise(recent))
    return gaps[len(gaps) // 2] if gaps else None


def _waiting_for(batch: BatchState | None) -> Literal["rollout", "reward", "trainer", "nothing"]:
    if batch is None:
        return "nothing"
    if batch.count("pending") or batch.count("issued"):
        return "rollout"
    return "reward" if batch.count("generated") else "trainer"


def worker_views(scheduler: Scheduler) -> list[WorkerView]:
    now = time.monotonic()
    return [
        WorkerView(
            **seen.status.model_dump(exclude={"kind"}),
            seconds_since_seen=round(now - seen.at, 3),
        )
        for _, seen in sorted(scheduler.seen.items())
    ]


def batch_views(scheduler: Scheduler) -> list[BatchView]:
    """Newest first."""
    committed = [_committed(record) for record in scheduler.chain[1:]]
    in_flight = [_in_flight(scheduler.state.batch)] if scheduler.state.batch else []
    return [BatchView(**view.model_dump(exclude={"groups"})) for view in committed + in_flight][
        ::-1
    ]


def batch_detail(scheduler: Scheduler, batch: int) -> BatchDetail | None:
    if batch + 1 < len(scheduler.chain):
        return _committed(scheduler.chain[batch + 1])
    state = scheduler.state.batch
    return _in_flight(state) if state is not None and state.index == batch else None


def version_views(scheduler: Scheduler) -> list[VersionView]:
    """Newest first."""
    return [
        VersionView(
            version=record.policy.version,
            weights_digest=record.policy.weights_digest,
            weights=record.weights.key,
            trained_from_batch=record.batch,
            onpolicy_ratio_error=record.metrics.get("onpolicy_ratio_error"),
        )
        for record in reversed(scheduler.chain)
    ]


def _committed(record: CommitRecord) -> BatchDetail:
    assert record.batch is not None
    return BatchDetail(
        batch=record.batch,
        status="committed",
        policy_version=record.policy.version - 1,
        reward_mean=record.metrics["reward_mean"],
        metrics=dict(record.metrics),
        groups=[
            GroupView(
                group=group.group,
                attempt=group.attempt,
                stages=["trained"] * len(group.fragments),
                rewards=list(group.rewards),
            )
            for group in record.trained
        ],
    )


def _in_flight(batch: BatchState) -> BatchDetail:
    stages: tuple[Stage, ...] = ("pending", "issued", "generated", "scored")
    return BatchDetail(
        batch=batch.index,
        status="in_flight",
        policy_version=batch.policy.version,
        num_fragments={stage: batch.count(stage) for stage in stages},
        groups=[
            GroupView(
                group=index,
                attempt=group.attempt,
                stages=[fragment.stage for fragment in group.fragments],
                rewards=[
                    reward
                    for fragment in group.fragments
                    if fragment.scored
                    for reward in fragment.scored.rewards
                ],
            )
            for index, group in enumerate(batch.groups)
        ],
    )
