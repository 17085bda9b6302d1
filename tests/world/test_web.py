"""Clients of the product reach its applications in memory, and see a process die as over TCP."""

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from digenrl.api.checked_client import CheckedClient, CheckedNoAnswer
from digenrl.evaluation.process import follow_run
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.standby import standby_app
from shared.errors import UserError
from shared.process.http_access import Access
from shared.process.service import Health, worker_app
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import load_recipe, override
from shared.run.commits import commit
from shared.store import ObjectStore
from tests import examples
from tests.follow.runs import RUN, Run
from tests.paths import DIGITS
from tests.scheduler.shell.conftest import folder, scheduler
from tests.stored_recipe import store_recipe
from tests.world import observers
from tests.world.blocking import run_blocking
from tests.world.companions import companions_installed, create_scheduler_app, serve_events
from tests.world.observers import Observer
from tests.world.seen import Answer, EventRead, Observation, events_out_of_order, late_followers
from tests.world.web import MAX_UNREAD, Web

__all__ = ["folder", "scheduler"]  # fixtures

PROCESS = contextvars.ContextVar("PROCESS", default="client")
OPEN = Access(is_open=True)
AT = "http://127.0.0.1:7000"


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web(PROCESS.get)
    with web.installed():
        yield web


async def start(name: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start a process of the world, and let it listen."""
    context = contextvars.copy_context()
    context.run(PROCESS.set, name)
    task = asyncio.get_running_loop().create_task(work, context=context)
    await asyncio.sleep(0)
    return task


async def serve(web: Web, app: Any, port: int = 7000) -> None:
    listener = web.listen("127.0.0.1", port)
    await web.serve(app, asyncio.sleep(3600), listener=listener, access=OPEN)


@dataclass(slots=True)
class Ticks:
    """Streams a line every 10 ms, then more than a connection holds."""

    sent: int = 0

    async def lines(self) -> AsyncIterator[bytes]:
        while True:
            self.sent += 1
            yield f"{self.sent}\n".encode()
            await asyncio.sleep(0.01 if self.sent < 10 else 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(self.lines())(scope, receive, send)


async def test_a_real_service_answers_blocking_and_other_clients(
    web: Web, scheduler: Scheduler
) -> None:
    task = await start("scheduler", serve(web, create_scheduler_app(scheduler, OPEN)))
    log: list[Observation] = []
    asker = Observer("ann", AT, log.append)
    polling = await start("ann", observers.poll(asker, every_s=0.05))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{AT}/v1/run")).json()["step"] == 1
        assert (await client.get(f"{AT}/livez")).status_code == 200  # its route blocks
        assert (await client.get(f"{AT}/v1/run", headers={"host": "evil.org"})).status_code == 421
    await asyncio.sleep(0.12)
    polling.cancel()
    answers = [each for each in log if isinstance(each, Answer)]
    assert [each.path for each in answers[:4]] == [
        "/v1/run", "/v1/dead-letters?state=all&limit=1",
    ] * 2  # fmt: skip
    assert answers[2].asked - answers[0].at >= 0.05
    task.cancel()


async def test_who_is_not_there_refuses_and_who_does_not_answer_times_out(web: Web) -> None:
    async with httpx.AsyncClient(timeout=0.05) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(AT)
        with pytest.raises(CheckedNoAnswer, match="does not answer"):
            await run_blocking(CheckedClient.at(AT).get_run)
        task = await start("server", serve(web, worker_app("reward", Health())))
        with pytest.raises(UserError, match="occupied"):
            web.listen("127.0.0.1", 7000)
        for cut, error in ((("client", "server"), httpx.ConnectTimeout),
                           (("server", "client"), httpx.ReadTimeout)):  # fmt: skip
            web.link = lambda *ends, cut=cut: None if ends == cut else 0.01
            with pytest.raises(error):
                await client.get(f"{AT}/livez")
        web.link = lambda *_: 0.02
        began = time.monotonic()
        await client.get(f"{AT}/livez")
        assert time.monotonic() - began >= 0.06  # the request, and two parts of the answer
    task.cancel()


async def test_a_stream_arrives_as_it_is_sent_and_breaks_when_either_end_dies(web: Web) -> None:
    app = Ticks()
    task = await start("server", serve(web, app))
    async with httpx.AsyncClient() as client:
        async with client.stream("GET", f"{AT}/v1/events") as answer:
            lines = answer.aiter_lines()
            assert [await anext(lines), await anext(lines)] == ["1", "2"]
            await asyncio.sleep(1.0)
            assert app.sent <= 2 * MAX_UNREAD  # a reader that is slow holds it up
            web.kill("server")
            with pytest.raises(httpx.ReadError, match="server has died"):
                async for _ in lines:  # what has arrived is still read
                    pass
        task.cancel()
        again = await start("server", serve(web, Ticks(), 7001))
        async with client.stream("GET", "http://127.0.0.1:7001/v1/events") as answer:
            await anext(answer.aiter_lines())
            site = web.sites["127.0.0.1", 7001]
            web.kill("client")
            await asyncio.sleep(0.05)
            assert not site.connections  # the server has noticed
    again.cancel()


async def test_an_application_that_fails_is_remembered(web: Web) -> None:
    async def broken(*_: Any) -> None:
        raise ValueError("x")

    task = await start("server", serve(web, broken))
    async with httpx.AsyncClient() as client:
        assert (await client.get(AT)).status_code == 500
    assert web.errors == ["server fails at /: ValueError('x')"]
    task.cancel()


async def test_a_follower_sees_the_end_through_a_standby(web: Web, scheduler: Scheduler) -> None:
    """R11: `up` asks its own scheduler, which stands by, and did not pass requests on."""
    loop, health, log = asyncio.get_running_loop(), Health(), list[Observation]()
    began = loop.time()
    standby = standby_app(health, lambda: "http://127.0.0.1:7001")
    apps = create_scheduler_app(scheduler, OPEN), standby, worker_app("scheduler", health)
    servers = [
        await start(f"scheduler-{number}", serve(web, app, port))
        for number, (app, port) in enumerate(zip(apps, (7001, 7000, 7002), strict=True))
    ]
    up, watch, planted = (
        Observer(name, url, log.append)
        for name, url in (("up", AT), ("watch", AT), ("planted", "http://127.0.0.1:7002"))
    )
    with companions_installed(lambda _: scheduler.store, poll_s=0.02):
        followers = [
            await start(up.name, observers.follow_as_up(up)),
            await start(watch.name, observers.follow_as_watch(watch)),
        ]
        waiting = await start(planted.name, observers.follow_as_up(planted))
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in followers)
        scheduler.state = replace(scheduler.state, phase="finished")
        await asyncio.wait_for(asyncio.gather(*followers), 5)
    late = late_followers(log, finished=began, now=loop.time() + 90, patience_s=60)
    assert len(late) == 1 and late[0].startswith("planted still follows")
    for each in (*servers, waiting):
        each.cancel()


@pytest.fixture
def run(tmp_path: Any) -> Run:
    return Run(tmp_path / "objects").begin()


async def test_readers_of_events_go_on_over_a_restart(
    run: Run, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("digenrl.api.events.POLL_S", 0.02)
    settings = ServiceSettings(run=RUN, port=7000, open_api=True)
    log: list[Observation] = []
    first = await start("page", serve_events(web, settings, run.store, "http://127.0.0.1:1"))
    kinds = {"program": observers.read_events, "browser": observers.read_events_as_browser}
    readers = [
        await start(name, read(Observer(name, AT, log.append))) for name, read in kinds.items()
    ]
    await asyncio.sleep(0.2)
    web.kill("page")
    first.cancel()
    await asyncio.to_thread(run.commit, 2)
    again = await start("page", serve_events(web, settings, run.store, "http://127.0.0.1:1"))
    await asyncio.sleep(1.5)
    for name in kinds:
        told = [each for each in log if isinstance(each, EventRead) and each.client == name]
        assert [each.id for each in told] == [f"c{number}.l0.e0" for number in (0, 1, 1, 2, 3)], (
            name
        )
        assert [each.name for each in told] == ["hello", "commit", "hello", "commit", "commit"]
    stored = await observers.stored_events(run.store, RUN)
    assert sorted(stored["c"]) == [0, 1, 2] and events_out_of_order(log, stored, list(kinds)) == []
    for each in (*readers, again):
        each.cancel()


async def test_the_evaluator_follows_a_run_without_a_network(
    folder_store: ObjectStore, web: Web
) -> None:
    recipe = override(load_recipe(DIGITS), {"run.steps": 2, "evaluation.every": 1})
    await store_recipe(folder_store, recipe)
    head = None
    for version in range(3):
        weights = await folder_store.put("digits/weights", bytes([version]), suffix=".w")
        head = examples.record(version, head, run="digits", weights=weights, checkpoint=weights)
        await commit(folder_store, head)
    settings = ServiceSettings(run="digits", port=7000, open_api=True)
    with companions_installed(lambda _: folder_store):
        await (await start("evaluator", follow_run(settings, every=None)))  # ends with its run
    told = (await observers.stored_events(folder_store, "digits"))["e"]
    assert list(told.values()) == [{"version": version} for version in range(3)]
