"""Routes for dead letters: list them, show one, have its work done again, drop it."""

import asyncio
import uuid
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Query, Request

from services.scheduler.shell import api_letters as models
from services.scheduler.shell.app import Scheduler
from shared.errors import ContractError, Unavailable
from shared.messages.codec import decode
from shared.messages.contracts import GroupRequest, Message, OperatorRequest
from shared.messages.subjects import EVT, message_subject
from shared.process.http_access import CALLER, Caller
from shared.process.http_api import errors
from shared.run.dead_letters import Wanted
from shared.run.log_entries import DeadLetter, Settled, Settlement, Work

Number = Annotated[int, Path(ge=1, lt=2**31, description="number of the letter")]


def dead_letters(scheduler: Scheduler, store_s: float) -> APIRouter:
    """Return the routes; ``store_s``: longest time in which a request is to be stored."""
    router = APIRouter(tags=["dead letters"])

    @router.get("/v1/dead-letters", operation_id="list_dead_letters")
    def letters(
        state: Annotated[Wanted, Query(description="which ones")] = "open",
        limit: Annotated[int, Query(ge=1, le=200, description="how many at most")] = 50,
        before: Annotated[
            int | None, Query(ge=1, lt=2**31, description="only those with a smaller number")
        ] = None,
    ) -> list[models.DeadLetterView]:
        """Unusable messages and failed attempts, newest first."""
        _check_read(scheduler)
        found = scheduler.dead_letters.newest_first(state, before)
        return [models.letter_view(each) for each in islice(found, limit)]

    @router.get("/v1/dead-letters/{number}", operation_id="get_dead_letter", responses=errors(404))
    def letter(number: Number) -> models.DeadLetterDetail:
        """One dead letter with its bytes."""
        return models.letter_view(scheduler.dead_letters.outcome(_letter(scheduler, number)))

    _add_settlements(router, scheduler, store_s)
    return router


def _add_settlements(router: APIRouter, scheduler: Scheduler, store_s: float) -> None:
    def add(how: Settlement, action: str, description: str) -> None:
        @router.post(
            f"/v1/dead-letters/{{number}}/{action}", operation_id=f"{action}_dead_letter",
            summary=action.title(), description=description, responses=errors(404, 409, 503),
        )  # fmt: skip
        async def settle(number: Number, request: Request) -> models.Settled:
            caller = request.scope.get(CALLER)
            by = caller.name if isinstance(caller, Caller) else "anybody"
            try:
                async with asyncio.timeout(store_s):
                    return await settled(scheduler, number, how, by)
            except (TimeoutError, Unavailable):
                raise HTTPException(503, "it is not stored in time; repeat the request") from None

    add("retried", "retry", "Have the work of a letter done again; twice is the same as once.")
    add("dropped", "drop", "Say that nobody needs a letter any more; nothing of the run changes.")


async def settled(scheduler: Scheduler, number: int, how: Settlement, by: str) -> models.Settled:
    """Settle a letter that is open; a retry applies to the newest letter about the same work.

    Raises:
        HTTPException: if there is no such letter, or nothing would follow.
    """
    letters, letter = scheduler.run_log.letters, _letter(scheduler, number)
    if how == "retried":
        letter = letters.letters[letters.newest(letter)]
    number, state = letter.number, letters.settled.get(letter.number)
    if state == how:
        return models.Settled(
            number=number, state=state, note=f"letter {number} was {state} before"
        )
    if state == "dropped":
        raise HTTPException(409, f"letter {number} was dropped; it is not retried any more")
    note = "nobody needs it any more" if how == "dropped" else await _retry(scheduler, letter)
    same = letters.open_of_group(letter) if how == "retried" else []
    numbers = tuple(sorted({number, *same}))
    await scheduler.run_log.append(Settled(letters=numbers, how=how, by=by, note=note))
    return models.Settled(number=number, state=how, note=note)


async def _retry(scheduler: Scheduler, letter: DeadLetter) -> str:
    """Have the work of a letter done again; returns what happens, in words.

    Raises:
        HTTPException: if nothing would follow.
    """
    if letter.work is not None:
        return await _retry_group(scheduler, letter, letter.work)
    if letter.kind == "refused":
        raise HTTPException(409, "its content is not true; drop it")
    if letter.stream != EVT.name:
        raise HTTPException(409, "the scheduler retries such work by itself; drop it")
    try:
        message: Message = decode(letter.bytes)
    except ContractError as error:
        raise HTTPException(409, f"its bytes are no message: {error}; drop it") from None
    if message_subject(scheduler.bus.run, message) != letter.subject:
        raise HTTPException(409, f"a {message.kind} may not come as {letter.subject}; drop it")
    await scheduler.bus.publish(message)
    return "it was sent again"


async def _retry_group(scheduler: Scheduler, letter: DeadLetter, work: Work) -> str:
    """Retry the failed work of a group, with all its attempts; a failed run is resumed.

    Raises:
        HTTPException: if the work is no longer needed.
    """
    phase, found = scheduler.state.phase, scheduler.dead_letters.outcome(letter)
    if found.state == "over":
        raise HTTPException(409, f"nothing is left to do: {found.text}")
    if phase == "failed":
        await scheduler.bus.publish(OperatorRequest(action="resume", id=uuid.uuid4().hex))
        return "the run goes on, and does it again"
    request = GroupRequest(action="again", batch=work.batch, group=work.group, id=uuid.uuid4().hex)
    await scheduler.bus.publish(request)
    if phase in ("paused", "stopped"):
        return "it is done again when the run is resumed"
    return "it is being done again"


def _check_read(scheduler: Scheduler) -> None:
    if scheduler.state.recovering or not scheduler.run_log.is_read:
        raise HTTPException(503, "starting: the letters are being read", {"retry-after": "1"})


def _letter(scheduler: Scheduler, number: int) -> DeadLetter:
    _check_read(scheduler)
    found = scheduler.run_log.letters.letters.get(number)
    if found is None:
        raise HTTPException(404, f"there is no dead letter {number}")
    return found
