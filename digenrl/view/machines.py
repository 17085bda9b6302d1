"""Serves the pages of machines: workers, and what every device does over time."""

import asyncio
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from digenrl.api.run_history import LOG_S, RunHistory
from digenrl.api.run_logs import LEVELS, Level, search_logs
from digenrl.reading.wording import USE_WORDS, event_words
from digenrl.view.pages import Pages, shared_route
from services.scheduler.shell.api_models import TagView

MAX_BATCHES = 100
"""Batches of a timeline."""
MAX_EVENTS = 100
"""Past alarms and faults on a page."""
DRAINABLE = ("rollout", "trainer")
"""Services of workers that can be drained by their name."""
Batches = Annotated[int, Query(ge=1, le=MAX_BATCHES, description="how many of the newest batches")]


def machine_pages(pages: Pages) -> APIRouter:
    router, view = APIRouter(route_class=shared_route(pages.view)), pages.view

    @router.get("/timeline")
    async def timeline(request: Request, batches: Batches = 4) -> HTMLResponse:
        return await pages.page(
            request, "timeline", scripts=["timeline.js"], batches=batches, uses=USE_WORDS
        )

    @router.get("/workers")
    async def workers(request: Request) -> HTMLResponse:
        await view.history.look()
        recipe = view.history.recipe
        return await pages.page(
            request, "workers", refreshes=True, drainable=DRAINABLE,
            on_cpu=recipe is not None and recipe.model.device == "cpu",
        )  # fmt: skip

    @router.get("/schedule")
    async def schedule(request: Request) -> HTMLResponse:
        await view.history.look()
        tag, recipe = await view.live.get_as(TagView, "/v1/tag"), view.history.recipe
        can_lend = (
            tag is not None and recipe is not None and recipe.schedule.mode == "disaggregated"
        )
        return await pages.page(
            request, "schedule", refreshes=True, tag=tag, can_lend=can_lend, uses=USE_WORDS,
            num_groups=0 if recipe is None else recipe.batch.groups,
            batches=view.history.recent_usage[::-1],
        )  # fmt: skip

    _add_logs(router, pages)
    return router


def _add_logs(router: APIRouter, pages: Pages) -> None:
    view = pages.view

    @router.get("/logs")
    async def logs(
        request: Request, word: str = Query("", max_length=200),
        process: str = Query("", max_length=100), level: Level = "debug",
    ) -> HTMLResponse:  # fmt: skip
        await view.history.log.look(LOG_S)
        found = await asyncio.to_thread(search_logs, view.folder, word, process, level)
        past = ((each.at, event_words(each)) for each in view.history.log.newest_first)
        named = ((datetime.fromtimestamp(at, UTC), words) for at, words in past if words)
        return await pages.page(
            request, "logs", refreshes=True, found=found, word=word,
            process=process, level=level, levels=LEVELS, events=[*islice(named, MAX_EVENTS)],
        )  # fmt: skip

    @router.get("/data/timeline")
    async def timelines(batches: Batches = 4) -> JSONResponse:
        """The newest batches' timelines, the one in flight last, with the events of each."""
        await view.history.look()
        await view.history.log.look(LOG_S)
        newest = view.history.version
        found: list[dict[str, Any]] = []
        for batch in range(max(0, newest - batches), max(0, newest)):
            if (each := await view.history.timeline(batch)) is not None:
                found.append(each.model_dump(mode="json"))
        flying = await view.live.get(f"/v1/batches/{max(0, newest)}/timeline")
        found = [*found, *([flying] if flying else [])][-batches:]
        return JSONResponse([each | {"events": _events(view.history, each)} for each in found])


def _events(history: RunHistory, timeline: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Return alarms and faults of a batch, each with the seconds since the batch was opened."""
    began = (timeline.get("ended_at") or math.inf) - timeline["seconds"]
    found = ((round(each.at - began, 3), event_words(each)) for each in history.log.entries)
    return [each for each in found if each[1] and 0 <= each[0] <= timeline["seconds"]]
