"""Builds the responses of the HTTP API from the scheduler's state and the commit records."""

import itertools
import time
from collections.abc import Collection, Sequence
from typing import Any

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.lending import lendable
from services.scheduler.core.state import BatchState, Plan, Stage, State, TagRecord
from services.scheduler.core.tag.estimates import Costs, Estimate
from services.scheduler.core.throughput import forecast_batch
from services.scheduler.core.usage import uses
from services.scheduler.core.waiting import queues
from services.scheduler.core.workers import WorkerState
from services.scheduler.shell.api_batches import BatchDetail, BatchView, GroupView, VersionView
from services.scheduler.shell.api_models import (
    Drain,
    RunView,
    TagDecisionView,
    TagView,
    WaitsFor,
    WorkerView,
)
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.committed_views import (
    committed_batch,
    committed_detail,
    stored_timeline,
    version_view,
)
from services.scheduler.shell.metrics import RunFigures
from services.scheduler.shell.roster import LastStatus, seconds_per_byte
from shared.messages.workers import Service, WorkerStatus
from shared.release import RELEASE
from shared.run.usage import DeviceUse, Timeline, count_staleness, seconds_per_step

STATUS_FIELDS = (WorkerView.model_fields.keys() & WorkerStatus.model_fields.keys()) - {
    "site",
    "device",
}
"""Fields of a worker that the API copies from its status."""
NO_ESTIMATE = Estimate()
SERVICES: tuple[Service, ...] = ("rollout", "reward", "trainer")
"""Services that every run needs."""


def run_view(scheduler: Scheduler) -> RunView:
    state, plan = scheduler.state, scheduler.plan
    step = max(0, scheduler.chain.version)
    seconds = median_step_seconds(scheduler)
    reporting = [last.status.service for last in scheduler.roster.statuses.values()]
    services = needed_services(plan)
    newest = {} if scheduler.chain.newest is None else scheduler.chain.newest.metrics
    return RunView(
        run=scheduler.bus.run,
        release=RELEASE,
        phase=state.phase,
        step=step,
        steps=plan.num_batches,
        policy_version=None if state.policy is None else state.policy.version,
        reward_mean=newest.get("reward_mean"),
        effective_sample_share=newest.get("effective_sample_share"),
        seconds_per_step=seconds,
        eta_seconds=None if seconds is None else seconds * (plan.num_batches - step),
        waiting_for=waiting_for(state),
        num_workers={service: reporting.count(service) for service in services},
        missing_workers=missing_workers(plan, state, reporting),
        num_quarantined=scheduler.dead_letters.num_quarantined,
        num_dead_letters=scheduler.run_log.letters.num_open,
        pause_at_failure=state.pause_at_failure,
        failure=state.failure,
        alarms=[each for each in scheduler.alarms.reasons.values() if each],
        max_staleness=plan.schedule.staleness_limit,
        max_staleness_reason=None if scheduler.staleness is None else scheduler.staleness.reason,
    )


def run_figures(scheduler: Scheduler, since: float) -> RunFigures:
    """Return the figures of the run for alarms.

    Args:
        since: monotonic time at which this scheduler became active.
    """
    run = run_view(scheduler)
    newest_commit = max([since, *scheduler.committed_at[-1:]])
    plan, state = scheduler.plan, scheduler.state
    forecast = forecast_batch(plan, state)
    return RunFigures(
        phase=run.phase,
        workers=run.num_workers,
        missing=run.missing_workers,
        seconds_per_step=run.seconds_per_step,
        seconds_since_commit=time.monotonic() - newest_commit,
        queues=queues(plan, state, time.monotonic(), forecast) if run.phase == "running" else (),
        forecast=forecast,
        gpu_use={
            last.status.worker: last.status.gpu_use
            for last in scheduler.roster.statuses.values()
            if last.status.gpu_use is not None
        },
    )


def median_step_seconds(scheduler: Scheduler) -> float | None:
    """Return the median time between the newest commits; None before the second commit."""
    times = scheduler.committed_at
    return seconds_per_step(after - before for before, after in itertools.pairwise(times))


