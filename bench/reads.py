"""Measures what readers of the page and of its HTTP API cost a run.

The run is an emulated cluster. Its page's process serves 50 requests a second and 50 readers of
events. In the control arm a process that returns constants serves the same requests.

    python -m bench reads

Both processes and the reader share this machine's cores with the services, so the control arm has
what the reading itself takes; the rest is what answers cost the scheduler and the store.
"""

import asyncio
import contextlib
import json
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from rich.console import Console

from bench.cluster.case import Case
from bench.cluster.measured import measure
from bench.cluster.session import opened, run
from bench.runner.rounds import by_turns
from bench.runner.session import Session
from digenrl.local.processes.ports import free_ports
from shared.errors import Unavailable

PER_SECOND = 50
PATHS = (
    "/v1/run", "/v1/load", "/v1/workers", "/v1/batches", "/v1/versions", "/v1/tag", "/v1/curves",
    "/v1/storage", "/v1/dead-letters", "/livez", "/?part=", "/samples", "/?part=",
)  # fmt: skip
EVENTS = "/v1/events"
NO_LIMIT = httpx.Limits(max_connections=None)
CONSTANT: dict[str, object] = {"items": list(range(1000)), "next": None}
STARTS_S = 60.0
STOPS_S = 10.0
HTTP_OK = 200
SHOWN = 3


@dataclass(slots=True)
class Reads:
    """What the reader saw of one run."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Path -> seconds of each answer, from the moment when it was to be asked."""
    refused: dict[str, int] = field(default_factory=dict)
    """Path and status -> answers that were no success."""

    def add(self, path: str, status: int, seconds: float) -> None:
        self.seconds.setdefault(path, []).append(seconds)
        if status != HTTP_OK:
            name = f"{path} {status}"
            self.refused[name] = self.refused.get(name, 0) + 1

    @property
    def all(self) -> list[float]:
        return [each for of_path in self.seconds.values() for each in of_path]


@dataclass(slots=True)
class Cost:
    """Seconds of a batch at full scale, one figure per pair of runs, and what the reader saw."""

    read: list[float]
    control: list[float]
    reads: list[Reads]
    constants: list[Reads]
    """What the reader saw of the process that answers constants."""

    @property
    def shares(self) -> list[float]:
        """Share by which a batch is longer while the page is read, of each pair."""
        return [read / control - 1 for read, control in zip(self.read, self.control, strict=True)]

    @property
    def slowest(self) -> list[float]:
        """Seconds within which 99 of 100 answers came, of each run."""
        return [hundredth(each.all) for each in self.reads]

    @property
    def slowest_constants(self) -> list[float]:
        """The same of constants: what this machine's load and the reader take by themselves."""
        return [hundredth(each.all) for each in self.constants]

    @property
    def slowest_paths(self) -> dict[str, float]:
        """Path -> seconds within which 99 of 100 of its answers came, of three paths."""
        paths = {path for each in self.reads for path in each.seconds}
        of_path = {
            path: hundredth([s for each in self.reads for s in each.seconds.get(path, [])])
            for path in paths
        }
        return dict(sorted(of_path.items(), key=lambda found: -found[1])[:SHOWN])

    def line(self) -> str:
        shares, number = self.shares, sum(len(each.all) for each in self.reads)
        paths = ", ".join(f"{path} {1000 * s:.0f}" for path, s in self.slowest_paths.items())
        of_runs = ", ".join(f"{1000 * each:.0f}" for each in self.slowest)
        of_constants = ", ".join(f"{1000 * each:.0f}" for each in self.slowest_constants)
        return (
            f"read {statistics.median(self.read):.2f} s per batch, control "
            f"{statistics.median(self.control):.2f} s: {statistics.median(shares):+.2%} (median of "
            f"{len(shares)} pairs, {min(shares):+.2%} to {max(shares):+.2%}); {number} answers, "
            f"99 % within {of_runs} ms, of constants within {of_constants} ms; slowest: {paths}"
        )


def hundredth(seconds: Sequence[float]) -> float:
    """Return the seconds that one of a hundred exceeds."""
    return statistics.quantiles(seconds, n=100)[98]


