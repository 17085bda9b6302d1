"""Requests that the description makes of what is read from the store: none is an error of ours."""

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from digenrl.api.front import api_routes
from digenrl.view.live import LiveRun
from shared.process.http_api import add_problems
from tests.api.past_run import past_run
from tests.follow.runs import RUN
from tests.scheduler.shell.test_any_request import ask_app

BREADTH = 5_000


def front(folder: Path) -> FastAPI:
    app, run = FastAPI(), past_run(folder)
    add_problems(app)
    app.include_router(api_routes(run.store, RUN, LiveRun("", httpx.AsyncClient())))
    return app


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_5000_requests_of_the_description_are_answered(tmp_path: Path) -> None:
    seen = ask_app(front(tmp_path), BREADTH)
    assert seen.total() >= BREADTH and {200, 404, 422} <= seen.keys()