def waiting_for(state: State) -> WaitsFor:
    """Return the service that the run waits for; "operator" if a person has to act."""
    if state.phase == "finished":
        return "nothing"
    if state.phase in ("paused", "stopped", "failed"):
        return "operator"
    batch = state.batch
    if batch is None:
        return "trainer"  # commits the first version
    num_samples = sum(group.num_cut for group in batch.groups)  # of all fragments
    if batch.count("pending") or batch.count("issued") or not num_samples:
        return "rollout"
    return "reward" if batch.count("generated") else "trainer"


def needed_services(plan: Plan) -> tuple[Service, ...]:
    """Services that the run needs."""
    return (*SERVICES, "encoder") if plan.needs_encoder else SERVICES


def missing_workers(plan: Plan, state: State, reporting: Collection[Service]) -> list[Service]:
    """Services that the run needs and that no worker provides.

    Args:
        reporting: services of all workers that report; the state has no encoders.
    """
    if state.phase not in ("waiting", "running"):
        return []
    present = {worker.service for worker in state.workers.values()}
    if "member" in present:
        present |= {"trainer", "rollout"} if plan.schedule.members_generate else {"trainer"}
    if "encoder" in reporting:
        present.add("encoder")
    return [service for service in needed_services(plan) if service not in present]


def worker_views(scheduler: Scheduler) -> list[WorkerView]:
    now = time.monotonic()
    device_uses = uses(scheduler.plan, scheduler.state)
    statuses = sorted(scheduler.roster.statuses.values(), key=lambda last: last.status.worker)
    return [_worker_view(scheduler, last, device_uses, now) for last in statuses]


def _worker_view(
    scheduler: Scheduler, last: LastStatus, device_uses: dict[str, DeviceUse], now: float
) -> WorkerView:
    status, costs = last.status, scheduler.state.costs
    worker = scheduler.state.workers.get(status.address)
    return WorkerView(
        **status.model_dump(include=STATUS_FIELDS),
        site=status.site,
        use=device_uses.get(status.worker),
        device=status.device.kind,
        gpu=status.device.gpu,
        memory_bytes=status.device.memory_bytes,
        refused=status.device.refusal or last.refused,
        drain=drain_state(worker),
        lent=status.loan is not None and status.loan.mode == "generate",
        loan_number=None if status.loan is None else status.loan.loan_number,
        seconds_per_sample=costs.rollout.get(status.address, NO_ESTIMATE).value,
        num_in_hand=0 if worker is None else len(worker.assigned),
        seconds_per_gradient=costs.gradient.get(status.address, NO_ESTIMATE).value,
        seconds_since_seen=round(now - last.at, 3),
        **_line_fields(status, costs),
        declines="" if worker is None else worker.declines,
    )


def _line_fields(status: WorkerStatus, costs: Costs) -> dict[str, Any]:
    """Return what a worker's line has carried, and its learned rates."""
    fields: dict[str, Any] = {"round_trip_seconds": status.round_trip}
    for direction, carried, known in (
        ("up", status.sent, costs.up), ("down", status.received, costs.down),
    ):  # fmt: skip
        each = known.get(status.address, NO_ESTIMATE).seconds or seconds_per_byte(None, carried)
        fields[f"bytes_{direction}"] = 0 if carried is None else carried.num_bytes
        fields[f"seconds_{direction}"] = 0.0 if carried is None else carried.seconds
        fields[f"mbits_{direction}"] = round(8e-6 / each, 3) if each else None
    return fields


def tag_view(scheduler: Scheduler) -> TagView:
    state = scheduler.state
    tag, costs, members = state.tag, state.costs, lendable(state)
    return TagView(
        mode=tag.controller.mode,
        groups=tag.controller.groups,
        lent=sum(each.loan is not None and each.loan.mode == "generate" for each in members),
        members=len(members),
        samples_left=tag.samples_left,
        costs={
            "help_per_sample": _combined_seconds([sample_seconds(state, each) for each in members]),
            "train_per_group": costs.train_seconds([each.address for each in state.members]),
            "ready": costs.ready.seconds,
            "commit": costs.commit.seconds,
            "switch": costs.switch.seconds,
        },
        decisions=[_decision_view(record) for record in reversed(tag.history)],
    )


