"""Serves the pages of pictures: samples of evaluations and of training."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from digenrl.api.batch_records import CommittedBatches, Order
from digenrl.view.figures import sample_of, samples_of
from digenrl.view.pages import Pages
from shared.process.http_api import Before

SAMPLES_PER_PAGE = 24
Step = Annotated[int | None, Query(ge=1, lt=2**31)]
OneStep = Annotated[int, Query(ge=1, lt=2**31)]
Place = Annotated[int, Query(ge=0, lt=2**31)]


def picture_pages(pages: Pages) -> APIRouter:
    router, history = APIRouter(), pages.view.history
    past = CommittedBatches(history)

    @router.get("/samples")
    async def samples(request: Request, version: Before = None) -> HTMLResponse:
        await history.look()
        return await pages.page(request, "samples", **samples_of(history, version))

    @router.get("/batches")
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

    @router.get("/sample")
    async def sample(request: Request, step: OneStep, group: Place, number: Place) -> HTMLResponse:
        await history.look()
        found = sample_of(await past.group_samples(step - 1, group), number)
        if found is None:
            raise HTTPException(404, f"step {step} has no sample {number} of a group {group}")
        letters = await history.letters()
        return await pages.page(request, "sample", at=step, letters=letters.letters, **found)

    return router
