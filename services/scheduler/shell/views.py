"""Makes the answers of the HTTP API from the scheduler's state and the commit records."""

import itertools
import time
from collections.abc import Collection, Sequence

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.lending import lendable
from services.scheduler.core.state import BatchState, Plan, Stage, State, TagRecord
from services.scheduler.core.tag.estimates import Estimate
from services.scheduler.core.throughput import outlook
from services.scheduler.core.usage import uses
from services.scheduler.core.waiting import queues
from services.scheduler.core.workers import WorkerState
from services.scheduler.shell.api_batches import (
    BatchDetail,
    BatchView,
    GroupView,
    TimelineView,
    VersionView,
)
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
from services.scheduler.shell.committed_views import timeline_view as timeline_of
from services.scheduler.shell.metrics import RunFigures
from services.scheduler.shell.roster import LastStatus
from shared.messages.workers import Service, WorkerStatus
from shared.run.usage import DeviceUse, count_staleness, seconds_per_step

STATUS_FIELDS = (WorkerView.model_fields.keys() & WorkerStatus.model_fields.keys()) - {
    "device",
    "versions",
}
"""Fields of a worker that are shown as its status has them."""
NO_ESTIMATE = Estimate()
SERVICES: tuple[Service, ...] = ("rollout", "reward", "trainer")
"""Services that every run needs."""


def run_view(scheduler: Scheduler) -> RunView:
    state, plan = scheduler.state, scheduler.plan
    step = max(0, scheduler.chain.version)
    seconds = pace(scheduler)
    reporting = [seen.status.service for seen in scheduler.roster.seen.values()]
    services = needed_services(plan)
    newest = {} if scheduler.chain.newest is None else scheduler.chain.newest.metrics
    return RunView(
        run=scheduler.bus.run,
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
        num_dead_letters=scheduler.dead_letters.num_open,
        pause_at_failure=state.pause_at_failure,
        failure=state.failure,
        alarms=[each for each in scheduler.alarms.reasons.values() if each],
        max_staleness=plan.schedule.staleness_limit,
        max_staleness_reason=None if scheduler.staleness is None else scheduler.staleness.reason,
    )


def run_figures(scheduler: Scheduler, since: float) -> RunFigures:
    """Return what alarms ask of the run; ``since``: when this scheduler began to command."""
    run, at = run_view(scheduler), scheduler.committed_at
    plan, state = scheduler.plan, scheduler.state
    seen = outlook(plan, state)
    return RunFigures(
        phase=run.phase,
        workers=run.num_workers,
        missing=run.missing_workers,
        seconds_per_step=run.seconds_per_step,
        seconds_since_commit=time.monotonic() - max([since, *at[-1:]]),
        queues=queues(plan, state, time.monotonic(), seen) if run.phase == "running" else (),
        seen=seen,
    )


def pace(scheduler: Scheduler) -> float | None:
    """Return the median seconds between the newest commits; None before the second."""
    at = scheduler.committed_at
    return seconds_per_step(after - before for before, after in itertools.pairwise(at))


def waiting_for(state: State) -> WaitsFor:
    """The service, or the operator, that the run waits for."""
    if state.phase == "finished":
        return "nothing"
    if state.phase in ("paused", "stopped", "failed"):
        return "operator"
    batch = state.batch
    if batch is None:
        return "trainer"  # commits the first version
    cut = sum(group.num_cut for group in batch.groups)
    if batch.count("pending") or batch.count("issued") or not cut:
        return "rollout"
    return "reward" if batch.count("generated") else "trainer"


def needed_services(plan: Plan) -> tuple[Service, ...]:
    """Services that the run needs."""
    return (*SERVICES, "encoder") if plan.needs_encoder else SERVICES


def missing_workers(plan: Plan, state: State, reporting: Collection[Service]) -> list[Service]:
    """Services that the run needs and that no worker provides.

    Args:
        reporting: services of the workers that report; encoders are in no state.
    """
    if state.phase not in ("waiting", "running"):
        return []
    there = {worker.service for worker in state.workers.values()}
    if "member" in there:
        there |= {"trainer", "rollout"} if plan.schedule.members_generate else {"trainer"}
    if "encoder" in reporting:
        there.add("encoder")
    return [service for service in needed_services(plan) if service not in there]


def worker_views(scheduler: Scheduler) -> list[WorkerView]:
    now, current = (
        time.monotonic(),
        uses(scheduler.plan, scheduler.state),
    )
    seen = sorted(scheduler.roster.seen.values(), key=lambda seen: seen.status.worker)
    return [_worker_view(scheduler, each, current, now) for each in seen]


