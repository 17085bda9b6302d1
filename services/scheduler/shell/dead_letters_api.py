"""Routes for dead letters: list them, show one, have its work done again, drop it."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request

from services.scheduler import limits
from services.scheduler.shell import api_letters as models
from shared.errors import Unavailable
from shared.messages.contracts import GroupRequest, OperatorRequest
from shared.process.http_access import CALLER, Caller
from shared.process.http_api import Before, Limit, errors, existing
from shared.run.log_entries import DeadLetter, Settled, Settlement

if TYPE_CHECKING:
    from services.scheduler.shell.app import Scheduler

Number = Annotated[int, Path(ge=1, lt=2**31, description="number of the letter")]


def dead_letters(scheduler: "Scheduler") -> APIRouter:
    """Return the routes of a run in progress."""

    def read() -> models.Letters:
        if scheduler.state.recovering or not scheduler.run_log.is_read:
            raise HTTPException(503, "starting: the letters are being read", {"retry-after": "1"})
        return scheduler.run_log.letters

    router = letter_lists(read)

    def add(how: Settlement, action: str, description: str) -> None:
        @router.post(
            f"/v1/dead-letters/{{number}}/{action}", operation_id=f"{action}_dead_letter",
            summary=action.title(), description=description, responses=errors(404, 409, 503),
        )  # fmt: skip
        async def settle(number: Number, request: Request) -> models.SettledView:
            known = read()
            letter = _find(known, number)
            caller = request.scope.get(CALLER)
            by = caller.name if isinstance(caller, Caller) else "anybody"
            try:
                async with asyncio.timeout(limits.PUBLISH_TIMEOUT_S):
                    if how == "dropped":
                        return await _settle(scheduler, letter, how, by, "nobody needs it any more")
                    return await _retry(scheduler, known.newest(letter), by)
            except (TimeoutError, Unavailable):
                raise HTTPException(503, "it is not stored in time; repeat the request") from None

    add("retried", "retry", "Have the work of a letter done again; twice is the same as once.")
    add("dropped", "drop", "Say that nobody needs a letter any more; nothing of the run changes.")
    return router


def letter_lists(read: Callable[[], models.Letters | Awaitable[models.Letters]]) -> APIRouter:
    """Return the routes that change nothing, over letters that are read at each request."""
    router = APIRouter(tags=["dead letters"])

    @router.get("/v1/dead-letters", operation_id="list_dead_letters")
    def letters(
        known: Annotated[models.Letters, Depends(read)],
        state: Annotated[models.Wanted, Query(description="which ones")] = "open",
        limit: Limit = 50,
        before: Before = None,
    ) -> list[models.DeadLetterView]:
        """Unusable messages and failed attempts, newest first."""
        return [*islice(known.newest_first(state, before), limit)]

    @router.get("/v1/dead-letters/{number}", operation_id="get_dead_letter", responses=errors(404))
    def letter(
        number: Number, known: Annotated[models.Letters, Depends(read)]
    ) -> models.DeadLetterDetail:
        """One dead letter with its bytes."""
        return known.view(_find(known, number))

    return router


async def _retry(scheduler: "Scheduler", letter: DeadLetter, by: str) -> models.SettledView:
    """Repeat the failed work of a group, with all its attempts; a failed run is resumed.

    Raises:
        HTTPException: if nothing would follow.
    """
    state, outcome = scheduler.run_log.letters.state(letter)
    if state == "retried":
        note = f"letter {letter.number} was retried before"
        return models.SettledView(number=letter.number, state=state, note=note)
    if letter.work is None or state != "open":
        raise HTTPException(409, f"nothing is left to do: {outcome}")
    batch, group = letter.work.whole_group
    name = f"letter-{letter.number}"
    if scheduler.state.phase == "failed":
        note = "the run goes on, and does it again"
        await scheduler.bus.publish(OperatorRequest(action="resume", id=name))
    else:
        waits = scheduler.state.phase in ("paused", "stopped")
        note = "it is done again when the run is resumed" if waits else "it is being done again"
        request = GroupRequest(action="again", batch=batch, group=group, id=name)
        await scheduler.bus.publish(request)
    return await _settle(scheduler, letter, "retried", by, note)


async def _settle(
    scheduler: "Scheduler", letter: DeadLetter, how: Settlement, by: str, note: str
) -> models.SettledView:
    number = letter.number
    if scheduler.run_log.letters.settled.get(number) != how:
        await scheduler.run_log.append(Settled(letters=(number,), how=how, by=by, note=note))
    return models.SettledView(number=number, state=how, note=note)


def _find(known: models.Letters, number: int) -> DeadLetter:
    return existing(known.letters.get(number), f"there is no dead letter {number}")
