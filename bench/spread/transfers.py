"""Objects on the way to the store and back, over lines of far hosts, and the statuses meanwhile.

Each far host has one worker, which reports as any worker does. It stores objects and reads them,
one after the other. The host of the store receives the statuses.
"""

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.spread.far_line import FarLine
from bench.spread.network import Host, network
from bench.spread.run import Plan, _answering, _brokers, _process
from services.scheduler.core.tag.line_costs import LineCosts
from services.scheduler.shell.roster import seconds_per_byte
from shared.messages.contracts import ObjectRef
from shared.messages.workers import WorkerStatus
from shared.process.worker import Worker
from shared.store import ObjectStore, open_store
from shared.store.traffic import Meter
from shared.telemetry import quiet_logs

PATIENCE_S = 600.0
HEADER_BYTES = 66
"""Ethernet, IP and TCP, with time stamps."""
FRAME_BYTES = 1448
"""Payload of a full frame."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """An object that was stored, or read."""

    direction: str
    num_bytes: int
    seconds: float
    on_line: int
    """Bytes that the host's device counted in this direction, without the headers of frames."""
    resent: int
    """Estimated bytes of `on_line` that TCP sent again, as a full queue drops frames."""
    rate: float
    """Estimated bytes per second, by the worker's newest transfers."""

    def factor(self, line: FarLine) -> float:
        """Return the measured seconds over the seconds of the bytes alone at the line's rate."""
        return self.seconds * line.mbits * 1e6 / 8 / self.num_bytes


@dataclass(frozen=True, slots=True)
class LineResult:
    line: FarLine
    transfers: list[Transfer]
    late: float
    """Seconds by which the latest status came late, or was lost."""
    estimates: tuple[float, float] = (0.0, 0.0)
    """The scheduler's bytes per second at the end, up and down."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A time without a line, in each transfer."""

    after_s: float
    seconds: float


def measure_transfers(
    lines: Sequence[FarLine], *, size: int, times: int, folder: Path, cut: Cut | None = None,
    then: FarLine | None = None,
) -> list[LineResult]:  # fmt: skip
    """Measure all lines at the same time: the objects of ``size`` bytes go up and down
    ``times``. With a ``cut``, statuses count from the moment when the line is back. All lines
    change to ``then`` for the second half of the transfers."""
    quiet_logs()
    with network([None, *lines]) as (store, *hosts), _brokers(store, folder) as settings:
        run = Plan(host=store, settings=settings, size=size, versions=times)
        with ExitStack() as stack:
            receiver = stack.enter_context(_process(receive, run))
            receiver.recv()
            results: list[LineResult | None] = [None] * len(lines)

            def measure(number: int) -> None:
                name = f"far-{number}"
                update = {"worker": name, "host_cache": "off"}
                plan = replace(run, host=hosts[number], settings=settings.model_copy(update=update))
                with _process(move, plan) as pipe:
                    results[number] = _measured(
                        hosts[number], lines[number], pipe, times, cut, then
                    )

            threads = [threading.Thread(target=measure, args=(n,)) for n in range(len(lines))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            receiver.send("end")
            came = receiver.recv()
    return [
        replace(
            each,
            late=_latest([at for at, _ in came[f"far-{number}"]], each.late),
            estimates=_estimates([status for _, status in came[f"far-{number}"]]),
        )
        for number, each in enumerate(results)
        if each is not None
    ]


def _estimates(statuses: Sequence[WorkerStatus]) -> tuple[float, float]:
    """Return the rates that the scheduler learns from statuses."""
    costs = LineCosts()
    for before, status in pairwise(statuses):
        up = seconds_per_byte(before.sent, status.sent)
        costs = costs.observe_link("far", up, seconds_per_byte(before.received, status.received))
    return 1 / costs.up_seconds("far"), 1 / costs.down_seconds("far")


def _measured(
    host: Host, line: FarLine, pipe: Connection, times: int, cut: Cut | None, then: FarLine | None
) -> LineResult:
    found, back = [], 0.0
    pipe.recv()
    for number in range(2 * times):
        if number == times and then is not None and host.line is not None:
            line = then
            host.line.set(line)
        before, resent = host.line_counters, host.resent_frames
        pipe.send("go")
        if cut is not None and host.line is not None:
            time.sleep(cut.after_s)
            host.line.set(replace(line, is_cut=True))
            time.sleep(cut.seconds)
            host.line.set(line)
            back = time.monotonic()
        direction, num_bytes, seconds, rate = pipe.recv()
        after = host.line_counters
        down, up = (
            after[each] - before[each] - HEADER_BYTES * (after[each + 2] - before[each + 2])
            for each in (0, 1)
        )
        on_line = up if direction == "up" else down
        again = FRAME_BYTES * (host.resent_frames - resent) if direction == "up" else 0
        found.append(Transfer(direction, num_bytes, seconds, on_line, again, rate))
    return LineResult(line, found, back)


def _latest(times: Sequence[float], since: float) -> float:
    """Return by how many seconds a status was late; after a cut, how late the first one was."""
    if since:
        return next(each for each in times if each > since) - since
    return max(after - before for before, after in pairwise(times)) - 1.0


async def receive(plan: Plan, pipe: Connection) -> None:
    """Note when statuses come."""
    store, came = await _answering(plan.settings), dict[str, list[tuple[float, WorkerStatus]]]()
    assert store is not None

    async def note(status: WorkerStatus) -> None:
        came.setdefault(status.worker, []).append((time.monotonic(), status))

    async with plan.settings.connect_bus() as bus:
        await bus.on_status(note)
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        pipe.send(came)
        await asyncio.sleep(PATIENCE_S)


async def move(plan: Plan, pipe: Connection) -> None:
    """Store objects, and read them, while this worker reports."""
    store = open_store(plan.settings.store)
    async with plan.settings.connect_bus() as bus:
        worker = Worker("rollout", plan.settings.worker, "waiting_for_trainer")
        worker.traffic = store.traffic
        reporting = asyncio.create_task(worker.report(bus))
        pipe.send("ready")
        for _ in range(plan.versions):
            data = os.urandom(plan.size)
            ref = await _timed(
                pipe, "up", store.traffic.up, store.put("run/objects", data, suffix=".bin")
            )
            await _timed(pipe, "down", store.traffic.down, _read(store, ref))
        reporting.cancel()
        with suppress(asyncio.CancelledError):
            await reporting


async def _read(store: ObjectStore, ref: ObjectRef) -> bytes:
    """Read an object as hosts read versions."""
    return b"".join([chunk async for chunk in store.stream(ref)])


async def _timed(pipe: Connection, direction: str, meter: Meter, work: Any) -> Any:
    await asyncio.to_thread(pipe.recv)
    began = time.monotonic()
    done = await work
    num_bytes = done.size if direction == "up" else len(done)
    pipe.send((direction, num_bytes, time.monotonic() - began, meter.rate or 0.0))
    return done
