"""Readers of the events of a run get each once, in order, whoever dies meanwhile."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from digenrl.api import events
from digenrl.api.feed import Feed, Position
from digenrl.api.front import api_routes
from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.evaluation.records import EvaluationRecord, Evaluations, Quality
from digenrl.local.secrets.tokens import Tokens, load_tokens
from services.scheduler.shell.run_log import RunLog
from shared.process.http_access import Access, TokenFile
from shared.run.log import Log
from shared.run.log_entries import Alarm, PhaseChange, Request
from tests import examples
from tests.api.served import Event, events_of, serving
from tests.follow.runs import RUN, Run
from tests.run_log import append, feed_of, letter

ASKED = Request(caller="ann", role="operator", operation="POST /v1/run/pause", status=202)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "objects").begin()


async def test_a_reader_gets_everything_once_from_wherever_it_continues(run: Run) -> None:
    await asyncio.to_thread(run.commit, 5)
    await append(run.store, RUN, PhaseChange(phase="running"), letter(1), ASKED)
    everything = await feed_of(run.store, RUN).after(Position())
    facts = [(fact.name, fact.fields) for _, fact in everything]
    assert [name for name, _ in facts] == ["commit"] * 6 + ["phase", "dead_letter", "request"]
    assert facts[7][1]["number"] == 2, "that of its entry"
    for place, (at, _) in enumerate(everything):
        again = await feed_of(run.store, RUN).after(Position.parse(str(at)) or Position())
        assert again == everything[place + 1 :]
    assert await feed_of(run.store, RUN).now() == everything[-1][0] == Position(6, 3)


async def test_a_damaged_entry_or_one_that_was_moved_away_holds_nobody_up(run: Run) -> None:
    log = Log.of_run(run.store, RUN)
    await append(run.store, RUN, *map(letter, range(1, 6)))
    await run.store.delete([log.key(2)])
    await run.store.write(log.key(4), b"{")
    facts = await feed_of(run.store, RUN).after(Position())
    assert [f.fields["number"] for _, f in facts if f.name == "dead_letter"] == [1, 3, 5]
    await append(run.store, RUN, letter(9))
    assert await run.store.read(log.key(6)) is not None


async def test_adjacent_entries_that_were_moved_away_hold_no_new_reader_up(run: Run) -> None:
    log = Log.of_run(run.store, RUN)
    await append(run.store, RUN, *map(letter, range(1, 8)))
    await run.store.delete(list(map(log.key, range(2, 7))))
    facts = await feed_of(run.store, RUN).after(Position())
    assert [f.fields["number"] for _, f in facts if f.name == "dead_letter"] == [1, 7]
    await append(run.store, RUN, letter(9))
    assert await run.store.read(log.key(8)) is not None and not await run.store.read(log.key(2))


async def test_writers_that_append_at_once_append_each_fact_once(run: Run) -> None:
    logs = [Log.of_run(run.store, RUN) for _ in range(4)]
    numbers = await asyncio.gather(
        *(log.append(letter(number)) for log in logs for number in range(1, 6))
    )
    assert set(numbers) == {*range(1, 6)} and len(set(numbers[:5])) == 5
    for log in logs:
        await log.look()
        assert log.numbered == logs[0].numbered and len(log.numbered) == 5


async def test_evaluations_are_announced_once_whoever_was_killed_or_evaluates_as_well(
    run: Run,
) -> None:
    kept, store = Evaluations(run.store, RUN, "a" * 64), run.store
    for version in (4, 0):  # the older one is evaluated later
        record = EvaluationRecord(
            run=RUN, policy=examples.policy(version), settings="a" * 64, worker="x", seconds=1.0,
            quality=Quality(reward=version / 8, num_samples=6, gold={"other": 0.5}), samples=(),
        )  # fmt: skip
        await kept.add(record)
        if version:  # the evaluator of the other is killed before it announces it
            await kept.announce(Log.of_evaluations(store, RUN))
    before = await feed_of(store, RUN).now()
    await asyncio.gather(*(kept.announce(Log.of_evaluations(store, RUN)) for _ in range(3)))
    facts = [fact.fields for _, fact in await feed_of(store, RUN).after(Position(1))]
    assert [(each["version"], each["reward"], each["gold"]) for each in facts] == [
        (4, 0.5, {"other": 0.5}), (0, 0.0, {"other": 0.5}),
    ]  # fmt: skip
    assert [f.fields["version"] for _, f in await feed_of(store, RUN).after(before)] == [0]


async def test_the_log_of_two_schedulers_has_each_change_of_the_phase_once(run: Run) -> None:
    for place, phase in enumerate(("running", "running", "paused")):
        run_log = RunLog(Log.of_run(run.store, RUN))
        run_log.change_phase(phase, None)
        writing = asyncio.create_task(run_log.write())
        await asyncio.sleep(0.05)
        run_log.change_phase(phase, None)
        run_log.alarm("stream_full", "full" if phase == "paused" else "")
        await run_log.request(Request(**ASKED.model_dump() | {"operation": phase, "at": place}))
        writing.cancel()
    log = Log.of_run(run.store, RUN)
    await log.look()
    found = [*log.entries]
    phases = [(e.before, e.phase) for e in found if isinstance(e, PhaseChange)]
    assert phases == [(None, "running"), ("running", "paused")]
    requests = [e.operation for e in found if isinstance(e, Request)]
    assert requests == ["running", "running", "paused"]
    assert [e.firing for e in found if isinstance(e, Alarm)] == [True]


@asynccontextmanager
async def front(run: Run, tokens: Tokens, live: LiveRun) -> AsyncIterator[str]:
    access = Access(TokenFile(tokens.accepted))
    async with serving(api_routes(RunHistory(run.store, RUN), live), access) as url:
        yield url


async def test_many_readers_over_kills_of_what_serves_them_miss_and_repeat_nothing(
    run: Run, tmp_path: Path
) -> None:
    await kills_of(run, load_tokens(tmp_path), readers=12, kills=3)


@pytest.mark.slow
async def test_200_readers_over_10_kills_miss_and_repeat_nothing(run: Run, tmp_path: Path) -> None:
    await kills_of(run, load_tokens(tmp_path), readers=200, kills=10)


async def kills_of(run: Run, tokens: Tokens, *, readers: int, kills: int) -> None:
    live, seen = LiveRun("", httpx.AsyncClient()), [Reader(1 + 4 * kills) for _ in range(readers)]
    async with asyncio.TaskGroup() as tasks:
        for each in seen:
            tasks.create_task(each.read(tokens))
        for kill in range(kills):
            async with front(run, tokens, live) as Reader.url:
                await asyncio.to_thread(run.commit, 2)
                await append(run.store, RUN, letter(2 * kill + 1))
                if kill % 2:
                    await asyncio.sleep(0.7)
            await append(run.store, RUN, letter(2 * kill + 2))  # while nobody serves
        async with front(run, tokens, live) as Reader.url:
            await asyncio.gather(*(each.has_all.wait() for each in seen))
    for each in seen:
        assert len(set(each.events)) == len(each.events) == each.wanted
        assert each.commits == seen[0].commits


async def test_readers_that_wait_for_the_store_count_as_well(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3,000 readers at once passed a limit of 256, as they were counted when a stream began."""
    tokens, may_answer, now = load_tokens(tmp_path), asyncio.Event(), Feed.now
    monkeypatch.setattr(events, "MAX_READERS", 3)

    async def slow(feed: Feed) -> Position:
        await may_answer.wait()
        return await now(feed)

    monkeypatch.setattr(Feed, "now", slow)
    live = LiveRun("", httpx.AsyncClient())
    async with front(run, tokens, live) as url, httpx.AsyncClient(timeout=20) as client:

        async def status() -> int:
            headers = tokens.headers("viewer")
            async with client.stream("GET", f"{url}/v1/events", headers=headers) as answer:
                if answer.status_code == 200:
                    await anext(answer.aiter_bytes())
                return answer.status_code

        for _ in range(2):  # those who have left are not counted any more
            asking = [asyncio.create_task(status()) for _ in range(8)]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            may_answer.set()
            found = sorted(await asyncio.gather(*asking))
            assert found[:3] == [200] * 3 and found.count(503) >= 1
            may_answer.clear()
            await asyncio.sleep(0.7)


