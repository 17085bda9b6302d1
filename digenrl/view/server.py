"""Serves the run's page: HTML made here, and figures as JSON for its charts.

    /            state of the run, curves, alarms       /timeline   use of every device over time
    /samples     samples of the model, over time         /workers    workers, by host
    /batches     training samples, worst first, and why  /evaluations  figures at fixed seeds
    /sample      history of a sample
    /schedule    decisions and their gains       /versions   all policy versions
    /letters     dead letters            /recipe      the resolved recipe
    /plan        plans for other devices

A process of its own, so that viewers never delay the scheduler. The run's history is read from its
object store, its present state is requested from the scheduler's API; once the run is over,
everything but the present is still available.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Path, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from jinja2 import Environment

from digenrl.api.batch_records import CommittedBatches, Order
from digenrl.api.export_routes import Exports
from digenrl.api.front import api_routes
from digenrl.api.live import LiveRun
from digenrl.api.offline_routes import newest_versions
from digenrl.api.run_history import RunHistory
from digenrl.api.status import newest_letters, read_run, stored_letters
from digenrl.api.what_if import POOL, PlanRefused, WhatIf
from digenrl.evaluation.records import FIGURES
from digenrl.reading.facts import MAX_LETTERS
from digenrl.reading.letters import reasons
from digenrl.reading.wording import KINDS, QUEUES, USE_WORDS
from digenrl.view.errors import add_error_pages
from digenrl.view.figures import PER_PAGE, curves_of, sample_of, samples_of
from digenrl.view.markup import templates
from services.scheduler.costs.profile import profile_names
from services.scheduler.shell.api_models import RunView, TagView
from shared.process.http_access import CALLER, Access, Caller, check_routes, sign_in
from shared.process.http_api import Before
from shared.process.service import Health, probes

PAGES = (
    "overview", "timeline", "samples", "batches", "evaluations", "workers", "schedule", "versions",
    "letters", "recipe", "plan",
)  # fmt: skip
TITLES = {"samples": "gallery", "batches": "training samples", "letters": "dead letters"}
"""Titles of pages whose address is less clear."""
ASSETS = {
    "app.js": "text/javascript", "timeline.js": "text/javascript", "style.css": "text/css",
    "uPlot.iife.min.js": "text/javascript", "uPlot.min.css": "text/css",
    "idiomorph.min.js": "text/javascript",
}  # fmt: skip
POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
"""Content security policy: the page asks no other host for anything and runs no inline script."""
MAX_BATCHES = 100
"""Batches of a timeline."""
SAMPLES_PER_PAGE = 24
DRAINABLE = ("rollout", "trainer")
"""Services of workers that can be drained by their name."""
Batches = Annotated[int, Query(ge=1, le=MAX_BATCHES, description="how many of the newest batches")]
Number = Annotated[int, Path(ge=1, lt=2**31)]
Step = Annotated[int | None, Query(ge=1, lt=2**31)]
OneStep = Annotated[int, Query(ge=1, lt=2**31)]
Place = Annotated[int, Query(ge=0, lt=2**31)]
Stale = Literal["", "0", "1"]
Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]


@dataclass(frozen=True, slots=True)
class View:
    """One run, and what else is compared with it."""

    history: RunHistory
    live: LiveRun
    others: tuple[RunHistory, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Variables that locate the run's store, for a separate process."""

    @property
    def runs(self) -> tuple[RunHistory, ...]:
        return (self.history, *self.others)


def create_app(view: View, access: Access) -> FastAPI:
    app = FastAPI(title="DigenRL view", openapi_url=None, docs_url=None, redoc_url=None)
    health = Health()
    health.is_ready()
    app.include_router(probes(health))
    app.include_router(sign_in(access, home="/"))
    pages = Pages(view, templates())
    add_error_pages(app, pages.page)
    _add_pages_of_now(app, pages)
    _add_samples(app, pages)
    _add_pages_of_the_past(app, pages)
    _add_data(app, view)
    _add_files(app)
    history, what_if = view.history, WhatIf(view.history)
    _add_plan(app, pages, what_if)
    exports = Exports(history, view.environment)
    app.include_router(api_routes(history, view.live, what_if, exports))
    check_routes(app)
    return app


@dataclass(frozen=True, slots=True)
class Pages:
    """Renders pages of a view."""

    view: View
    templates: Environment

    async def page(self, request: Request, name: str, **fields: Any) -> HTMLResponse:
        """Return a page, or with ``?part`` only what changes in it."""
        caller: Caller | None = request.scope.get(CALLER)
        view = self.view
        reading = await read_run(view.history, view.live)
        live = await view.live.get_as(RunView, "/v1/run")
        template = "part" if "part" in request.query_params else "whole"
        text = self.templates.get_template(f"{template}.html").render(
            page=name, pages=PAGES, titles=TITLES, run=view.history.run, reading=reading, live=live,
            others=[each.run for each in view.others], **fields,
            may_steer=bool(self.view.live.url) and caller is not None and caller.may("operator"),
            may_export=caller is not None and caller.may("operator"),
        )  # fmt: skip
        return HTMLResponse(text, headers={"content-security-policy": POLICY})


