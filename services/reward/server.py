"""A scorer behind HTTP, in an environment of its own: `digenrl serve-scorer`.

An answer depends on its request alone, so a client without an answer may ask again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import structlog
from fastapi import FastAPI, HTTPException, Request, Response

from services.reward import limits
from services.reward.scorer import SOURCES, WeightedScorer
from services.reward.wire import (
    MSGPACK,
    Array,
    ScoreRequest,
    ScoreResponse,
    WireFault,
    WireResult,
    WireSample,
    decode,
    encode,
)
from shared.errors import ContractError, SamplesFailed
from shared.process.http_api import add_docs, add_problems
from shared.process.http_guard import BodyLimits
from shared.process.service import Health, probes

UPLOAD_LIMITS = BodyLimits(content_types=(MSGPACK,), max_bytes=None)
"""Bodies that are read in parts, up to that size."""

log = structlog.get_logger()


def create_app(scorer: WeightedScorer, health: Health) -> FastAPI:
    app = FastAPI(title=f"digenrl scorer {scorer.name}", version="1", docs_url=None, redoc_url=None)
    app.include_router(probes(health))
    add_problems(app)
    add_docs(app)
    device = asyncio.Lock()

    @app.post("/score", tags=["score"], operation_id="score")
    async def score(request: Request) -> Response:
        """Score each item of a `ScoreRequest`, or report the fault of the request."""
        if request.headers.get("content-type", "").split(";")[0].strip() != MSGPACK:
            raise HTTPException(415, f"content-type: send {MSGPACK}")
        body = await _body(request)
        try:
            items = decode(body, ScoreRequest).items
        except ContractError as error:
            raise HTTPException(422, str(error)) from error
        async with device:
            results = await asyncio.to_thread(score_items, scorer, items)
        return Response(encode(ScoreResponse(results=tuple(results))), media_type=MSGPACK)

    return app


async def _body(request: Request) -> bytes:
    """Reads a body, up to its largest size."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limits.MAX_BODY:
            mib = limits.MAX_BODY >> 20
            raise HTTPException(413, f"the body has more than {mib} MiB; send less")
        parts.append(part)
    return b"".join(parts)


def score_items(scorer: WeightedScorer, items: Sequence[WireSample]) -> list[WireResult]:
    """Returns one result per item, in their order; items of one shape are scored together."""
    results: dict[str, WireResult] = {}
    alike: defaultdict[tuple[str, tuple[int, ...]], list[tuple[WireSample, Array]]] = defaultdict(
        list
    )
    for item in items:
        try:
            _scorer_metadata(item)
            alike[item.dtype, item.shape].append((item, item.array()))
        except ContractError as error:
            results[item.id] = _fault(item, "bad-item", error)
    for group in alike.values():
        results |= _scored(scorer, group)
    return [results[item.id] for item in items]


def _scored(
    scorer: WeightedScorer, group: list[tuple[WireSample, Array]]
) -> Mapping[str, WireResult]:
    """Scores items together; or one by one if that fails, as the fault may be one item's."""
    try:
        media = np.stack([array for _, array in group])
        scores = scorer.score(media, [_scorer_metadata(item) for item, _ in group])
        pairs = zip(group, scores, strict=True)
        return {item.id: WireResult(id=item.id, score=score) for (item, _), score in pairs}
    except SamplesFailed as failed:
        return dict(_partly(group, failed))
    except Exception as error:  # a scorer is anybody's code
        if len(group) == 1:
            log.exception("scorer_failed", item=group[0][0].id)
            return {group[0][0].id: _fault(group[0][0], "scoring", error)}
    return {id: result for one in group for id, result in _scored(scorer, [one]).items()}


def _partly(
    group: list[tuple[WireSample, Array]], failed: SamplesFailed
) -> Iterator[tuple[str, WireResult]]:
    """Yield the results of a scorer that reports itself which samples it could not score."""
    for number, ((item, _), score) in enumerate(zip(group, failed.scores, strict=True)):
        if score is not None:
            yield item.id, WireResult(id=item.id, score=score)
            continue
        kind = "bad-item" if number in failed.final else "scoring"
        detail = failed.reasons[number][:2000]
        fault = WireFault.model_validate({"type": kind, "detail": detail})
        yield item.id, WireResult(id=item.id, error=fault)


def _scorer_metadata(item: WireSample) -> Mapping[str, object]:
    """Return a scorer's view of an item's prompt; raises ContractError if its source images are not
    images."""
    sources = tuple(each.array() for each in item.source_images)
    return {**item.metadata, SOURCES: sources} if sources else item.metadata


def _fault(item: WireSample, kind: str, error: Exception) -> WireResult:
    detail = f"{type(error).__name__}: {error}"[:2000]
    return WireResult(id=item.id, error=WireFault.model_validate({"type": kind, "detail": detail}))
