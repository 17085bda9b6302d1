"""Routes of what has happened: groups and samples, the audit log, storage."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Response

from digenrl.api import models
from digenrl.api.batch_records import CommittedBatches, MediaDeleted
from digenrl.api.run_history import RunHistory
from shared.process.http_api import BatchNumber, Limit, errors, existing
from shared.run.log import Log
from shared.run.log_entries import Request
from shared.store.previews import content_type

Group = Annotated[int, Path(ge=0, lt=2**31, description="group of the batch")]
Sample = Annotated[int, Path(ge=0, lt=2**31, description="number of the sample in its group")]
Cursor = Annotated[
    str, Query(pattern="^[0-9]{0,9}$", description="`next` of the page before; nothing: the first")
]
Order = Annotated[
    Literal["number", "worst", "best", "unscored"],
    Query(description="by number, or by reward; unscored: only those that have none"),
]
NOT_COMMITTED = "the batch has no such thing, or is not committed yet"
CACHED = "private, max-age=86400"
BINARY = {"schema": {"type": "string", "format": "binary"}}
PICTURE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/png": BINARY, "image/jpeg": BINARY}}
}


def history_routes(history: RunHistory) -> APIRouter:
    router, past = APIRouter(tags=["history"]), CommittedBatches(history)
    _add_samples(router, past)

    @router.get("/v1/batches/{batch}/groups", operation_id="list_groups", responses=errors(404))
    async def groups(batch: BatchNumber, limit: Limit = 50, after: Cursor = "") -> models.GroupPage:
        """Groups of a committed batch: what became of each."""
        return existing(await past.groups(batch, int(after or 0), limit), NOT_COMMITTED)

    @router.get("/v1/audit", operation_id="list_audit")
    async def audit(limit: Limit = 50, after: Cursor = "") -> models.AuditPage:
        """Requests that changed something, or were to, with who has asked; newest first."""
        return await audit_page(history.log, limit, int(after) if after else None)

    @router.get("/v1/storage", operation_id="get_storage")
    async def storage() -> models.StorageView:
        """Stored objects of the run by folder, and their retention."""
        return await past.storage()

    return router


async def audit_page(log: Log, limit: int, before: int | None) -> models.AuditPage:
    """Return a page of the requests in a run's log, newest first."""
    await log.look()
    requests = [
        each for each in log.newest_first
        if isinstance(each, Request) and (before is None or each.number < before)
    ]  # fmt: skip
    return models.AuditPage(
        requests=[
            models.AuditView(**each.model_dump(exclude={"event"})) for each in requests[:limit]
        ],
        next=str(requests[limit - 1].number) if len(requests) > limit else None,
    )


def _add_samples(router: APIRouter, past: CommittedBatches) -> None:
    @router.get("/v1/batches/{batch}/samples", operation_id="list_samples", responses=errors(404))
    async def samples(
        batch: BatchNumber, order: Order = "number", limit: Limit = 50, after: Cursor = ""
    ) -> models.SamplePage:
        """Samples of a committed batch; with order=worst the smallest rewards come first, and
        unscored samples last."""
        return existing(await past.samples(batch, int(after or 0), limit, order), NOT_COMMITTED)

    @router.get(
        "/v1/batches/{batch}/samples/{group}/{sample}", operation_id="get_sample",
        responses=errors(404),
    )  # fmt: skip
    async def sample(batch: BatchNumber, group: Group, sample: Sample) -> models.SampleHistory:
        """One sample: who made it, how it was scored, which attempts failed."""
        return existing(await past.sample(batch, group, sample), NOT_COMMITTED)

    @router.get(
        "/v1/batches/{batch}/samples/{group}/{sample}/media", operation_id="get_sample_media",
        response_class=Response, responses={**PICTURE, **errors(404, 410)},
    )  # fmt: skip
    async def picture(batch: BatchNumber, group: Group, sample: Sample) -> Response:
        """The sample as PNG, of a video the middle frame; once that is deleted, a small preview of
        it as PNG or JPEG, if there is one."""
        try:
            data = existing(await past.picture(batch, group, sample), NOT_COMMITTED)
        except MediaDeleted as error:
            raise HTTPException(410, f"sample {sample} of batch {batch}: {error}") from error
        return Response(data, media_type=content_type(data), headers={"cache-control": CACHED})