def _worker_view(
    scheduler: Scheduler, seen: LastStatus, current: dict[str, DeviceUse], now: float
) -> WorkerView:
    status = seen.status
    known, costs = scheduler.state.workers.get(status.address), scheduler.state.costs
    return WorkerView(
        **status.model_dump(include=STATUS_FIELDS),
        use=current.get(status.worker),
        versions=status.versions,
        device=status.device.kind,
        gpu=status.device.gpu,
        memory_bytes=status.device.memory_bytes,
        refused=status.device.refusal or seen.refused,
        drain=drain_state(known),
        lent=status.loan is not None and status.loan.mode == "generate",
        loan_number=None if status.loan is None else status.loan.loan_number,
        seconds_per_sample=costs.rollout.get(status.address, NO_ESTIMATE).value,
        num_in_hand=0 if known is None else len(known.assigned),
        seconds_per_gradient=costs.gradient.get(status.address, NO_ESTIMATE).value,
        seconds_since_seen=round(now - seen.at, 3),
    )


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
            "help_per_sample": _together([sample_seconds(state, each) for each in members]),
            "train_per_group": costs.train_seconds([each.address for each in state.members]),
            "ready": costs.ready.seconds,
            "commit": costs.commit.seconds,
            "switch": costs.switch.seconds,
        },
        decisions=[_decision_view(record) for record in reversed(tag.history)],
    )


def _together(seconds: Sequence[float]) -> float | None:
    """Return the seconds per sample of devices that generate at the same time."""
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


def drain_state(known: WorkerState | None) -> Drain:
    """Return the state of a worker's drain request, if there is one."""
    if known is None or not known.drained:
        return "no"
    return "draining" if known.assigned else "drained"


def is_known(scheduler: Scheduler, worker: str) -> bool:
    """Return whether there is a worker of this name, or a drain request for one."""
    seen = scheduler.roster.seen.values()
    return worker in scheduler.state.draining or any(s.status.worker == worker for s in seen)


def cannot_lend(scheduler: Scheduler) -> str:
    """Return why the loans of members cannot be set; empty if an operator can."""
    mode = scheduler.plan.schedule.mode
    if mode == "disaggregated":
        return ""
    return f"schedule.mode {mode}: no member is lent; TAG is for mode disaggregated"


def cannot_drain(scheduler: Scheduler, worker: str) -> str:
    """Return why a worker cannot be drained and what to do instead; empty if it can."""
    schedule = scheduler.plan.schedule
    service = next(
        (s.status.service for s in scheduler.roster.seen.values() if s.status.worker == worker), ""
    )
    if service in ("reward", "encoder"):
        return f"a {service} worker is given nothing by name: SIGTERM ends it when it is done"
    if service != "rollout":
        mode = schedule.mode
        return f"schedule.mode {mode}: SIGTERM ends a member, and others train its pieces"
    return ""


async def batch_views(scheduler: Scheduler, limit: int, before: int | None) -> list[BatchView]:
    """The newest ``limit`` batches below ``before``, newest first; no others are read."""
    newest = scheduler.chain.version
    end = newest + 2 if before is None else before
    running = [b for b in reversed(scheduler.state.batches) if newest <= b.index < end]
    shown = [_in_flight_view(scheduler.state, batch) for batch in running[:limit]]
    number = min(limit - len(shown), max(0, min(end, newest)))
    steps = await scheduler.chain.page(end + 1, number)  # batch k made version k + 1
    return [*shown, *map(committed_batch, steps)]


async def batch_detail(scheduler: Scheduler, batch: int) -> BatchDetail | None:
    if batch < scheduler.chain.version:
        return await committed_detail(scheduler.store, scheduler.bus.run, batch)
    found = scheduler.state.find_batch(batch)
    return None if found is None else _in_flight(scheduler.state, found)


async def timeline_view(scheduler: Scheduler, batch: int) -> TimelineView | None:
    """When devices changed what they did in a batch; None if that is not stored."""
    if batch == max(0, scheduler.chain.version):
        return timeline_of(scheduler.meter.timeline(batch))
    return await stored_timeline(scheduler.store, scheduler.bus.run, batch)


async def version_views(scheduler: Scheduler, limit: int, before: int | None) -> list[VersionView]:
    """The newest ``limit`` versions below ``before``, newest first."""
    end = scheduler.chain.version + 1 if before is None else before
    adopted: dict[int | None, list[str]] = {}
    for seen in scheduler.roster.seen.values():
        adopted.setdefault(seen.status.policy_version, []).append(seen.status.worker)
    return [
        version_view(step, adopted.get(step.version, ()))
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


def _in_flight(state: State, batch: BatchState) -> BatchDetail:
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
