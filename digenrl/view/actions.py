"""Passes an operator's requests on from the run's page to the scheduler, which logs them."""

from typing import Annotated, Literal

import httpx
from fastapi import FastAPI, HTTPException, Path
from fastapi.responses import JSONResponse, Response

from digenrl.view.history import RunHistory
from digenrl.view.live import LiveRun

Number = Annotated[int, Path(ge=1, lt=2**31)]


def add_actions(app: FastAPI, live: LiveRun, history: RunHistory) -> None:
    """Add the routes that the page's buttons post to."""

    @app.post("/steer/{action}")
    async def steer(action: Literal["pause", "pause-at-failure", "resume", "stop"]) -> Response:
        return await _pass_on(live, f"/v1/run/{action}")

    @app.post("/letters/{number}/{action}")
    async def settle(number: Number, action: Literal["retry", "drop"]) -> Response:
        answer = await _pass_on(live, f"/v1/dead-letters/{number}/{action}")
        history.forget_letters()
        return answer


async def _pass_on(live: LiveRun, path: str) -> Response:
    """Return the scheduler's answer.

    Raises:
        HTTPException: if it refuses or does not answer.
    """
    if not live.url:
        raise HTTPException(409, "the run is over")
    try:
        answer = await live.post(path)
    except httpx.HTTPError as error:
        raise HTTPException(503, f"the scheduler does not answer: {error}") from error
    if answer.is_error:
        raise HTTPException(answer.status_code, str(answer.json().get("detail", "refused")))
    return JSONResponse(answer.json(), answer.status_code)
