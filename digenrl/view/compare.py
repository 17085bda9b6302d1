"""Serves comparisons of versions, of one run or of several, openly or blind.

    /compare?side=RUN@VERSION&side=...          curves, evaluations, recipes, picture by picture
    /compare/blind?side=...&side=...            pairs without names, of which the better is chosen

Without a version, the newest evaluated one is compared.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from zlib import crc32

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from digenrl.evaluation.records import EvaluationRecord
from digenrl.reading.blind import blind_order, count_votes
from digenrl.reading.intervals import Interval, mean_interval
from digenrl.reading.recipe_differences import recipe_differences
from digenrl.view import gallery
from digenrl.view.pages import View
from shared.process.http_api import PATTERN_TEXTS
from shared.recipe.recipe import Recipe

COLOURS = (1, 2, 3, 4, 5, 7, 8, 6)
"""Colours of runs in tokens.css, the last two for runs whose own colour another run has."""
NUM_OWN_COLOURS = 6
PAIRS_PER_PAGE = 24
"""Pairs that a page shows."""
MAX_PAIRS = 200
"""Pairs that are judged blind."""
SIDE = r"^[A-Za-z0-9_.-]{1,100}(@[0-9]{1,9})?$"
PATTERN_TEXTS[SIDE] = "name a run, or RUN@VERSION"
Side = Annotated[str, Query(pattern=SIDE)]
Sides = Annotated[list[Side], Query(max_length=len(COLOURS), default_factory=list)]
First = Annotated[int, Query(ge=0, lt=2**31)]
Votes = Annotated[str, Query(pattern="^[lrt]*$", max_length=MAX_PAIRS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedVersion:
    """A version of a run."""

    run: str
    colour: int
    """Number of its colour."""
    recipe: Recipe | None
    record: EvaluationRecord | None
    """Its evaluation; None if no version of the run is evaluated."""
    versions: Sequence[int]
    """Evaluated versions of the run."""

    @property
    def side(self) -> str:
        """How an address names it."""
        return self.run if self.record is None else f"{self.run}@{self.record.version}"

    @property
    def name(self) -> str:
        return self.run if self.record is None else f"{self.run}, version {self.record.version}"

    @property
    def base(self) -> str:
        return f"/runs/{self.run}"

    @property
    def noise(self) -> tuple[object, ...]:
        """Prompts of its samples, and the settings that decide their noise."""
        prompts = () if self.record is None else tuple(each.prompt for each in self.record.samples)
        seed = None if self.recipe is None else self.recipe.evaluation.seed
        return prompts, seed, gallery.picture_ratio(self.recipe)

    def spread(self, scorer: str) -> Interval | None:
        """Return the mean score of its samples."""
        samples = () if self.record is None else self.record.samples
        scores = (each.scores.get(scorer) for each in samples)
        return mean_interval([score for score in scores if score is not None])


def colours_of(runs: Sequence[str]) -> list[int]:
    """Return a colour for each run: the same one everywhere, unless a run before it has that one.

    >>> colours_of(["digits"]), colours_of(["digits", "digits", "other"])
    ([5], [5, 7, 1])
    """
    chosen: list[int] = []
    for run in runs:
        at = crc32(run.encode()) % NUM_OWN_COLOURS
        colours = (*COLOURS[at:], *COLOURS[:at])
        chosen.append(next((each for each in colours if each not in chosen), colours[0]))
    return chosen


def comparison_of(
    sides: Sequence[ComparedVersion], sort: gallery.Sort, first: int
) -> dict[str, Any]:
    """Return what the page shows of these sides, and pairs of pictures from ``first`` on."""
    records = [each.record for each in sides if each.record is not None]
    scorers = [
        name for name in (gallery.scorers_of(records[0]) if records else ())
        if all(name in gallery.scorers_of(each) for each in records)
    ]  # fmt: skip
    scorer = next(iter(scorers), "")
    tiles = gallery.tiles_of(records[0], records[1], scorer) if len(records) > 1 else []
    recipes = [each.recipe for each in sides if each.recipe is not None]
    return {
        "sides": sides, "scorer": scorer, "sort": sort, "first": first,
        "spreads": {name: [each.spread(name) for each in sides] for name in scorers},
        "difference": mean_interval([e.change for e in tiles if e.change is not None]),
        "counts": gallery.count_changes(tiles), "number": len(tiles), "num_shown": PAIRS_PER_PAGE,
        "same_noise": len({each.noise for each in sides[:2]}) == 1,
        "tiles": gallery.arranged(tiles, "", sort)[first : first + PAIRS_PER_PAGE],
        "differences": recipe_differences(recipes) if len(recipes) == len(sides) else [],
        "ratio": gallery.picture_ratio(recipes[0] if recipes else None),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Opens the runs that are compared."""

    open_run: Callable[[str], Awaitable[View | None]]
    names: Callable[[], Awaitable[Sequence[str]]]
    """Returns the runs that can be added."""

    async def sides(self, given: Sequence[str]) -> list[ComparedVersion]:
        """Return the versions that an address names.

        Raises:
            HTTPException: if a run does not exist, or a version was not evaluated.
        """
        colours = colours_of([each.partition("@")[0] for each in given])
        return [await self._side(*each) for each in zip(given, colours, strict=True)]

    async def _side(self, side: str, colour: int) -> ComparedVersion:
        run, _, version = side.partition("@")
        view = await self.open_run(run)
        if view is None:
            raise HTTPException(404, f"there is no run {run}")
        await view.history.look()
        records = view.history.evaluations
        record = records[-1] if records else None
        return ComparedVersion(
            run=run, colour=colour, recipe=view.history.recipe,
            record=gallery.evaluation_of(records, int(version)) if version else record,
            versions=[each.version for each in records],
        )  # fmt: skip


def compare_pages(
    comparisons: Comparisons, page: Callable[..., Awaitable[HTMLResponse]]
) -> APIRouter:
    router = APIRouter()

    @router.get("/compare")
    async def compare(
        request: Request, side: Sides, sort: gallery.Sort = "order", after: First = 0
    ) -> HTMLResponse:
        sides, names = await comparisons.sides(side), await comparisons.names()
        return await page(
            request, "compare", scripts=["compare.js"], styles=["gallery.css"], names=names,
            **comparison_of(sides, sort, after),
        )  # fmt: skip

    @router.get("/compare/blind")
    async def blind(
        request: Request, side: Sides, votes: Votes = "", result: bool = False,
        seed: int | None = Query(None, ge=0, lt=2**31),
    ) -> Response:  # fmt: skip
        if seed is None:
            again = request.url.include_query_params(seed=secrets.randbelow(10**6))
            return RedirectResponse(f"/compare/blind?{again.query}")
        sides = await comparisons.sides(side)
        records = [each.record for each in sides if each.record is not None]
        if len(records) != 2:
            raise HTTPException(422, "side: name two evaluated versions to compare them blind")
        tiles = gallery.tiles_of(records[0], records[1], "")
        order = blind_order(len(tiles), seed)[:MAX_PAIRS]
        return await page(
            request, "blind", scripts=["blind.js"], styles=["gallery.css"], sides=sides, seed=seed,
            votes=votes[: len(order)], result=result or len(votes) >= len(order), order=order,
            tiles=tiles, tally=count_votes(order, votes),
            ratio=gallery.picture_ratio(sides[0].recipe),
        )  # fmt: skip

    return router