def _add_pages_of_now(app: FastAPI, pages: Pages) -> None:
    view = pages.view

    @app.get("/")
    async def overview(request: Request) -> HTMLResponse:
        return await pages.page(request, "overview", words=FIGURES, queue_words=QUEUES)

    @app.get("/timeline")
    async def timeline(request: Request, batches: Batches = 4) -> HTMLResponse:
        return await pages.page(request, "timeline", batches=batches, uses=USE_WORDS)

    @app.get("/workers")
    async def workers(request: Request) -> HTMLResponse:
        return await pages.page(request, "workers", drainable=DRAINABLE)

    @app.get("/schedule")
    async def schedule(request: Request) -> HTMLResponse:
        await view.history.look()
        tag, recipe = await view.live.get_as(TagView, "/v1/tag"), view.history.recipe
        can_lend = (
            tag is not None and recipe is not None and recipe.schedule.mode == "disaggregated"
        )
        return await pages.page(
            request, "schedule", tag=tag, can_lend=can_lend, uses=USE_WORDS,
            groups=0 if recipe is None else recipe.batch.groups,
            batches=view.history.recent_usage[::-1],
        )  # fmt: skip


def _add_samples(app: FastAPI, pages: Pages) -> None:
    history = pages.view.history
    past = CommittedBatches(history)

    @app.get("/samples")
    async def samples(request: Request, version: Before = None) -> HTMLResponse:
        await history.look()
        return await pages.page(request, "samples", **samples_of(history, version))

    @app.get("/batches")
    async def batches(
        request: Request, step: Step = None, order: Order = "worst", after: Before = 0
    ) -> HTMLResponse:
        await history.look()
        at = step or max(1, history.version)
        found = await past.samples(at - 1, after or 0, SAMPLES_PER_PAGE, order)
        if found is None and step is not None:
            raise HTTPException(404, f"step {step} is not committed")
        return await pages.page(
            request, "batches", batch=found, at=at, order=order, newest=history.version
        )

    @app.get("/sample")
    async def sample(request: Request, step: OneStep, group: Place, number: Place) -> HTMLResponse:
        await history.look()
        found = sample_of(await past.group_samples(step - 1, group), number)
        if found is None:
            raise HTTPException(404, f"step {step} has no sample {number} of a group {group}")
        letters = await history.letters()
        return await pages.page(request, "sample", at=step, letters=letters.letters, **found)


def _add_pages_of_the_past(app: FastAPI, pages: Pages) -> None:
    history = pages.view.history

    @app.get("/evaluations")
    async def evaluations(request: Request) -> HTMLResponse:
        return await pages.page(request, "evaluations", words=FIGURES)

    @app.get("/versions")
    async def versions(request: Request, before: Before = None) -> HTMLResponse:
        await history.look()
        best, recipe = history.best(), history.recipe
        shown = await newest_versions(history, pages.view.live, PER_PAGE, before)
        return await pages.page(
            request, "versions", shown=shown, best=best,
            has_adapter=recipe is not None and recipe.model.trained == "lora",
            kept={each.version for each in shown if each.is_kept},
        )  # fmt: skip

    @app.get("/letters")
    async def letters(
        request: Request, before: Before = None, state: Literal["open", "all"] = "open"
    ) -> HTMLResponse:
        found = await newest_letters(pages.view.live, state, before)
        if found is None:
            found = await stored_letters(history, state, before)
        opened = [each for each in found if each.state == "open"]
        return await pages.page(
            request, "letters", letters=found, state=state, kinds=KINDS,
            reasons=reasons(opened), useful=[each.number for each in opened if not each.outcome],
            older=found[-1].number if len(found) == MAX_LETTERS else None,
            committed=max(0, history.version),
        )  # fmt: skip

    @app.get("/recipe")
    async def recipe(request: Request) -> HTMLResponse:
        await history.look()
        found = history.recipe
        text = "" if found is None else found.model_dump_json(indent=2, exclude_none=True)
        return await pages.page(request, "recipe", text=text)


def _add_plan(app: FastAPI, pages: Pages, what_if: WhatIf) -> None:
    @app.get("/plan")
    async def plan(
        request: Request, hosts: str = Query("", max_length=200), staleness: Stale = "",
        profile: str = Query("", max_length=100),
    ) -> HTMLResponse:  # fmt: skip
        found, refused = None, ""
        if hosts and re.fullmatch(POOL, hosts) is None:
            refused = "hosts: say kinds and GPUs, e.g. h100x8*2+a100x8*2"
        elif profile and profile not in profile_names():
            refused = f"profile: {profile} is none of {', '.join(profile_names())}"
        elif hosts:
            try:
                asked = int(staleness) if staleness else None
                found = await what_if.plan(hosts=hosts, staleness=asked, profile=profile or None)
            except PlanRefused as reason:
                refused = str(reason)
        return await pages.page(
            request, "plan", found=found, refused=refused, hosts=hosts, staleness=staleness,
            profile=profile, profiles=profile_names(),
        )  # fmt: skip


def _add_data(app: FastAPI, view: View) -> None:
    @app.get("/data/steps")
    async def steps(after: int = Query(-1, ge=-1, lt=2**31)) -> JSONResponse:
        """Metrics of the steps after a version, and all evaluations, of each run."""
        for each in view.runs:
            await each.look()
        return JSONResponse([curves_of(each, after) for each in view.runs])

    @app.get("/data/timeline")
    async def timeline(batches: Batches = 4) -> JSONResponse:
        """The newest batches' timelines, the one in flight last."""
        await view.history.look()
        newest = view.history.version
        found: list[Any] = []
        for batch in range(max(0, newest - batches), max(0, newest)):
            if (each := await view.history.timeline(batch)) is not None:
                found.append(each.model_dump(mode="json"))
        flying = await view.live.get(f"/v1/batches/{max(0, newest)}/timeline")
        return JSONResponse([*found, *([flying] if flying else [])][-batches:])


def _add_files(app: FastAPI) -> None:
    @app.get("/static/{name}")
    def static(name: Name) -> Response:
        if name not in ASSETS:
            raise HTTPException(404, f"{name}: there is no such file")
        data = (files("digenrl.view") / "static" / name).read_bytes()
        return Response(data, media_type=ASSETS[name], headers={"cache-control": "max-age=3600"})
