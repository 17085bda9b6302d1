"""Renders the pages of one run, below the address at which its process serves the run."""

import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.api.status import read_run
from digenrl.view.navigation import GROUPS, PARENTS, address, group_of, title
from services.scheduler.shell.api_models import RunView
from shared.caches import SharedResults
from shared.process.http_access import CALLER, Caller

POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
"""Content security policy: the page asks no other host for anything and runs no inline script."""
BASE = "digenrl.base"
"""Where a request's scope has the address of the run, such as ``/runs/digits``; empty: the root."""
WALL = "digenrl.wall"
"""Where a request's scope has the address of the page of all runs, if there is one."""
MAY_START_KEY = "digenrl.may_start"
"""Where a request's scope has whether operators may start runs from the page."""

RENDERED_S = 0.5
"""Maximum age in seconds of a page that was rendered for another reader."""
MAX_RENDERED_PAGES = 32
"""Rendered pages that are kept."""


@dataclass(frozen=True, slots=True)
class View:
    """One run."""

    history: RunHistory
    live: LiveRun
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Variables that locate the run's store, for a separate process."""
    folder: Path | None = None
    """The run's folder, if it is on this host."""


def shared_route(view: View) -> type[APIRoute]:
    """Return a class of routes that render a page once for all readers who see the same."""
    rendered: SharedResults[tuple[object, ...], Response] = SharedResults(MAX_RENDERED_PAGES)

    class SharedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_once(request: Request) -> Response:
                history, scope = view.history, request.scope
                await history.look()
                reader = scope.get(BASE), scope.get(WALL), is_operator(request)
                state = history.version, len(history.evaluations), len(history.log.numbered)
                now = view.live.changes, time.monotonic() // RENDERED_S
                key = (request.url.path, request.url.query, *reader, *state, *now)
                return await rendered.get(key, lambda: handle(request))

            return handle_once

    return SharedRoute


@dataclass(frozen=True, slots=True)
class Pages:
    """Renders pages of a view."""

    view: View
    templates: Environment

    async def page(
        self, request: Request, name: str, *, refreshes: bool = False, **fields: Any
    ) -> HTMLResponse:
        """Return the page of the template ``name``, or with ``?part`` only what changes in it.
        With ``refreshes`` an open page asks for its changing part again; a refresh does not
        replace the content of ``name.fixed.html``."""
        view = self.view
        reading = await read_run(view.history, view.live)
        live = await view.live.get_as(RunView, "/v1/run")
        template = "part" if "part" in request.query_params else "whole"
        run = request.scope.get(BASE, "").rpartition("/")[2] or view.history.run
        return render(
            self.templates, request, template, page=name, run=run, reading=reading,
            live=live, refreshes=refreshes, may_steer=bool(view.live.url) and is_operator(request),
            **fields,
        )  # fmt: skip


def render(
    templates: Environment, request: Request, template: str, *, page: str,
    scripts: Sequence[str] = (), styles: Sequence[str] = (), **fields: Any,
) -> HTMLResponse:  # fmt: skip
    """Return a page, with what every page has; ``scripts`` and ``styles`` are its own files."""
    text = templates.get_template(f"{template}.html").render(
        page=page, groups=GROUPS, group=group_of(page), tab=PARENTS.get(page, page), title=title,
        address=address, base=request.scope.get(BASE, ""), wall=request.scope.get(WALL, ""),
        may_export=is_operator(request), may_start=request.scope.get(MAY_START_KEY, False),
        scripts=[*scripts], styles=[*styles], **fields,
    )  # fmt: skip
    return HTMLResponse(text, headers={"content-security-policy": POLICY})


def is_operator(request: Request) -> bool:
    """Whether the caller may change something."""
    caller: Caller | None = request.scope.get(CALLER)
    return caller is not None and caller.may("operator")
