"""Serves the pages of learning: curves, evaluations and versions."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from digenrl.api.offline_routes import newest_versions
from digenrl.evaluation.records import FIGURES
from digenrl.view.pages import Pages, shared_route
from shared.process.http_api import Before

PER_PAGE = 50
"""Versions of a page."""


def learning_pages(pages: Pages) -> APIRouter:
    router, view = APIRouter(route_class=shared_route(pages.view)), pages.view
    history = view.history

    @router.get("/curves")
    async def curves(request: Request) -> HTMLResponse:
        return await pages.page(request, "curves")

    @router.get("/evaluations")
    async def evaluations(request: Request) -> HTMLResponse:
        return await pages.page(request, "evaluations", refreshes=True, words=FIGURES)

    @router.get("/versions")
    async def versions(request: Request, before: Before = None) -> HTMLResponse:
        await history.look()
        best, recipe = history.best(), history.recipe
        shown = await newest_versions(history, view.live, PER_PAGE, before)
        return await pages.page(
            request, "versions", refreshes=True, shown=shown, best=best,
            has_adapter=recipe is not None and recipe.model.trained == "lora",
            kept={each.version for each in shown if each.is_kept},
        )  # fmt: skip

    return router
