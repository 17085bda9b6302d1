"""Serves many runs: a page with all of them, and each below an address of its own.

/runs             all runs
/runs/NAME/...    the pages and the API of one
/...              likewise of the run that the process was started for; without one, all runs
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from digenrl.view.errors import add_error_pages
from digenrl.view.markup import templates
from digenrl.view.pages import BASE, WALL, View, render
from digenrl.view.server import create_app, new_app
from shared.process.http_access import Access, check_routes, sign_in
from shared.process.operations import split_run

ALL_RUNS = "/runs"
OF_ALL_RUNS = re.compile(r"/(v1/)?runs(/|$)")
"""Addresses that are not below the run of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCard:
    """A run among others."""

    name: str
    state: str
    step: int
    steps: int | None
    reward: float | None
    age_seconds: float


class Fleet(Protocol):
    """Runs that one process shows."""

    async def cards(self) -> Sequence[RunCard]:
        """Return all runs, the newest first."""

    async def open(self, name: str) -> View | None:
        """Return a run, the same object until it has ended or was started again; None if there is
        no such run.

        Raises:
            Unavailable: if its store does not answer.
        """


def create_home(fleet: Fleet, access: Access, own: View | None = None) -> ASGIApp:
    """Return the application of many runs; ``own`` is the run that its process was started for."""
    app = all_runs_app(fleet, access)
    app.mount("/runs/{name}", OneOfMany(fleet, lambda view: create_app(view, access)))
    return Home(app, None if own is None else create_app(own, access))


def all_runs_app(fleet: Fleet, access: Access) -> FastAPI:
    """Return the page of all runs."""
    app, environment = new_app(), templates()
    app.include_router(sign_in(access, home="./"))

    async def page(request: Request, name: str, **fields: object) -> HTMLResponse:
        template = name if "part" in request.query_params else "all"
        return render(environment, request, template, page=name, scripts=[], styles=[], **fields)

    add_error_pages(app, page)

    @app.get("/")
    async def begin() -> RedirectResponse:
        return RedirectResponse(ALL_RUNS)

    @app.get(ALL_RUNS)
    async def runs(request: Request) -> HTMLResponse:
        return await page(request, "runs", cards=await fleet.cards())

    check_routes(app)
    return app


@dataclass(slots=True)
class OneOfMany:
    """Passes requests below the address of a run to the application of this run."""

    fleet: Fleet
    create: Callable[[View], FastAPI]
    _apps: dict[str, tuple[View, FastAPI]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, (base, path) = scope["path_params"]["name"], split_run(scope["path"])
        view = await self.fleet.open(name)
        if view is None:
            raise HTTPException(404, f"there is no run {name}")
        known = self._apps.get(name)
        if known is None or known[0] is not view:
            known = self._apps[name] = view, self.create(view)
        below = {"path": path, "raw_path": path.encode(), "root_path": "", BASE: base}
        await known[1]({**scope, **below, WALL: ALL_RUNS}, receive, send)


@dataclass(frozen=True, slots=True)
class Home:
    """Passes requests to the page of all runs, or to the run of the process."""

    all_runs: ASGIApp
    own: ASGIApp | None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_own = self.own is not None and not OF_ALL_RUNS.match(scope.get("path", ""))
        app = self.own if is_own and self.own is not None else self.all_runs
        return app({**scope, WALL: ALL_RUNS}, receive, send)
