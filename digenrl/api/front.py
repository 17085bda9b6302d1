"""The HTTP API as the process of the run's page serves it: all of it, at one address.

What has happened is read from the store here; it is there as well once the run is over. What is
now, and what changes the run, is asked from the scheduler: twice a second, however many ask, so
that its load does not grow with them. An answer is at most a second old, and never from before a
change that was asked for here. Of a run that is over, the store says what is now as well.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import httpx
from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import TypeAdapter

from digenrl.api.events import event_routes
from digenrl.api.exported import Exports, export_routes
from digenrl.api.feed import Feed
from digenrl.api.history import history_routes
from digenrl.api.shown import shown_routes
from digenrl.api.stored import stored_routes, with_figures
from digenrl.api.what_if import WhatIf, plan_routes
from digenrl.view.history import RunHistory
from services.scheduler.shell.api_batches import VersionView
from shared.process.http_access import CALLER, ON_BEHALF, OPERATIONS, Caller
from shared.process.http_once import HEADER as IDEMPOTENCY_KEY
from shared.store import ObjectStore

FRESH_S = 0.5
"""Age at which an answer is asked for anew."""
STALE_S = 1.0
"""Age up to which it is still given meanwhile: a scheduler that opens a batch answers late."""
MAX_KEPT = 256
"""Answers that are kept."""
VERSIONS = TypeAdapter(list[VersionView])
PASSED_ON = ("content-type", "retry-after")


class Live(Protocol):
    """Knows where the scheduler answers; `digenrl.view.live.LiveRun` does."""

    url: str
    client: httpx.AsyncClient

    async def get(self, path: str) -> Any | None: ...


@dataclass(slots=True)
class Scheduler:
    """Asks the scheduler on behalf of others."""

    live: Live
    _kept: OrderedDict[str, tuple[float, Response]] = field(default_factory=OrderedDict)
    _asking: dict[str, "asyncio.Task[Response]"] = field(default_factory=dict)
    """What the scheduler was asked and has not answered."""

    async def read(self, path: str) -> Response:
        """Return the answer to a GET, of a second ago at most.

        Raises:
            HTTPException: if the scheduler does not answer.
        """
        at, kept = self._kept.get(path, (float("-inf"), None))
        age = time.monotonic() - at
        if age > FRESH_S and path not in self._asking:
            task = self._asking[path] = asyncio.create_task(self._ask_once(path))
            task.add_done_callback(_seen)
        if kept is None or age > STALE_S:
            kept = await asyncio.shield(self._asking[path])
        return Response(kept.body, kept.status_code, dict(kept.headers))

    async def change(self, path: str, **more: Any) -> Response:
        """Pass a POST on; nothing that was answered before it is given afterwards.

        Raises:
            HTTPException: if the scheduler does not answer.
        """
        try:
            return await self.ask("POST", path, **more)
        finally:
            self._kept.clear()
            self._asking.clear()

    async def _ask_once(self, path: str) -> Response:
        """Ask, and keep the answer unless it is of before a change."""
        task = asyncio.current_task()
        try:
            found = await self.ask("GET", path)
            if self._asking.get(path) is task:
                self._kept[path] = time.monotonic(), found
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            return found
        finally:
            if self._asking.get(path) is task:
                del self._asking[path]

    async def ask(self, method: str, path: str, **more: Any) -> Response:
        """Return what the scheduler answers.

        Raises:
            HTTPException: if it does not.
        """
        if not self.live.url:
            raise HTTPException(409, "the run is over: `digenrl up --resume` goes on with it")
        try:
            found = await self.live.client.request(method, f"{self.live.url}{path}", **more)
        except httpx.HTTPError as error:
            raise HTTPException(503, f"the scheduler does not answer: {error}") from error
        kept = {name: found.headers[name] for name in PASSED_ON if name in found.headers}
        return Response(found.content, found.status_code, kept)


def _path(request: Request) -> str:
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{quote(request.url.path)}{query}"


def _seen(task: "asyncio.Task[Response]") -> None:
    """Look at the error of an answer that nobody waited for."""
    if not task.cancelled():
        task.exception()


def api_routes(
    store: ObjectStore,
    run: str,
    live: Live,
    history: RunHistory | None = None,
    what_if: WhatIf | None = None,
    exports: Exports | None = None,
) -> APIRouter:
    """Return the routes of the API of a run, those of its scheduler last.

    Args:
        live: its scheduler; without an address, the run is over.
        history: what the page has read of the run.
        what_if: what plans for other devices.
        exports: what makes files of adapters; without it there is no such route.
    """
    router, scheduler = APIRouter(), Scheduler(live)

    async def say_run() -> Any | None:
        return await live.get("/v1/run")

    router.include_router(event_routes(Feed(store, run), say_run))
    router.include_router(history_routes(store, run))
    history = history or RunHistory(store, run)
    router.include_router(shown_routes(history))
    router.include_router(plan_routes(what_if or WhatIf(history)))
    if exports is not None:
        router.include_router(export_routes(exports))
    if not live.url:
        router.include_router(stored_routes(history))

    @router.get("/v1/versions", include_in_schema=False)
    async def versions(request: Request) -> Any:
        found = await scheduler.read(_path(request))
        if found.status_code != 200:
            return found
        await history.look()
        return await with_figures(history, VERSIONS.validate_json(bytes(found.body)))

    _add_scheduler(router, scheduler)
    return router


def _add_scheduler(router: APIRouter, scheduler: Scheduler) -> None:
    """Add the routes that the scheduler answers."""

    @router.get("/v1/{path:path}", include_in_schema=False)
    async def read(request: Request) -> Response:
        return await scheduler.read(_path(request))

    async def change(request: Request) -> Response:
        caller: Caller | None = request.scope.get(CALLER)
        headers = {ON_BEHALF: "anybody" if caller is None else caller.name}
        for name in (IDEMPOTENCY_KEY, "content-type"):
            if name in request.headers:
                headers[name] = request.headers[name]
        body, path = await request.body(), quote(request.url.path)
        return await scheduler.change(path, content=body, headers=headers)

    # Each by its own path: the guard has asked for the role that it needs.
    for operation, needs in OPERATIONS.items():
        method, path = operation.split(" ")
        if method == "POST" and needs == "operator" and path.startswith("/v1/"):
            router.add_api_route(path, change, methods=["POST"], include_in_schema=False)
