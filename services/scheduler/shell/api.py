"""The scheduler's HTTP API. Errors are problem+json (RFC 9457)."""

import asyncio
import uuid
from typing import Annotated, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Path

from services.scheduler import limits
from services.scheduler.shell import api_batches, views
from services.scheduler.shell import api_models as models
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.committed_views import stored_usage
from services.scheduler.shell.dead_letters_api import dead_letters
from services.scheduler.shell.load import BatchForecasts, load_view
from shared.messages.contracts import Action, OperatorRequest, TagRequest, WorkerRequest
from shared.process.http_access import Access, check_routes, sign_in
from shared.process.http_api import (
    BatchNumber,
    Before,
    Limit,
    add_docs,
    add_problems,
    errors,
    existing,
)
from shared.process.service import probes
from shared.run.usage import BatchUsage, Timeline

WorkerName = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="name of the worker")
]
DESCRIPTION = """Shows where a run is and what its workers do, and takes requests to it.

Requests send a token, `Authorization: Bearer ...` (docs/security.md): one of a viewer reads, one of
an operator steers the run as well. A request may be repeated: twice is as once.
Errors are problem+json (RFC 9457). A request that is accepted (202) takes effect a moment later.
"""
NOT_FOUND_ERRORS = errors(404)
CONFLICT_ERRORS = errors(409, 503)


