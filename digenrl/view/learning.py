"""Serves the pages of learning: curves, evaluations and versions."""

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from digenrl.api.offline_routes import newest_versions
from digenrl.evaluation.records import FIGURES
from digenrl.view.figures import PER_PAGE, curves_of
from digenrl.view.pages import Pages
from shared.process.http_api import Before


def learning_pages(pages: Pages) -> APIRouter:
    router, view = APIRouter(), pages.view
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

    @router.get("/data/steps")
    async def steps(after: int = Query(-1, ge=-1, lt=2**31)) -> JSONResponse:
        """Metrics of the steps after a version, and all evaluations, of each run."""
        for each in view.runs:
            await each.look()
        return JSONResponse([curves_of(each, after) for each in view.runs])

    return router
