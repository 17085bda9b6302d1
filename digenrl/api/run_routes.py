"""Further routes of the run's page: recipe, curves, evaluations and their media.

All of it is read from the store, as the page reads it, so it is there during a run and afterwards.
"""

import asyncio
from collections.abc import Sequence
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Response
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.types import Receive, Scope, Send

from digenrl.api.history import BINARY, CACHED
from digenrl.api.run_history import RunHistory
from digenrl.evaluation.records import EvaluationRecord
from digenrl.reading.facts import EXAMPLE_EVALUATION, EvaluationView, evaluation_view
from services.scheduler.shell.api_models import View, example
from shared.messages.contracts import ObjectRef
from shared.process.http_api import Before, Limit, errors, existing
from shared.run.chain import CommitSummary
from shared.store.previews import content_type

EXAMPLE_STILL = "/v1/media/2c26b46b68ffc68ff99b453c1d304134.png"
EXAMPLE_IMAGE = {
    "prompt": "a handwritten three", "right": True, "media": EXAMPLE_STILL, "still": EXAMPLE_STILL,
    "source": None, "scores": {"reward": 0.93, "proxy": 0.93},
}  # fmt: skip
KINDS = {"mp4": "video/mp4", "png": "image/png"}
SMALL_SIDE = 448
"""Height and width to which pictures are reduced for overviews."""
MEDIA: dict[int | str, dict[str, Any]] = {
    200: {"content": dict.fromkeys((*KINDS.values(), "image/jpeg"), BINARY)}
}
Small = Annotated[bool, Query(description="reduce a larger picture to 448 pixels, as JPEG")]
Version = Annotated[int, Path(ge=0, lt=2**31, description="policy version")]
After = Annotated[int, Query(ge=0, lt=2**31, description="only versions after this one")]
Steps = Annotated[int, Query(ge=1, le=1000, description="how many steps at most")]
MediaName = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_.-]{1,100}$", description="last part of a link to it")
]


class VideoResponse(FileResponse):
    """Serves a video with ranges, which browsers request to move in it."""

    def __init__(self, name: str, data: bytes) -> None:
        headers = {"cache-control": CACHED, "etag": f'"{name}"'}
        super().__init__(name, media_type=KINDS["mp4"], headers=headers)
        self.data = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with NamedTemporaryFile() as file:
            await asyncio.to_thread(file.write, self.data)
            file.flush()
            self.path = file.name
            await super().__call__(scope, receive, send)


class RecipeView(View):
    """The recipe that every service reads, with all defaults."""

    model_config = example(recipe={"run": {"name": "digits", "steps": 30}})

    recipe: dict[str, Any]
    """Its tables, as they stand in TOML; docs/recipe-keys.md describes each key."""


class CurvesView(View):
    """Metrics of steps in columns: the n-th value of each belongs to the n-th version."""

    model_config = example(
        versions=[1, 2], metrics={"reward_mean": [0.31, 0.38], "kl": [None, 0.002]}, next=None
    )

    versions: list[int]
    """Versions that the steps have made, in order."""
    metrics: dict[str, list[float | None]]
    """Values by metric (docs/metrics.md); null where a step has none."""
    next: int | None
    """`after` of the next page; null before there is one."""


class ImageView(View):
    """A sample of an evaluation."""

    model_config = example(**EXAMPLE_IMAGE)

    prompt: str
    """The prompt."""
    right: bool | None
    """Whether the held-out classifier recognises the digit; null without a classifier."""
    media: str
    """Where the image or video is."""
    still: str
    """Where the image is, or of a video the middle frame."""
    source: str | None
    """Where the image is that it edits; null if none."""
    scores: dict[str, float | None] = Field(default_factory=dict)
    """Score by scorer, and the weighted sum as `reward`; names of gold rewards begin with "gold".
    Null: the scorer failed."""


class EvaluationDetail(EvaluationView):
    """An evaluation with its samples: the gallery."""

    model_config = example(**EXAMPLE_EVALUATION, samples=[EXAMPLE_IMAGE])

    samples: list[ImageView] = Field(default_factory=list)
    """Its samples: in every evaluation of the same settings the same prompts and noise, in the
    same order."""


def shown_routes(history: RunHistory) -> APIRouter:
    router = APIRouter(tags=["history"])
    _add_recipe_and_curves(router, history)

    @router.get("/v1/evaluations", operation_id="list_evaluations")
    async def evaluations(limit: Limit = 50, before: Before = None) -> list[EvaluationView]:
        """Evaluated versions, newest first."""
        await history.look()
        older = [e for e in history.evaluations if before is None or e.version < before]
        return [evaluation_view(each) for each in reversed(older[-limit:])]

    @router.get("/v1/evaluations/{version}", operation_id="get_evaluation", responses=errors(404))
    async def evaluation(version: Version) -> EvaluationDetail:
        """One evaluation with its samples."""
        await history.look()
        records = {each.version: each for each in history.evaluations}
        evaluation_record = existing(records.get(version), f"version {version} is not evaluated")
        return EvaluationDetail(
            **evaluation_view(evaluation_record).model_dump(), samples=_samples(evaluation_record)
        )

    @router.get(
        "/v1/media/{name}", operation_id="get_media", response_class=Response,
        responses={**MEDIA, **errors(404)},
    )  # fmt: skip
    async def media(name: MediaName, small: Small = False) -> Response:
        """An image as PNG or a video as mp4, of an evaluation or of a prompt of a caller."""
        await history.look()
        data = await history.media(name, SMALL_SIDE if small else None)
        kind = KINDS.get(name.rpartition(".")[2])
        if data is None or kind is None:
            raise HTTPException(404, f"{name}: no evaluation has it")
        kind = content_type(data) if small and kind == "image/png" else kind
        if kind == "video/mp4":
            return VideoResponse(name, data)
        return Response(data, media_type=kind, headers={"cache-control": CACHED})

    return router


def _add_recipe_and_curves(router: APIRouter, history: RunHistory) -> None:
    @router.get("/v1/recipe", operation_id="get_recipe", responses=errors(404))
    async def recipe() -> RecipeView:
        """The run's recipe."""
        await history.look()
        stored = existing(history.recipe, f"the store holds no run {history.run!r}")
        return RecipeView(recipe=stored.model_dump(mode="json", exclude_none=True))

    @router.get("/v1/curves", operation_id="get_curves")
    async def curves(after: After = 0, limit: Steps = 500) -> CurvesView:
        """Metrics of all steps, in columns."""
        await history.look()
        newest = history.steps[after + 1 :]
        steps = [step for step in newest[:limit] if step.batch is not None]
        return CurvesView(
            versions=[step.version for step in steps],
            metrics=metric_columns(steps),
            next=steps[-1].version if steps and len(newest) > limit else None,
        )


def metric_columns(steps: Sequence[CommitSummary]) -> dict[str, list[float | None]]:
    """Return the metrics of steps in columns; None where a step has none."""
    names = sorted({name for step in steps for name in step.metrics})
    return {name: [step.metrics.get(name) for step in steps] for name in names}


def _samples(record: EvaluationRecord) -> list[ImageView]:
    return [
        ImageView(
            prompt=each.prompt, right=each.right, media=media_link(each.media),
            still=media_link(each.still),
            source=None if each.source is None else media_link(each.source), scores=each.scores,
        )
        for each in record.samples
    ]  # fmt: skip


def media_link(ref: ObjectRef) -> str:
    """Return the address of a picture or a video below the address of its run."""
    return f"/v1/media/{ref.key.rsplit('/', 1)[1]}"