def create_app(scheduler: Scheduler, access: Access | None = None) -> FastAPI:
    app = FastAPI(
        title="DigenRL scheduler",
        version="1",
        description=DESCRIPTION,
        servers=[{"url": "/", "description": "this scheduler"}],
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(probes(scheduler.health))
    app.include_router(sign_in(access or Access()))
    add_problems(app)
    add_docs(app)
    for router in (
        _run(scheduler), _batches(scheduler), _workers(scheduler), _tag(scheduler),
        _actions(scheduler), dead_letters(scheduler),
    ):  # fmt: skip
        app.include_router(router)
    check_routes(app)
    return app


def _run(scheduler: Scheduler) -> APIRouter:
    router = APIRouter(tags=["run"])

    @router.get("/v1/run", operation_id="get_run")
    def run() -> models.RunView:
        """State of the run."""
        if scheduler.state.recovering or not scheduler.run_log.is_read:
            raise HTTPException(503, "starting: the run is being read", {"retry-after": "1"})
        return views.run_view(scheduler)

    forecasts = BatchForecasts()

    @router.get("/v1/load", operation_id="get_load")
    def load() -> LoadView:
        """Throughput, what it could be, and where work waits."""
        return load_view(scheduler, forecasts)

    return router


def _batches(scheduler: Scheduler) -> APIRouter:
    router = APIRouter(tags=["run"])

    @router.get("/v1/batches", operation_id="list_batches")
    async def batches(limit: Limit = 50, before: Before = None) -> list[api_batches.BatchView]:
        """The newest batches, the one in flight first."""
        return await views.batch_views(scheduler, limit, before)

    @router.get("/v1/batches/{batch}", operation_id="get_batch", responses=NOT_FOUND_ERRORS)
    async def batch(batch: BatchNumber) -> api_batches.BatchDetail:
        """One batch with its groups."""
        detail = await views.batch_detail(scheduler, batch)
        return existing(detail, f"batch {batch} has not begun")

    @router.get("/v1/versions", operation_id="list_versions")
    async def versions(limit: Limit = 50, before: Before = None) -> list[api_batches.VersionView]:
        """The newest policy versions."""
        return await views.version_views(scheduler, limit, before)

    @router.get("/v1/batches/{batch}/usage", operation_id="get_usage", responses=NOT_FOUND_ERRORS)
    async def usage(batch: BatchNumber) -> BatchUsage:
        """Use of the devices from the opening of a batch to its commit."""
        usage_view = await stored_usage(scheduler.store, scheduler.bus.run, batch)
        return existing(usage_view, f"what devices did in batch {batch} is not known")

    @router.get(
        "/v1/batches/{batch}/timeline", operation_id="get_timeline", responses=NOT_FOUND_ERRORS
    )
    async def timeline(batch: BatchNumber) -> Timeline:
        """When the devices changed what they did; of the batch in flight, so far."""
        timeline_views = await views.timeline_view(scheduler, batch)
        return existing(timeline_views, f"what devices did in batch {batch} is not known")

    return router


def _workers(scheduler: Scheduler) -> APIRouter:
    router = APIRouter(tags=["workers"])

    @router.get("/v1/workers", operation_id="list_workers")
    def workers() -> list[models.WorkerView]:
        """Every live worker and what it does right now."""
        return views.worker_views(scheduler)

    def add(action: Literal["drain", "undrain"], description: str) -> None:
        @router.post(
            f"/v1/workers/{{worker}}/{action}", operation_id=f"{action}_worker", status_code=202,
            summary=action.title(), description=description, responses=errors(404, 409, 503),
        )  # fmt: skip
        async def request(worker: WorkerName) -> models.Accepted:
            existing(views.is_known(scheduler, worker) or None, f"there is no worker {worker!r}")
            if action == "drain" and (reason := views.drain_obstacle(scheduler, worker)):
                raise HTTPException(409, reason)
            accepted = models.Accepted(action=action, id=uuid.uuid4().hex)
            await _publish(scheduler, WorkerRequest(action=action, worker=worker, id=accepted.id))
            return accepted

    add("drain", "Give a worker nothing new; what it has, it finishes. A lent device comes home.")
    add("undrain", "Give a worker work again.")
    return router


def _tag(scheduler: Scheduler) -> APIRouter:
    router = APIRouter(tags=["tag"])

    @router.get("/v1/tag", operation_id="get_tag")
    def tag() -> models.TagView:
        """Trainer-assisted generation: decisions with their predicted and measured gains."""
        return views.tag_view(scheduler)

    @router.post("/v1/tag", operation_id="set_tag", status_code=202, responses=CONFLICT_ERRORS)
    async def set_tag(body: models.TagBody) -> models.Accepted:
        """Choose how many groups the trainer generates: auto, off, or a fixed number."""
        if reason := views.lending_obstacle(scheduler):
            raise HTTPException(409, reason)
        limit = scheduler.plan.num_groups
        if body.mode == "fixed" and body.groups is None:
            raise HTTPException(422, "groups: mode fixed needs it")
        if body.groups is not None and body.groups > limit:
            raise HTTPException(422, f"groups: a batch has {limit}, not {body.groups}")
        accepted = models.Accepted(action="tag", id=uuid.uuid4().hex)
        request = TagRequest(mode=body.mode, groups=body.groups or 0, id=accepted.id)
        await _publish(scheduler, request)
        return accepted

    return router


def _actions(scheduler: Scheduler) -> APIRouter:
    router = APIRouter(tags=["actions"])

    def add(action: Action, description: str) -> None:
        @router.post(
            f"/v1/run/{action.replace('_', '-')}", operation_id=f"{action}_run", status_code=202,
            summary=action.replace("_", " ").capitalize(), description=description,
            responses=CONFLICT_ERRORS,
        )  # fmt: skip
        async def request() -> models.Accepted:
            if scheduler.state.phase == "finished":
                raise HTTPException(409, "the run is finished")
            accepted = models.Accepted(action=action, id=uuid.uuid4().hex)
            await _publish(scheduler, OperatorRequest(action=action, id=accepted.id))
            return accepted

    add("pause", "Issue no further fragments until resumed; work in progress is finished.")
    add(
        "pause_at_failure",
        "Pause as soon as an attempt at work of an open batch fails, at once if one has failed and "
        "is not done since. What failed then waits, so that it can be mended and retried.",
    )
    add(
        "resume",
        "Continue after a pause, a stop or a failure; of a run that goes on, call off a pause at "
        "the next failure.",
    )
    add("stop", "End the run where it is; it can be resumed from its newest commit.")
    return router


async def _publish(
    scheduler: Scheduler, request: OperatorRequest | TagRequest | WorkerRequest
) -> None:
    """Store a request; the response reports if NATS does not store it in time, since it may be
    stored later."""
    try:
        async with asyncio.timeout(limits.PUBLISH_TIMEOUT_S):
            await scheduler.bus.publish(request)
    except TimeoutError:
        reason = "NATS stores nothing" if scheduler.health.ready else scheduler.health.reason
        raise HTTPException(503, f"{reason}; repeat the request then") from None
