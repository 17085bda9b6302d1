"""A run's page on a port, over a run in a folder of objects and a scheduler that a test leads."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.local import runs
from digenrl.local.processes.ports import free_ports
from digenrl.local.secrets.tokens import Tokens
from digenrl.view.server import View, create_app
from services.scheduler.shell.api_letters import RunProgress
from shared.process.http_access import Access, TokenFile
from shared.process.http_guard import Guard, own_names
from shared.process.service import Server
from shared.recipe.recipe import load_recipe
from shared.run.log_entries import DeadLetter
from shared.run.usage import Timeline
from tests.follow.runs import RUN, Run
from tests.paths import DIGITS
from tests.readings import LOAD, WORKER
from tests.readings import RUN as NOW
from tests.run_log import letters_of

TAG: dict[str, Any] = {
    "mode": "auto", "groups": 0, "lent": 1, "members": 2, "samples_left": 4, "costs": {},
    "decisions": [],
}  # fmt: skip


@dataclass
class Scheduler:
    """Answers as a scheduler does, and remembers what it was asked to do."""

    answers: dict[str, Any] = field(
        default_factory=lambda: {
            "/v1/run": dict(NOW), "/v1/workers": [dict(WORKER)], "/v1/tag": dict(TAG),
            "/v1/load": dict(LOAD), "/v1/dead-letters": [],
        }
    )  # fmt: skip
    asked: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    def keep(self, *letters: DeadLetter, committed: int = 0) -> None:
        """Have these dead letters, as a scheduler shows them."""
        known, phase = letters_of(*letters), self.answers["/v1/run"]["phase"]
        known.progress = lambda: RunProgress(committed, phase)
        self.answers["/v1/dead-letters"] = [each.model_dump() for each in known.newest_first()]

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "POST":
            self.asked.append(path)
            self.bodies.append(json.loads(request.content or b"null"))
            phase = {"pause": "paused", "resume": "running"}.get(path.rsplit("/", 1)[1])
            if phase is not None:
                self.answers["/v1/run"]["phase"] = phase
            return httpx.Response(202, json={"action": path, "id": "1"})
        found: Any = self.answers.get(path)
        if path == "/v1/dead-letters" and (state := request.url.params["state"]) != "all":
            found = [each for each in found if each["state"] == state]
        return httpx.Response(
            404 if found is None else 200, json={"detail": "no"} if found is None else found
        )

    @property
    def live(self) -> LiveRun:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return LiveRun("http://scheduler", client)


@contextlib.asynccontextmanager
async def page_of(run: Run, tokens: Tokens, live: LiveRun | None = None) -> AsyncIterator[str]:
    """Serve a run's page; yields its address."""
    access = Access(TokenFile(tokens.folder / "api_tokens.json"))
    live = live or LiveRun("", httpx.AsyncClient())
    app = create_app(View(RunHistory(run.store, RUN), live), access)
    async with serving(app, access) as url:
        yield url
    await live.client.aclose()


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, access: Access) -> AsyncIterator[str]:
    """Serve an application behind a guard; yields its address."""
    import uvicorn

    [port] = free_ports(1)
    guard = Guard(app, own_names("127.0.0.1"), access=access)
    server = Server(uvicorn.Config(guard, port=port, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server._serve())  # without handlers of signals
    try:
        while not server.started:  # noqa: ASYNC110 -- it says so in no other way
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


def busy_timeline(devices: int, spans: int, *, batch: int = 0) -> Timeline:
    """Return a batch in which every device changed what it did many times."""
    each = spans // devices
    uses = ("generating", "waiting_for_trainer", "training", "tail")
    changes = {
        f"rollout-{device}": [(at * 3600 / each, uses[(at + device) % 4]) for at in range(each)]
        for device in range(devices)
    }
    fields = {"batch": batch, "seconds": 3600.0, "devices": changes}
    return Timeline.model_validate(fields)


def local_run(folder: Path, state: str = "stopped", step: int = 4) -> Path:
    """Make the folder of a run of `digenrl up`, without its brokers."""
    folder.mkdir(parents=True)
    recipe = load_recipe(DIGITS, {"run.name": folder.name})
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    runs.RunProgress(state, step, 30, 0.5).write(folder)
    return folder