def _combined_seconds(seconds: Sequence[float]) -> float | None:
    """Return the seconds per sample of all devices together, from the seconds of each device."""
    rates = [1 / each for each in seconds if each]
    return 1 / sum(rates) if rates else None


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


def drain_state(worker: WorkerState | None) -> Drain:
    """Return the state of a worker's drain request; "no" without a request."""
    if worker is None or not worker.drained:
        return "no"
    return "draining" if worker.assigned else "drained"


def is_known(scheduler: Scheduler, worker: str) -> bool:
    """Return whether there is a worker of this name, or a drain request for one."""
    statuses = scheduler.roster.statuses.values()
    is_live = any(last.status.worker == worker for last in statuses)
    return is_live or worker in scheduler.state.draining


def lending_obstacle(scheduler: Scheduler) -> str:
    """Return why an operator cannot set the loans of members; empty if this is possible."""
    mode = scheduler.plan.schedule.mode
    if mode == "disaggregated":
        return ""
    return f"schedule.mode {mode}: no member is lent; TAG is for mode disaggregated"


def drain_obstacle(scheduler: Scheduler, worker: str) -> str:
    """Return why a worker cannot be drained, with a remedy; empty if this is possible."""
    schedule = scheduler.plan.schedule
    statuses = (last.status for last in scheduler.roster.statuses.values())
    service = next((each.service for each in statuses if each.worker == worker), "")
    if service in ("reward", "encoder"):
        return f"a {service} worker needs no drain: SIGTERM ends it after its current work"
    if service != "rollout":
        mode = schedule.mode
        return f"schedule.mode {mode}: SIGTERM ends a member, and other members train its pieces"
    return ""


async def batch_views(scheduler: Scheduler, limit: int, before: int | None) -> list[BatchView]:
    """Return the newest ``limit`` batches below ``before``, newest first; read only these."""
    newest = scheduler.chain.version
    end = newest + 2 if before is None else before
    running = [b for b in reversed(scheduler.state.batches) if newest <= b.index < end]
    current = [_in_flight_view(scheduler.state, batch) for batch in running[:limit]]
    number = min(limit - len(current), max(0, min(end, newest)))
    steps = await scheduler.chain.page(end + 1, number)  # batch k creates version k + 1
    return [*current, *map(committed_batch, steps)]


async def batch_detail(scheduler: Scheduler, batch: int) -> BatchDetail | None:
    if batch < scheduler.chain.version:
        return await committed_detail(scheduler.store, scheduler.bus.run, batch)
    current = scheduler.state.find_batch(batch)
    return None if current is None else _in_flight_detail(scheduler.state, current)


async def timeline_view(scheduler: Scheduler, batch: int) -> Timeline | None:
    """Return the devices' changes of use in a batch, with their times; None if not stored."""
    if batch == max(0, scheduler.chain.version):
        timeline = scheduler.meter.timeline(batch)
        return timeline.model_copy(update={"ended_at": time.time()})
    return await stored_timeline(scheduler.store, scheduler.bus.run, batch)


async def version_views(scheduler: Scheduler, limit: int, before: int | None) -> list[VersionView]:
    """Return the newest ``limit`` versions below ``before``, newest first."""
    end = scheduler.chain.version + 1 if before is None else before
    users: dict[int | None, list[str]] = {}
    for last in scheduler.roster.statuses.values():
        users.setdefault(last.status.policy_version, []).append(last.status.worker)
    return [
        version_view(step, users.get(step.version, ()))
        for step in await scheduler.chain.page(end, limit)
    ]


def _in_flight_view(state: State, batch: BatchState) -> BatchView:
    stages: tuple[Stage, ...] = ("pending", "issued", "generated", "scored")
    return BatchView(
        batch=batch.index,
        status="in_flight" if batch is state.batch else "early",
        staleness=count_staleness(
            (batch.index - group.policy.version, group.num_cut)
            for group in batch.groups
            if group.policy is not None
        ),
        num_fragments={stage: batch.count(stage) for stage in stages},
    )


def _in_flight_detail(state: State, batch: BatchState) -> BatchDetail:
    return BatchDetail(
        **_in_flight_view(state, batch).model_dump(),
        groups=[
            GroupView(
                group=index,
                attempt=group.attempt,
                policy_version=None if group.policy is None else group.policy.version,
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
