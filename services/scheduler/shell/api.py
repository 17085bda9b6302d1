"""The scheduler's HTTP API. Errors are problem+json (RFC 9457)."""

import asyncio
import uuid
from typing import Annotated, Literal

from fastapi import FastAPI, HTTPException, Path, Query

from services.scheduler.shell import api_models as models
from services.scheduler.shell import views
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.dead_letters_api import add_dead_letters
from shared.messages.contracts import OperatorRequest, TagRequest
from shared.process.http_access import Access, check_routes, sign_in
from shared.process.http_api import Problem, add_docs, add_problems
from shared.process.service import probes

Limit = Annotated[int, Query(ge=1, le=200, description="how many at most")]
Before = Annotated[
    int | None, Query(ge=0, lt=2**31, description="only those with a smaller number")
]
Number = Annotated[int, Path(ge=0, lt=2**31, description="number of the batch")]
PUBLISH_S = 4.0
"""Longest time in which a request is to be stored."""
DESCRIPTION = """Shows where a run is and what its workers do, and takes requests to it.

Requests send a token, `Authorization: Bearer ...` (docs/security.md): one of a viewer reads, one of
an operator steers the run as well. With an Idempotency-Key, what is sent twice is done once.
Errors are problem+json (RFC 9457). A request that is accepted (202) takes effect a moment later.
"""
ERRORS: dict[int | str, dict[str, object]] = {
    404: {"model": Problem, "description": "there is no such thing"},
    409: {"model": Problem, "description": "the run is not in a state for this"},
    503: {"model": Problem, "description": "the broker does not store the request"},
    422: {"model": Problem, "description": "the request is not understood"},
}


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

    @app.get("/v1/run", operation_id="get_run", tags=["run"])
    def run() -> models.RunView:
        """What the run is doing."""
        return views.run_view(scheduler)

    @app.get("/v1/workers", operation_id="list_workers", tags=["run"])
    def workers() -> list[models.WorkerView]:
        """Every live worker and what it does right now."""
        return views.worker_views(scheduler)

    _add_batches(app, scheduler)
    _add_devices(app, scheduler)
    _add_tag(app, scheduler)
    _add_actions(app, scheduler)
    add_dead_letters(app, scheduler, PUBLISH_S)
    check_routes(app)
    return app


def _add_batches(app: FastAPI, scheduler: Scheduler) -> None:
    @app.get("/v1/batches", operation_id="list_batches", tags=["run"], responses={422: ERRORS[422]})
    async def batches(limit: Limit = 50, before: Before = None) -> list[models.BatchView]:
        """The newest batches, the one in flight first."""
        return await views.batch_views(scheduler, limit, before)

    @app.get(
        "/v1/batches/{batch}",
        operation_id="get_batch",
        tags=["run"],
        responses={k: ERRORS[k] for k in (404, 422)},
    )
    async def batch(batch: Number) -> models.BatchDetail:
        """One batch with its groups."""
        found = await views.batch_detail(scheduler, batch)
        if found is None:
            raise HTTPException(404, f"batch {batch} has not begun")
        return found

    @app.get(
        "/v1/versions", operation_id="list_versions", tags=["run"], responses={422: ERRORS[422]}
    )
    async def versions(limit: Limit = 50, before: Before = None) -> list[models.VersionView]:
        """The newest policy versions."""
        return await views.version_views(scheduler, limit, before)


def _add_devices(app: FastAPI, scheduler: Scheduler) -> None:
    @app.get(
        "/v1/batches/{batch}/usage",
        operation_id="get_usage",
        tags=["run"],
        responses={k: ERRORS[k] for k in (404, 422)},
    )
    async def usage(batch: Number) -> models.UsageView:
        """What the devices did from the opening of a batch to its commit."""
        found = await views.usage_view(scheduler, batch)
        if found is None:
            raise HTTPException(404, f"what devices did in batch {batch} is not known")
        return found

    @app.get(
        "/v1/batches/{batch}/timeline",
        operation_id="get_timeline",
        tags=["run"],
        responses={k: ERRORS[k] for k in (404, 422)},
    )
    async def timeline(batch: Number) -> models.TimelineView:
        """When the devices changed what they did; of the batch in flight, so far."""
        found = await views.timeline_view(scheduler, batch)
        if found is None:
            raise HTTPException(404, f"what devices did in batch {batch} is not known")
        return found


def _add_tag(app: FastAPI, scheduler: Scheduler) -> None:
    @app.get("/v1/tag", operation_id="get_tag", tags=["tag"])
    def tag() -> models.TagView:
        """Trainer-assisted generation: decisions with their predicted and measured gains."""
        return views.tag_view(scheduler)

    @app.post(
        "/v1/tag",
        operation_id="set_tag",
        status_code=202,
        tags=["tag"],
        responses={k: ERRORS[k] for k in (422, 503)},
    )
    async def set_tag(body: models.TagBody) -> models.Accepted:
        """Choose how many groups the trainer generates: auto, off, or a fixed number."""
        limit = scheduler.plan.num_groups
        if body.mode == "fixed" and body.groups is None:
            raise HTTPException(422, "groups: mode fixed needs it")
        if body.groups is not None and body.groups > limit:
            raise HTTPException(422, f"groups: a batch has {limit}, not {body.groups}")
        accepted = models.Accepted(action="tag", id=uuid.uuid4().hex)
        request = TagRequest(mode=body.mode, groups=body.groups or 0, id=accepted.id)
        await _publish(scheduler, request)
        return accepted


def _add_actions(app: FastAPI, scheduler: Scheduler) -> None:
    def add(action: Literal["pause", "resume", "stop"], description: str) -> None:
        @app.post(
            f"/v1/run/{action}",
            operation_id=f"{action}_run",
            status_code=202,
            tags=["actions"],
            summary=action.title(),
            description=description,
            responses={k: ERRORS[k] for k in (409, 503)},
        )
        async def request() -> models.Accepted:
            if scheduler.state.phase == "finished":
                raise HTTPException(409, "the run is finished")
            accepted = models.Accepted(action=action, id=uuid.uuid4().hex)
            await _publish(scheduler, OperatorRequest(action=action, id=accepted.id))
            return accepted

    add("pause", "Issue no further fragments until resumed; work in progress is finished.")
    add("resume", "Continue after a pause, a stop or a failure.")
    add("stop", "End the run where it is; it can be resumed from its newest commit.")


async def _publish(scheduler: Scheduler, request: OperatorRequest | TagRequest) -> None:
    """Store a request; say so if NATS does not store it in time, when it may be stored later."""
    try:
        async with asyncio.timeout(PUBLISH_S):
            await scheduler.bus.publish(request)
    except TimeoutError:
        reason = "NATS stores nothing" if scheduler.health.ready else scheduler.health.reason
        raise HTTPException(503, f"{reason}; repeat the request then") from None
