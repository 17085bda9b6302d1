"""How the page's process answers what its scheduler knows: at once, asking rarely, and never with
what was before a change."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from digenrl.api import live
from digenrl.api.live import LiveRun

RUN = "/v1/run"


@dataclass(slots=True)
class Slow:
    """A scheduler's API of one number, which answers once it may."""

    number: int = 0
    asked: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get(RUN)
        async def run() -> int:
            self.asked += 1
            found = self.number
            await self.may_answer.wait()
            if found < 0:
                raise HTTPException(503)
            return found

        @app.post("/v1/run/pause")
        async def pause() -> None:
            self.number += 1

        return app


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
async def scheduler(slow: Slow) -> AsyncIterator[LiveRun]:
    transport = httpx.ASGITransport(slow.app)
    async with httpx.AsyncClient(transport=transport) as client:
        yield LiveRun("http://scheduler", client)


async def test_many_who_ask_at_once_ask_the_scheduler_once(slow: Slow, scheduler: LiveRun) -> None:
    slow.may_answer.set()
    answers = await asyncio.gather(*(scheduler.read(RUN) for _ in range(100)))
    assert {answer.body for answer in answers} == {b"0"} and slow.asked == 1


async def test_a_slow_scheduler_holds_up_nobody_for_a_second(
    slow: Slow, scheduler: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.may_answer.set()
    await scheduler.read(RUN)
    slow.may_answer.clear()
    slow.number = 1
    monkeypatch.setattr(live, "CACHE_S", 0.0)
    for _ in range(10):
        answer = await asyncio.wait_for(scheduler.read(RUN), 1)
        assert answer.body == b"0"  # of a moment ago, while the next one is asked for
    await asyncio.sleep(0)
    assert slow.asked <= 2
    monkeypatch.setattr(live, "MAX_STALE_S", 0.0)
    late = asyncio.create_task(scheduler.read(RUN))
    await asyncio.sleep(0.01)
    assert not late.done()
    slow.may_answer.set()
    assert (await late).body == b"1"


async def test_nothing_from_before_a_change_is_answered_after_it(
    slow: Slow, scheduler: LiveRun
) -> None:
    early = asyncio.create_task(scheduler.read(RUN))
    while not slow.asked:  # noqa: ASYNC110 -- there is no event of it
        await asyncio.sleep(0)
    await scheduler.change("/v1/run/pause")
    slow.may_answer.set()
    assert (await early).body == b"0"
    assert (await scheduler.read(RUN)).body == b"1"


async def test_the_page_and_the_api_show_a_change_that_came_through_either(
    slow: Slow, scheduler: LiveRun
) -> None:
    """Both ask through one cache: a click on the page is in the next answer of the API."""
    slow.may_answer.set()
    for number in range(4):
        assert await scheduler.get(RUN) == number, "what the page shows"
        assert (await scheduler.read(RUN)).body == str(number).encode(), "what the API answers"
        await scheduler.change("/v1/run/pause")


async def test_a_scheduler_that_does_not_answer_is_an_error_that_is_not_kept(
    slow: Slow, scheduler: LiveRun
) -> None:
    scheduler.url = "http://127.0.0.1:1"
    client, scheduler.client = scheduler.client, httpx.AsyncClient()
    async with scheduler.client:
        with pytest.raises(HTTPException, match="503"):
            await scheduler.read(RUN)
        assert await scheduler.get(RUN) is None
    scheduler.url, scheduler.client = "http://scheduler", client
    slow.may_answer.set()
    assert (await scheduler.read(RUN)).body == b"0"
