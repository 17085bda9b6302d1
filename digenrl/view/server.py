"""Serves the pages of one run: HTML made here, and figures as JSON for its charts.

    pictures.py   gallery, training samples           machines.py   workers, timeline
    learning.py   curves, evaluations, versions       run.py        overview, recipe, failed work

`home.py` serves many runs, each below an address of its own. A process of its own, so that viewers
never delay the scheduler. The run's history is read from its object store, its present state is
requested from the scheduler's API; once the run is over, everything but the present is still
available.
"""

from importlib.resources import files
from pathlib import PurePosixPath
from typing import Annotated

from fastapi import APIRouter, FastAPI, HTTPException, Path
from fastapi.responses import Response

from digenrl.api.export_routes import Exports
from digenrl.api.front import api_routes
from digenrl.api.sample_now import SampleNow
from digenrl.api.what_if import WhatIf
from digenrl.view.errors import add_error_pages
from digenrl.view.learning import learning_pages
from digenrl.view.machines import machine_pages
from digenrl.view.markup import templates
from digenrl.view.navigation import PAGES as PAGES
from digenrl.view.pages import Pages
from digenrl.view.pages import View as View
from digenrl.view.pictures import picture_pages, sampling_pages
from digenrl.view.run import run_pages
from shared.process.http_access import Access, check_routes, sign_in
from shared.process.service import Health, probes

CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css"}
Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]


def create_app(view: View, access: Access) -> FastAPI:
    """Return the pages and the API of a run."""
    app = new_app()
    app.include_router(sign_in(access, home="./"))
    pages, what_if = Pages(view, templates()), WhatIf(view.history)
    add_error_pages(app, pages.page)
    sampling = SampleNow(view.history, view.environment)
    app.include_router(picture_pages(pages))
    app.include_router(sampling_pages(pages, sampling))
    app.include_router(learning_pages(pages))
    app.include_router(machine_pages(pages))
    app.include_router(run_pages(pages, what_if))
    exports = Exports(view.history, view.environment)
    routes = api_routes(view.history, view.live, what_if, exports, sampling, view.folder)
    app.include_router(routes)
    check_routes(app)
    return app


def new_app() -> FastAPI:
    """Return an application with probes and the files that pages load."""
    app = FastAPI(title="DigenRL view", openapi_url=None, docs_url=None, redoc_url=None)
    health = Health()
    health.is_ready()
    app.include_router(probes(health))
    app.include_router(_static_files())
    return app


def _static_files() -> APIRouter:
    router = APIRouter()

    @router.get("/static/{name}")
    def static(name: Name) -> Response:
        kind = CONTENT_TYPES.get(PurePosixPath(name).suffix)
        path = files("digenrl.view") / "static" / name
        if kind is None or not path.is_file():
            raise HTTPException(404, f"{name}: there is no such file")
        headers = {"cache-control": "max-age=3600"}
        return Response(path.read_bytes(), media_type=kind, headers=headers)

    return router
