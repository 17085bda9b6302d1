"""Serves the pages of the run itself: overview, recipe, failed work, plans for other devices."""

import re
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from digenrl.api.batch_records import CommittedBatches, Order
from digenrl.api.status import newest_letters, stored_letters
from digenrl.api.what_if import POOL, WhatIf
from digenrl.evaluation.records import FIGURES
from digenrl.reading.facts import MAX_LETTERS
from digenrl.reading.letters import reasons
from digenrl.reading.wording import KINDS, QUEUES
from digenrl.view.gallery import picture_ratio
from digenrl.view.navigation import OVERVIEW
from digenrl.view.pages import Pages, shared_route
from services.scheduler.costs.profile import profile_names
from shared.process.http_api import Before
from shared.recipe.keys import recipe_keys
from shared.recipe.recipe import Recipe

ENDS = 4
"""Best and worst samples of the newest step on the overview."""
ORDERS: tuple[tuple[Order, str], ...] = (("best", "Best"), ("worst", "Worst"))
Number = Annotated[int, Query(ge=0, lt=2**31, description="which of the evaluation's samples")]
Stale = Literal["", "0", "1"]


def run_pages(pages: Pages, what_if: WhatIf) -> APIRouter:
    router, history = APIRouter(route_class=shared_route(pages.view)), pages.view.history
    _add_overview(router, pages)
    _add_plan(router, pages, what_if)

    @router.get("/letters")
    async def letters(
        request: Request, before: Before = None, state: Literal["open", "all"] = "open"
    ) -> HTMLResponse:
        found = await newest_letters(pages.view.live, state, before)
        if found is None:
            found = await stored_letters(history, state, before)
        opened = [each for each in found if each.state == "open"]
        return await pages.page(
            request, "letters", refreshes=True, letters=found, state=state, kinds=KINDS,
            reasons=reasons(opened), useful=[each.number for each in opened if not each.outcome],
            older=found[-1].number if len(found) == MAX_LETTERS else None,
            committed=max(0, history.version),
        )  # fmt: skip

    @router.get("/recipe")
    async def recipe(request: Request) -> HTMLResponse:
        await history.look()
        found = history.recipe
        tables = {} if found is None else found.model_dump(mode="json")
        return await pages.page(
            request, "recipe", scripts=["runs.js"], tables=tables, keys=recipe_keys(Recipe),
            can_copy=pages.view.folder is not None,
        )  # fmt: skip

    return router


def _add_overview(router: APIRouter, pages: Pages) -> None:
    history = pages.view.history
    past = CommittedBatches(history)

    @router.get("/")
    async def overview(request: Request, prompt: Number = 0) -> HTMLResponse:
        await history.look()
        newest, orders = history.version, ORDERS
        ends = [
            (order, title, await past.samples(newest - 1, 0, ENDS, order))
            for order, title in orders if newest > 0
        ]  # fmt: skip
        return await pages.page(
            request, OVERVIEW, refreshes=True, words=FIGURES, queue_words=QUEUES, at=newest,
            evaluations=history.evaluations, number=prompt, ends=ends, recipe=history.recipe,
            ratio=picture_ratio(history.recipe),
        )  # fmt: skip


def _add_plan(router: APIRouter, pages: Pages, what_if: WhatIf) -> None:
    @router.get("/plan")
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
            except HTTPException as error:
                refused = error.detail
        return await pages.page(
            request, "plan", found=found, refused=refused, hosts=hosts, staleness=staleness,
            profile=profile, profiles=profile_names(),
        )  # fmt: skip
