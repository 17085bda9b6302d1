"""What the HTTP API answers with: typed views of the scheduler's state and the commit records."""

import itertools
import time
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.scheduler.app import Scheduler, Seen
from services.scheduler.state import BatchState, Phase, Stage, State, TagRecord
from services.scheduler.usage import Use, uses
from shared.commits import CommitRecord
from shared.contracts import Activity, Service, TagMode


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
    address: str
    """This start of it."""
    service: Service
    activity: Activity
    use: Use | None
    """What the scheduler sees it do, and if it waits, for whom."""
    policy_version: int | None
    num_done: int
    busy_seconds: float
    num_quarantined: int
    host: str
    """Name of the machine that it runs on."""
    url: str
    """Of its probes and metrics; empty if it has not said."""
    device: str
    """Kind of its device, as its maker calls it."""
    gpu: str
    """Which of its host's accelerators; empty if it uses none."""
    memory_bytes: int
    refused: str | None
    """Why it takes no part, if it does not."""
    lent: bool
    """TAG: a trainer's device that generates."""
    seconds_per_sample: float | None
    """Of generation, as measured."""
    num_in_hand: int
    """Fragments that it has."""
    trains_group: int | None
    """Group of the current batch whose gradient it computes for the trainer."""
    seconds_per_gradient: float | None
    """Of a whole group, as measured."""
    seconds_since_seen: float


class TagDecisionView(BaseModel):
    batch: int
    groups: int
    """That the trainer may generate."""
    reason: str
    predicted_seconds: float | None
    predicted_gain: float | None
    """Over the batch without help."""
    measured_seconds: float | None
    measured_gain: float | None


class TagView(BaseModel):
    mode: TagMode
    groups: int
    """Of mode fixed."""
    lent: bool
    generation: int
    """Of the newest command to the trainer's device."""
    samples_left: int
    """That the trainer may still take in the current batch."""
    costs: dict[str, float | None]
    """Learned seconds."""
    decisions: list[TagDecisionView]
    """Newest first."""


class BatchView(BaseModel):
    batch: int
    status: Literal["in_flight", "early", "committed"]
    """early: begun with the version before, while the batch before it is trained."""
    staleness: dict[int, int]
    """Samples by staleness, so far."""
    reward_mean: float | None = None
    metrics: dict[str, float] = {}
    num_fragments: dict[str, int] = {}
    """By stage, while the batch is in flight."""


class GroupView(BaseModel):
    group: int
    attempt: int
    policy_version: int | None
    """The version that generated it."""
    stages: list[str]
    """Of its fragments."""
    trained_by: str | None
    """Address of the rollout device that computes its gradient; None: the trainer."""
    rewards: list[float | None]


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
    action: Literal["pause", "resume", "stop", "tag"]
    id: str


class TagBody(BaseModel):
    """What an operator asks of TAG; it holds from the next batch on, off at once."""

    model_config = ConfigDict(extra="forbid")

    mode: TagMode
    groups: Annotated[int, Field(ge=0)] | None = None
    """fixed: groups of every batch that the trainer generates."""


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
    cut = sum(group.num_cut for group in batch.groups)
    if batch.count("pending") or batch.count("issued") or not cut:
        return "rollout"
    return "reward" if batch.count("generated") else "trainer"


def worker_views(scheduler: Scheduler) -> list[WorkerView]:
    now, current = time.monotonic(), uses(scheduler.plan, scheduler.state)
    seen = sorted(scheduler.seen.values(), key=lambda seen: seen.status.worker)
    return [_worker_view(scheduler, each, current, now) for each in seen]