def compare(case: Case, folder: Path, console: Console) -> Cost:
    """Measure pairs of runs by turns.

    Raises:
        Unavailable: if the page refuses anything.
    """
    reads: dict[bool, list[Reads]] = {True: [], False: []}

    async def of(is_page: bool, number: int, session: Session) -> float:
        [mode] = case.modes
        warm_up, last = case.length(mode)
        setting = case.setting(mode, number)
        seen: list[Reads] = []

        def beside(name: str, scheduler: int) -> AbstractAsyncContextManager[None]:
            return _reading(session, name, scheduler if is_page else None, seen)

        record = await run(session, setting, warm_up, last, lambda _: None, beside)
        reads[is_page].extend(seen)
        seconds = case.scale * measure(record, warm_up, last).step_seconds
        answers = f"{len(seen[0].all)} answers"
        name = "page" if is_page else "control"
        console.print(f"round {number + 1}, {name}: {seconds:.2f} s per batch, {answers}")
        if seen[0].refused:
            raise Unavailable(f"answers that were no success: {seen[0].refused}")
        return seconds

    async def all_of() -> dict[bool, list[float]]:
        async with opened(folder) as session:
            return dict(
                await by_turns((True, False), case.rounds, lambda mode, i: of(mode, i, session))
            )

    found = asyncio.run(all_of())
    return Cost(found[True], found[False], reads[True], reads[False])


@contextlib.asynccontextmanager
async def _reading(
    session: Session, name: str, scheduler: int | None, seen: list[Reads]
) -> AsyncIterator[None]:
    """Read the page of the run ``name``, or constants without its scheduler's port, until the
    block ends; then ``seen`` has what the reader saw."""
    [port] = free_ports(1)
    served = ["bench.reads", "constants", str(port)]
    if scheduler is not None:
        served = [
            "digenrl", "view", name, "--port", str(port),
            "--scheduler", f"http://127.0.0.1:{scheduler}",
            "--token-file", str(session.tokens.folder / "operator.token"),
        ]  # fmt: skip
    path = session.folder / name / "reads.json"
    async with _process(session, served), httpx.AsyncClient() as client:
        await _until_answers(client, port)
        token = str(session.tokens.folder / "viewer.token")
        async with _process(session, ["bench.reads", "reader", str(port), token, str(path)]):
            yield
    seen.append(Reads(**json.loads(path.read_text())))


@contextlib.asynccontextmanager
async def _process(session: Session, module: Sequence[str]) -> AsyncIterator[None]:
    process = await session.brokers.launch([sys.executable, "-m", *module], {})
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), STOPS_S)


async def _until_answers(client: httpx.AsyncClient, port: int) -> None:
    deadline = time.monotonic() + STARTS_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            await client.get(f"http://127.0.0.1:{port}/livez")
            return
        await asyncio.sleep(0.1)
    raise Unavailable(f"nobody answers at port {port} within {STARTS_S:.0f} s")


async def read(port: int, token: str, reads: Reads) -> None:
    """Ask `PER_SECOND` times a second, whether or not answers come, until cancelled."""
    headers = {"authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{port}"
    async with (
        httpx.AsyncClient(headers=headers, timeout=STOPS_S, limits=NO_LIMIT) as client,
        asyncio.TaskGroup() as group,
    ):

        async def ask(path: str, at: float) -> None:
            try:
                status = (await client.get(f"{url}{path}")).status_code
            except httpx.HTTPError:
                status = 0
            reads.add(path, status, time.monotonic() - at)

        for _ in range(PER_SECOND):
            group.create_task(_follow(client, f"{url}{EVENTS}"))
        with contextlib.suppress(httpx.HTTPError):
            await client.get(f"{url}/livez")  # what the client itself loads is no answer's time
        began = time.monotonic()
        for number in range(sys.maxsize):
            at = began + number / PER_SECOND
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            group.create_task(ask(PATHS[number % len(PATHS)], at))


async def _follow(client: httpx.AsyncClient, url: str) -> None:
    """Follow the events, as an open page does; constants have none, and are left."""
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("GET", url, timeout=None) as answer:
            async for _ in answer.aiter_lines():
                pass


def _reader(port: int, token: Path, out: Path) -> None:
    """Read until SIGTERM, and then write what was seen."""
    reads, secret = Reads(), token.read_text().strip()

    async def until_ended() -> None:
        reading = asyncio.ensure_future(read(port, secret, reads))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, reading.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    asyncio.run(until_ended())
    out.write_text(json.dumps({"seconds": reads.seconds, "refused": reads.refused}))


def _constants(port: int) -> None:
    """Serve the same answer at every path until SIGTERM."""
    app = FastAPI()

    @app.get("/{path:path}")
    def constant(path: str) -> dict[str, object]:
        return CONSTANT

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical")


if __name__ == "__main__":
    what, at, *paths = sys.argv[1:]
    if what == "reader":
        _reader(int(at), *map(Path, paths))
    else:
        _constants(int(at))
