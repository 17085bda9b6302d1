"""Clients that observe a run for its whole life, by the code with which the product does.

Each is a process of the world and tells what it was told to a log.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from rich.console import Console

from digenrl.api.checked_client import CheckedClient, CheckedNoAnswer, CheckedRefusal
from digenrl.commands import status
from digenrl.local import up
from digenrl.local.connection import Connection, read_run
from digenrl.local.running.display import Display
from digenrl.local.runs import Run
from shared.run.commits import read_commit
from shared.run.layout import numbers_in
from shared.run.log import Log as RunLog
from shared.run.log_entries import Entry
from shared.store import ObjectStore
from tests.world.blocking import run_blocking
from tests.world.seen import Answer, EventRead, Followed, Observation, Stored

NOWHERE = Path("/dev/null")
"""Folder of a run in which nothing can be written."""
EVENTS = "/v1/events"
EAGER_S = 0.1
Log = Callable[[Observation], None]


@dataclass(frozen=True, slots=True)
class Observer:
    """Is a client with a name that asks one address, and logs what it is told."""

    name: str
    url: str
    log: Log
    token: str = ""

    @contextmanager
    def client(self) -> Iterator[CheckedClient]:
        with CheckedClient.at(self.url, token=self.token) as client:
            hooks = {"request": [_ask], "response": [self._hear]}
            client.http.event_hooks = cast(Any, hooks)
            yield client

    @asynccontextmanager
    async def async_client(self) -> AsyncIterator[httpx.AsyncClient]:
        async def ask(request: httpx.Request) -> None:
            _ask(request)

        async def hear(response: httpx.Response) -> None:
            if response.request.url.path != EVENTS:
                await response.aread()
            self._hear(response)

        async with httpx.AsyncClient(
            timeout=10, verify=False, trust_env=False, headers=self._headers,
            event_hooks={"request": [ask], "response": [hear]},
        ) as client:  # fmt: skip
            yield client

    @property
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def _hear(self, response: httpx.Response) -> None:
        url, asked = response.request.url, response.request.extensions["asked"]
        if url.path == EVENTS:
            return
        response.read()
        is_json = "json" in response.headers.get("content-type", "")
        body = response.json() if is_json else response.text
        path = url.raw_path.decode()
        self.log(
            Answer(
                self.name, asked, _now(), f"{url.host}:{url.port}", path, response.status_code, body
            )
        )

    def read(self, id: str, name: str, fields: dict[str, Any]) -> None:
        self.log(EventRead(self.name, _now(), id, name, fields))

    def follow(self, outcome: str = "") -> None:
        self.log(Followed(self.name, _now(), outcome))


def _ask(request: httpx.Request) -> None:
    request.extensions["asked"] = _now()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def follow_as_up(
    observer: Observer, *, resumed: bool = False, restart: Callable[[str], None] = lambda name: None
) -> None:
    """Wait for the end of the run as `digenrl up` does, which shows its steps.

    Args:
        restart: starts a broker anew, by its name.
    """
    local = cast(Any, SimpleNamespace(folder=NOWHERE, resumed=resumed))
    supervisor = cast(Any, SimpleNamespace(record_work=lambda *_: None, restart=restart))
    display = Display(Console(file=StringIO(), width=200), observer.url, "logs")
    async with observer.async_client() as client:
        observer.follow()
        api = up.Api(observer.url, client)
        observer.follow(await up._watch(local, supervisor, display, api, None))


async def follow_as_watch(observer: Observer) -> None:
    """Repeat `digenrl watch --json` until it has seen how the run ended."""

    def watch() -> None:
        shown: list[str] = []
        lines = SimpleNamespace(update=lambda *_: None, tell=shown.append)
        with observer.client() as client:
            while not shown or "does not answer" in shown[-1]:
                status._watch(client, cast(Any, lines), Run(observer.name, "", NOWHERE))
                time.sleep(status.POLL_S)
        observer.follow(shown[-1].removeprefix("the run is "))

    observer.follow()
    await run_blocking(watch)


async def poll(observer: Observer, *, every_s: float, whole: bool = False) -> None:
    """Ask for the run and its newest dead letter for ever, or with ``whole`` for all that `digenrl
    status` shows; while nobody answers, so often that the first answer of a start is seen."""

    def ask() -> None:
        with observer.client() as client:
            while True:
                wait_s = every_s
                try:
                    if whole:
                        read_run(Connection(client, is_live=True))
                    else:
                        client.get_run()
                        client.list_dead_letters("all", 1)
                except (CheckedNoAnswer, CheckedRefusal):
                    wait_s = EAGER_S
                time.sleep(wait_s)

    await run_blocking(ask)


async def read_events(observer: Observer, *, after: str = "start") -> None:
    """Read events for ever, as programs do."""

    def read() -> None:
        known = after
        with observer.client() as client:
            while True:
                with contextlib.suppress(CheckedRefusal):
                    for event in client.get_events(known):
                        known = event.id or known
                        observer.read(*event)
                time.sleep(1.0)

    await run_blocking(read)


async def read_events_as_browser(observer: Observer, *, after: str = "start") -> None:
    """Read events for ever, and go on by `Last-Event-ID` as browsers do."""
    known = ""
    async with observer.async_client() as client:
        while True:
            headers, fields = {"last-event-id": known} if known else {}, {"id": ""}
            with contextlib.suppress(httpx.HTTPError):
                url = f"{observer.url}{EVENTS}?after={after}"
                async with client.stream("GET", url, headers=headers) as answer:
                    async for line in answer.raise_for_status().aiter_lines():
                        name, _, value = line.partition(": ")
                        if line:
                            fields[name] = value
                        elif "event" in fields:
                            known = fields["id"] or known
                            observer.read(fields["id"], fields["event"], json.loads(fields["data"]))
                            fields = {"id": ""}
                        else:
                            fields = {"id": ""}
            await asyncio.sleep(1.0)


async def stored_events(store: ObjectStore, run: str) -> Stored:
    """Return what readers of events have to be told of a run that stands still."""
    found: dict[str, dict[int, dict[str, Any] | None]] = {kind: {} for kind in "cle"}
    for version in await numbers_in(store, run, "commits"):
        record = await read_commit(store, run, version)
        if record is not None:
            told = {"version": version, "weights_digest": record.policy.weights_digest}
            found["c"][version] = told
    for kind, log in (("l", RunLog.of_run(store, run)), ("e", RunLog.of_evaluations(store, run))):
        await log.look()
        found[kind] = {index: _told(entry) for index, entry in enumerate(log.numbered)}
    return found


def _told(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return entry.model_dump(
        include={"DeadLetter": {"number"}, "Evaluation": {"version"}}.get(
            type(entry).__name__, set()
        )
    )