def _worker_view(
    scheduler: Scheduler, seen: Seen, current: dict[str, Use], now: float
) -> WorkerView:
    status = seen.status
    known = scheduler.state.workers.get(status.address)
    return WorkerView(
        worker=status.worker,
        address=status.address,
        service=status.service,
        activity=status.activity,
        use=current.get(status.worker),
        policy_version=status.policy_version,
        num_done=status.num_done,
        busy_seconds=status.busy_seconds,
        num_quarantined=status.num_quarantined,
        host=status.host,
        url=status.url,
        device=status.device.kind,
        gpu=status.device.gpu,
        memory_bytes=status.device.memory_bytes,
        refused=status.device.refusal,
        lent=status.loan is not None and status.loan.mode == "generate",
        seconds_per_sample=scheduler.state.costs.rollout_seconds(status.address),
        num_in_hand=0 if known is None else len(known.in_hand),
        trains_group=known.computes.group if known is not None and known.computes else None,
        seconds_per_gradient=_gradient_seconds(scheduler, status.address),
        seconds_since_seen=round(now - seen.at, 3),
    )


def _gradient_seconds(scheduler: Scheduler, address: str) -> float | None:
    measured = scheduler.state.costs.gradient.get(address)
    return None if measured is None else measured.value


def tag_view(scheduler: Scheduler) -> TagView:
    tag, costs = scheduler.state.tag, scheduler.state.costs
    return TagView(
        mode=tag.controller.mode,
        groups=tag.controller.groups,
        lent=tag.mode == "generate",
        generation=tag.generation,
        samples_left=tag.samples_left,
        costs={
            "help_per_sample": costs.help_seconds(),
            "train_per_group": costs.train_seconds(),
            "ready": costs.ready_seconds(),
            "commit": costs.commit_seconds(),
            "switch": costs.switch_seconds(),
        },
        decisions=[_decision_view(record) for record in reversed(tag.history)],
    )


def _decision_view(record: TagRecord) -> TagDecisionView:
    decision = record.decision
    return TagDecisionView(
        batch=record.batch,
        groups=decision.groups,
        reason=decision.reason,
        predicted_seconds=decision.predicted_seconds,
        predicted_gain=record.predicted_gain,
        measured_seconds=record.seconds,
        measured_gain=record.measured_gain,
    )


def batch_views(scheduler: Scheduler) -> list[BatchView]:
    """Newest first."""
    committed = [_committed(record) for record in scheduler.chain[1:]]
    in_flight = [_in_flight(scheduler.state, batch) for batch in scheduler.state.batches]
    return [BatchView(**view.model_dump(exclude={"groups"})) for view in committed + in_flight][
        ::-1
    ]


def batch_detail(scheduler: Scheduler, batch: int) -> BatchDetail | None:
    if batch + 1 < len(scheduler.chain):
        return _committed(scheduler.chain[batch + 1])
    found = scheduler.state.find_batch(batch)
    return None if found is None else _in_flight(scheduler.state, found)


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
        staleness=_staleness(
            (record.batch - group.policy_version, len(group.rewards)) for group in record.trained
        ),
        reward_mean=record.metrics["reward_mean"],
        metrics=dict(record.metrics),
        groups=[
            GroupView(
                group=group.group,
                attempt=group.attempt,
                policy_version=group.policy_version,
                stages=["trained"] * len(group.fragments),
                trained_by=group.trained_by,
                rewards=list(group.rewards),
            )
            for group in record.trained
        ],
    )


def _staleness(samples: Iterable[tuple[int, int]]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for steps, number in samples:
        counts[steps] = counts.get(steps, 0) + number
    return counts


def _in_flight(state: State, batch: BatchState) -> BatchDetail:
    stages: tuple[Stage, ...] = ("pending", "issued", "generated", "scored")
    return BatchDetail(
        batch=batch.index,
        status="in_flight" if batch is state.batch else "early",
        staleness=_staleness(
            (batch.index - group.policy.version, group.num_cut)
            for group in batch.groups
            if group.policy is not None
        ),
        num_fragments={stage: batch.count(stage) for stage in stages},
        groups=[
            GroupView(
                group=index,
                attempt=group.attempt,
                policy_version=None if group.policy is None else group.policy.version,
                stages=[fragment.stage for fragment in group.fragments],
                trained_by=group.computed_by,
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
