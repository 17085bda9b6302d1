"""The HTTP API as the process of the run's page serves it: all of it, at one address.

Past events are read from the store, also once the run is over. The present state, and each change
of the run, come from the scheduler through `LiveRun`, which the page uses as well. Once the run is
over, the present state comes from the store.
"""

from functools import partial
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from digenrl.api.events import event_routes
from digenrl.api.export_routes import Exports, export_routes
from digenrl.api.feed import Feed
from digenrl.api.history import history_routes
from digenrl.api.live import LiveRun
from digenrl.api.offline_routes import newest_versions, stored_routes
from digenrl.api.run_history import RunHistory
from digenrl.api.run_logs import log_routes
from digenrl.api.run_routes import shown_routes
from digenrl.api.sample_now import SampleNow, sample_routes
from digenrl.api.status import status_routes
from digenrl.api.what_if import WhatIf, plan_routes
from services.scheduler.shell.api_batches import VersionView
from shared.process.http_access import CALLER, ON_BEHALF, OPERATIONS, Caller
from shared.process.http_api import Before, Limit
from shared.run.log import Log


def _path(request: Request) -> str:
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{quote(request.url.path)}{query}"


def api_routes(
    history: RunHistory,
    live: LiveRun,
    what_if: WhatIf | None = None,
    exports: Exports | None = None,
    sampling: SampleNow | None = None,
    folder: Path | None = None,
) -> APIRouter:
    """Return the routes of the API of a run, the scheduler's last.

    Args:
        live: its scheduler; without an address, the run is over.
        what_if: the planner for other devices.
        exports: the exporter of adapters; without it there is no such route.
        sampling: the sampler of prompts; likewise.
        folder: the run's folder, if it is here.
    """
    router = APIRouter()

    feed = Feed(history, Log.of_evaluations(history.store, history.run))
    router.include_router(event_routes(feed, partial(live.get, "/v1/run")))
    read = (history_routes(history), shown_routes(history), status_routes(history, live))
    for own in (*read, log_routes(folder)):
        router.include_router(own)
    router.include_router(plan_routes(what_if or WhatIf(history)))
    if exports is not None:
        router.include_router(export_routes(exports))
    if sampling is not None:
        router.include_router(sample_routes(sampling))

    @router.get("/v1/versions", include_in_schema=False)
    async def versions(limit: Limit = 50, before: Before = None) -> list[VersionView]:
        return await newest_versions(history, live, limit, before)

    if not live.url:
        router.include_router(stored_routes(history))
    _add_scheduler(router, live)
    return router


def _add_scheduler(router: APIRouter, live: LiveRun) -> None:
    """Add the routes that the scheduler answers."""

    @router.get("/v1/{path:path}", include_in_schema=False)
    async def read(request: Request) -> Response:
        return await live.read(_path(request))

    async def change(request: Request) -> Response:
        caller: Caller | None = request.scope.get(CALLER)
        headers = {ON_BEHALF: "anybody" if caller is None else caller.name}
        if "content-type" in request.headers:
            headers["content-type"] = request.headers["content-type"]
        body, path = await request.body(), quote(request.url.path)
        return await live.change(path, content=body, headers=headers)

    # Each by its own path: the guard has asked for the role that it needs.
    for operation, needs in OPERATIONS.items():
        method, path = operation.split(" ")
        if method == "POST" and needs == "operator" and path.startswith("/v1/"):
            router.add_api_route(path, change, methods=["POST"], include_in_schema=False)
