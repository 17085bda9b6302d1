"""Serves the pages of pictures: samples of evaluations and of training."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from digenrl.api.batch_records import CommittedBatches, Order, rank
from digenrl.api.models import SampleHistory
from digenrl.api.offline_routes import newest_versions
from digenrl.api.sample_now import SampleNow, SampleRequest
from digenrl.view.gallery import Sort, gallery_of, picture_ratio
from digenrl.view.pages import Pages, shared_route
from shared.limits import MAX_TEXT
from shared.process.http_api import Before

SAMPLES_PER_PAGE = 24
MAX_VERSIONS = 200
"""Newest versions among which a prompt's are chosen."""
Step = Annotated[int | None, Query(ge=1, lt=2**31)]
Label = Annotated[str, Query(max_length=MAX_TEXT)]
Shown = Literal["after", "slider", "beside", "difference"]
Size = Literal["s", "m", "l"]
OneStep = Annotated[int, Query(ge=1, lt=2**31)]
Place = Annotated[int, Query(ge=0, lt=2**31)]


def picture_pages(pages: Pages) -> APIRouter:
    router, history = APIRouter(route_class=shared_route(pages.view)), pages.view.history
    past = CommittedBatches(history)
    _add_gallery(router, pages)

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
        found = _with_group(await past.group_samples(step - 1, group), number)
        if found is None:
            raise HTTPException(404, f"step {step} has no sample {number} of a group {group}")
        letters = await history.letters()
        return await pages.page(request, "sample", at=step, letters=letters.letters, **found)

    return router


def _add_gallery(router: APIRouter, pages: Pages) -> None:
    history = pages.view.history

    @router.get("/samples")
    async def samples(
        request: Request, version: Before = None, against: Before = None, scorer: Label = "",
        prompt: Label = "", sort: Sort = "order", after: Place = 0,
        view: Shown = "after", size: Size = "m",
    ) -> HTMLResponse:  # fmt: skip
        await history.look()
        fields = gallery_of(
            history.evaluations, version, against, scorer=scorer, prompt=prompt, sort=sort,
            first=after,
        )  # fmt: skip
        return await pages.page(
            request, "samples", scripts=["zip.js", "gallery.js"], styles=["gallery.css"], view=view,
            size=size, ratio=picture_ratio(history.recipe), **fields,
        )  # fmt: skip


def sampling_pages(pages: Pages, sampling: SampleNow) -> APIRouter:
    router, history = APIRouter(), pages.view.history

    @router.get("/try")
    async def try_prompt(
        request: Request, prompt: Label = "", version: Before = None, against: Before = None,
        seed: Place = 0, num: int = Query(2, ge=1, le=8),
    ) -> HTMLResponse:  # fmt: skip
        await history.look()
        newest = max(0, history.version)
        shown = await newest_versions(history, pages.view.live, MAX_VERSIONS)
        kept = sorted({0, newest, *(each.version for each in shown if each.is_kept)})
        versions = tuple(dict.fromkeys((against or 0, newest if version is None else version)))
        wanted = SampleRequest(
            prompt=prompt.strip() or "-", versions=versions, seed=seed, num_each=num
        )
        found = sampling.known.get(wanted, [])
        return await pages.page(
            request, "try", scripts=["try.js"], styles=["gallery.css"], prompt=prompt,
            versions=kept, chosen=versions[-1], against=versions[0], seed=seed, num=num,
            rows=[
                [each for each in found if each.version == version] for version in versions
            ], ratio=picture_ratio(history.recipe),
        )  # fmt: skip

    @router.get("/data/sampling")
    async def sampling_now() -> JSONResponse:
        """Present stage of the request that samples a prompt, and the share that is done."""
        return JSONResponse(sampling.stage)

    return router


def _with_group(group: Sequence[SampleHistory], number: int) -> dict[str, Any] | None:
    """Return a sample among the others of its group; None if the group has none of this number."""
    if not 0 <= number < len(group):
        return None
    one, ranked = group[number], sorted(group, key=lambda each: rank(each.reward, worst=True))
    rewards = [each.reward for each in group if each.reward is not None]
    scores = {name: [each.scores.get(name) for each in group] for name in one.scores}
    means = {
        name: fmean(numbers) for name, every in scores.items()
        if (numbers := [score for score in every if score is not None])
    }  # fmt: skip
    return {
        "one": one, "ranked": ranked, "place": ranked.index(one) + 1, "score_means": means,
        "mean": fmean(rewards) if rewards else None, "spread": pstdev(rewards) if rewards else None,
    }  # fmt: skip
