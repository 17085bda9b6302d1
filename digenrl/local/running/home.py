"""Serves many runs: a page with all of them, and each below an address of its own.

/runs             all runs
/runs/NAME/...    the pages and the API of one
/...              likewise of the run that the process was started for; without one, all runs
"""

import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Path, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from digenrl.local.running.fleet import FolderOfRuns, Value
from digenrl.local.running.run_cards import NOTES_JSON, Notes, RunCard
from digenrl.view.compare import Comparisons, compare_pages
from digenrl.view.errors import add_error_pages
from digenrl.view.markup import templates
from digenrl.view.pages import BASE, MAY_START_KEY, WALL, View, render
from digenrl.view.server import create_app, new_app
from shared.process.http_access import Access, check_routes, sign_in
from shared.process.http_api import PATTERN_TEXTS
from shared.process.operations import split_run
from shared.store.previews import content_type

ALL_RUNS = "/runs"
OF_ALL_RUNS = re.compile(r"/((v1/)?runs|compare)(/|$)")
"""Addresses that are not below the run of the process."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
PATTERN_TEXTS[NAME] = "use 1 to 64 letters, digits, '.', '-' and '_'"
Name = Annotated[str, Path(pattern=NAME)]


class CopyRequest(BaseModel, extra="forbid"):
    """A recipe like a run's, with other values."""

    name: str = Field(pattern=NAME)
    changes: dict[str, Value] = {}
    """Values by the dotted names of keys."""


def create_home(
    fleet: FolderOfRuns, access: Access, own: View | None = None, *, may_start: bool = False
) -> ASGIApp:
    """Return the application of many runs; ``own`` is the run that its process was started for,
    and with ``may_start`` operators may start runs, whose recipes can name Python files."""
    app = all_runs_app(fleet, access, may_start=may_start)
    app.mount("/runs/{name}", OneOfMany(fleet, access))
    return Home(app, None if own is None else create_app(own, access), may_start)


def all_runs_app(fleet: FolderOfRuns, access: Access, *, may_start: bool = False) -> FastAPI:
    """Return the page of all runs."""
    app, environment = new_app(), templates()
    app.include_router(sign_in(access, home="./"))

    async def page(request: Request, name: str, **fields: Any) -> HTMLResponse:
        template = name if "part" in request.query_params else "all"
        fields = {"scripts": ["runs.js"], "query": request.query_params, **fields}
        return render(environment, request, template, page=name, **fields)

    add_error_pages(app, page)

    @app.get("/")
    async def begin() -> RedirectResponse:
        return RedirectResponse(ALL_RUNS)

    @app.get(ALL_RUNS)
    async def runs(request: Request) -> HTMLResponse:
        return await page(request, "runs", cards=await fleet.cards(), fleet=fleet)

    async def names() -> list[str]:
        return [each.name for each in await fleet.cards()]

    app.include_router(compare_pages(Comparisons(fleet.open, names), page))
    app.include_router(_cards_api(fleet))
    app.include_router(_changes_api(fleet, may_start=may_start))
    check_routes(app)
    return app


def _cards_api(fleet: FolderOfRuns) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/runs")
    async def cards() -> list[RunCard]:
        return [*await fleet.cards()]

    @router.get("/v1/runs/{name}/pictures/{kind}")
    def picture(name: Name, kind: Literal["before", "after"]) -> Response:
        if (data := fleet.picture(name, kind)) is None:
            raise HTTPException(404, f"{name} has no picture yet")
        kept = {"cache-control": "private, max-age=60"}
        return Response(data, headers=kept, media_type=content_type(data))

    return router


def _changes_api(fleet: FolderOfRuns, *, may_start: bool) -> APIRouter:
    router = APIRouter()

    def check_exists(name: str, *, as_recipe: bool = False) -> None:
        file = fleet.folder / f"{name}.json"
        if not ((fleet.folder / name).is_dir() or (as_recipe and file.is_file())):
            raise HTTPException(404, f"there is no run {name}")

    @router.post("/v1/runs/{name}/notes")
    def note(name: Name, words: Notes) -> Notes:
        check_exists(name)
        (fleet.folder / name / NOTES_JSON).write_text(words.model_dump_json())
        return words

    @router.post("/v1/runs/{name}/copies", status_code=201)
    def copy(name: Name, wanted: CopyRequest) -> dict[str, str]:
        check_exists(name)
        file = fleet.copy(name, wanted.name, wanted.changes)
        return {"command": f"digenrl up {file}"}

    @router.post("/v1/runs/{name}/start", status_code=202)
    async def start(name: Name) -> dict[str, str]:
        if not may_start:
            raise HTTPException(403, "start `digenrl view --may-start` to start runs from the page")
        check_exists(name, as_recipe=True)
        await fleet.start(name)
        return {"run": name}

    return router


@dataclass(slots=True)
class OneOfMany:
    """Passes requests below the address of a run to the application of this run."""

    fleet: FolderOfRuns
    access: Access
    _apps: dict[str, tuple[View, FastAPI]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, (base, path) = scope["path_params"]["name"], split_run(scope["path"])
        async with self.fleet.keep_open(name) as view:
            if view is None:
                raise HTTPException(404, f"there is no run {name}")
            known = self._apps.get(name)
            if known is None or known[0] is not view:
                known = self._apps[name] = view, create_app(view, self.access)
            below = {"path": path, "raw_path": path.encode(), "root_path": "", BASE: base}
            await known[1]({**scope, **below, WALL: ALL_RUNS}, receive, send)


@dataclass(frozen=True, slots=True)
class Home:
    """Passes requests to the page of all runs, or to the run of the process."""

    all_runs: ASGIApp
    own: ASGIApp | None
    may_start: bool

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_of_all = OF_ALL_RUNS.match(scope.get("path", ""))
        app = self.all_runs if is_of_all else self.own or self.all_runs
        scope = {**scope, WALL: ALL_RUNS, MAY_START_KEY: self.may_start}
        return app(scope, receive, send)