class Reader:
    url = ""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.known, self.events = wanted, "start", list[str]()
        self.has_all = asyncio.Event()

    @property
    def commits(self) -> list[str]:
        return [each for each in self.events if each.startswith("commit")]

    async def read(self, tokens: Tokens) -> None:
        async with httpx.AsyncClient(headers=tokens.headers("viewer"), timeout=20) as client:
            while not self.has_all.is_set():
                with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
                    await self.take(client)
                await asyncio.sleep(0.05)

    async def take(self, client: httpx.AsyncClient) -> None:
        async for event in events_of(client, Reader.url, self.known):
            self.known = event.id or self.known
            if event.name not in ("hello", "run"):
                self.events.append(f"{event.name} {json.dumps(event.data)}")
            if len(self.events) >= self.wanted:
                self.has_all.set()
                return


async def test_an_event_of_the_scheduler_s_has_no_id_and_comes_when_it_changes(
    run: Run, tmp_path: Path
) -> None:
    said: dict[str, Any] = {"phase": "running"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=dict(said)))
    live = LiveRun("http://scheduler", httpx.AsyncClient(transport=transport))
    tokens, found = load_tokens(tmp_path), list[Event]()
    async with front(run, tokens, live) as url:
        headers = tokens.headers("viewer")
        async with httpx.AsyncClient(headers=headers, timeout=20) as client:
            async for event in events_of(client, url, ""):
                found.append(event)
                if event.name == "run":
                    if event.data["phase"] == "paused":
                        break
                    said["phase"] = "paused"
            bad = await client.get(f"{url}/v1/events?after=yesterday")
            assert bad.status_code == 422 and "after" in bad.json()["detail"]
    assert [each.name for each in found] == ["hello", "run", "run"]
    assert found[0].id == "c1.l0.e0" and not found[1].id


async def test_a_request_is_passed_on_only_by_whoever_may_make_it(run: Run, tmp_path: Path) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(202, json={"action": "pause", "id": "x"})

    transport = httpx.MockTransport(answer)
    live = LiveRun("http://scheduler", httpx.AsyncClient(transport=transport))
    tokens = load_tokens(tmp_path)
    async with front(run, tokens, live) as url, httpx.AsyncClient() as client:
        for path in ("/v1/run/pause", "/v1/x/../run/pause", "/v1/workers/%2e%2e/drain"):
            viewer = await client.post(f"{url}{path}", headers=tokens.headers("viewer"))
            assert viewer.status_code in (403, 404, 405), path
        assert not asked
        done = await client.post(f"{url}/v1/run/pause", headers=tokens.headers("operator"))
        assert done.status_code == 202
        for _ in range(5):
            await client.get(f"{url}/v1/batches?limit=3", headers=tokens.headers("viewer"))
    [pause, batches] = asked
    assert pause.headers["digenrl-on-behalf"] == "operator"
    assert batches.url == "http://scheduler/v1/batches?limit=3"
