"""Passes an operator's requests on from the run's page to the scheduler, which logs them."""

from typing import Annotated, Literal

from fastapi import FastAPI, Path
from fastapi.responses import Response

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory

Number = Annotated[int, Path(ge=1, lt=2**31)]


def add_actions(app: FastAPI, live: LiveRun, history: RunHistory) -> None:
    """Add the routes that the page's buttons post to."""

    @app.post("/steer/{action}")
    async def steer(action: Literal["pause", "pause-at-failure", "resume", "stop"]) -> Response:
        return await live.change(f"/v1/run/{action}")

    @app.post("/letters/{number}/{action}")
    async def settle(number: Number, action: Literal["retry", "drop"]) -> Response:
        answer = await live.change(f"/v1/dead-letters/{number}/{action}")
        history.forget_letters()
        return answer
