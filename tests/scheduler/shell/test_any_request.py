"""Requests that the API's own description makes, right and wrong ones: none is an error of ours."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from digenrl.api.front import api_routes
from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from services.scheduler.shell.api import create_app
from services.scheduler.shell.app import Scheduler
from shared.process.http_access import Access
from shared.process.http_api import add_problems
from shared.process.http_guard import Guard, own_names
from tests.api.past_run import past_run
from tests.follow.runs import RUN

schemathesis = pytest.importorskip("schemathesis", reason="a package of `make test`'s environment")

BREADTH = 20_000
OF_THE_PAST = 5_000
"""Requests of what is read from the store."""
HEADERS = ("host", "origin", "content-type", "authorization", "cookie")


def cases(app: Any) -> Any:
    """What the description of the API allows, and what it does not; events have no end, and each
    plan is a process."""
    schema = schemathesis.openapi.from_dict(app.openapi())
    schema = schema.exclude(operation_id="get_events").exclude(operation_id="get_plan")
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    return st.one_of(
        [
            found.ok().as_strategy(generation_mode=mode)
            for found in schema.get_all_operations()
            for mode in modes
        ]
    )


def ask_app(app: FastAPI, number: int) -> Counter[int]:
    """Send requests as whoever may do anything; return how often each status came back."""
    guard = Guard(app, own_names("testserver"), access=Access(is_open=True))
    transport = httpx.ASGITransport(guard, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://testserver")
    loop = asyncio.new_event_loop()
    seen: Counter[int] = Counter()

    @settings(
        max_examples=number, database=None, deadline=None, derandomize=False,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        case=cases(app),
        headers=st.dictionaries(
            st.sampled_from(HEADERS),
            st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40),
            max_size=2,
        ),
    )
    def ask(case: Any, headers: dict[str, str]) -> None:
        request = case.as_transport_kwargs(base_url="http://testserver")
        request["headers"] = {**dict(request.get("headers") or {}), **headers}
        request.pop("cookies", None)
        if isinstance(request.get("data"), bytes | str):
            request["content"] = request.pop("data")
        answer = loop.run_until_complete(client.request(**request))
        seen[answer.status_code] += 1
        assert answer.status_code < 500, (request, answer.text)

    ask()
    loop.run_until_complete(client.aclose())
    loop.close()
    return seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_20000_requests_of_the_description_are_answered(scheduler: Scheduler) -> None:
    scheduler.health.ready = True
    assert ask_app(create_app(scheduler), BREADTH).total() >= BREADTH


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_5000_requests_of_a_run_that_is_over_are_answered(tmp_path: Path) -> None:
    app, run = FastAPI(), past_run(tmp_path)
    add_problems(app)
    app.include_router(api_routes(RunHistory(run.store, RUN), LiveRun("", httpx.AsyncClient())))
    seen = ask_app(app, OF_THE_PAST)
    assert seen.total() >= OF_THE_PAST and {200, 404, 422} <= seen.keys()
