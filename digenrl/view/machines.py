"""Serves the pages of machines: workers, and what every device does over time."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from digenrl.reading.wording import USE_WORDS
from digenrl.view.pages import Pages
from services.scheduler.shell.api_models import TagView

MAX_BATCHES = 100
"""Batches of a timeline."""
DRAINABLE = ("rollout", "trainer")
"""Services of workers that can be drained by their name."""
Batches = Annotated[int, Query(ge=1, le=MAX_BATCHES, description="how many of the newest batches")]


def machine_pages(pages: Pages) -> APIRouter:
    router, view = APIRouter(), pages.view

    @router.get("/timeline")
    async def timeline(request: Request, batches: Batches = 4) -> HTMLResponse:
        return await pages.page(
            request, "timeline", scripts=["timeline.js"], batches=batches, uses=USE_WORDS
        )

    @router.get("/workers")
    async def workers(request: Request) -> HTMLResponse:
        return await pages.page(request, "workers", refreshes=True, drainable=DRAINABLE)

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

    @router.get("/data/timeline")
    async def timelines(batches: Batches = 4) -> JSONResponse:
        """The newest batches' timelines, the one in flight last."""
        await view.history.look()
        newest = view.history.version
        found: list[Any] = []
        for batch in range(max(0, newest - batches), max(0, newest)):
            if (each := await view.history.timeline(batch)) is not None:
                found.append(each.model_dump(mode="json"))
        flying = await view.live.get(f"/v1/batches/{max(0, newest)}/timeline")
        return JSONResponse([*found, *([flying] if flying else [])][-batches:])

    return router
