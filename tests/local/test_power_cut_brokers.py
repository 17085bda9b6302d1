"""What a power cut in the middle of writing leaves of NATS, Redis and a store in a folder: all that
was acknowledged. Without fsync each of them loses some, which is what shows that the cut is one."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from digenrl.local.brokers import Brokers, plan_brokers
from digenrl.local.keys import keys_of
from shared.bus.bus import Bus
from shared.errors import DigenRLError
from shared.messages import subjects
from shared.run.versions import Version, VersionIndex
from shared.store.folder import FolderBackend
from tests import examples
from tests.brokers import StartProgram, program
from tests.local.test_power_cut import DISK_BYTES, mounted

pytestmark = [pytest.mark.broker, pytest.mark.slow]
CUT_S = (0.3, 1.5)
"""Seconds of writing before the power goes."""
ANSWERS_S = 20.0
NAMES = {"nats": "nats", "redis": "valkey"}
log = structlog.get_logger()
TIMES = pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.night)])


@dataclass(frozen=True, slots=True)
class Written:
    """One way to write and to read back."""

    write: Callable[[Any, int], Awaitable[None]]
    has: Callable[[Any, int], Awaitable[bool]]


async def _say(bus: Bus, number: int) -> None:
    await bus.publish(examples.task(batch=number))


async def _said(bus: Bus, number: int) -> bool:
    found = await bus.jetstream.stream_info(subjects.TASK.name, subjects_filter="dg.test.task.>")
    return subjects.subject_of("test", examples.task(batch=number)) in (found.state.subjects or {})


async def _index(index: VersionIndex, number: int) -> None:
    await index.publish(Version(policy=examples.policy(number), weights=examples.ref("w")))


async def _indexed(index: VersionIndex, number: int) -> bool:
    with contextlib.suppress(DigenRLError):
        return await index.lookup(number) is not None
    return False


async def _store(folder: FolderBackend, number: int) -> None:
    assert await folder.create(f"run/commits/{number:08d}.json", b"%d" % number * 100)


async def _stored(folder: FolderBackend, number: int) -> bool:
    return await folder.read(f"run/commits/{number:08d}.json") == b"%d" % number * 100


KINDS = {
    "nats": Written(_say, _said),
    "redis": Written(_index, _indexed),
    "folder": Written(_store, _stored),
}


@asynccontextmanager
async def opened(kind: str, place: Path, planned: Brokers) -> AsyncIterator[Any]:
    secrets = planned.secrets["scheduler"]
    if kind == "nats":
        async with Bus.connect(secrets["DIGENRL_NATS_URL"], run="test", name="test") as bus:
            await bus.ensure_streams()
            yield bus
    elif kind == "redis":
        async with VersionIndex.connect(secrets["DIGENRL_REDIS_URL"], run="test") as index:
            yield index
    else:
        yield FolderBackend(place / "objects")


async def until_cut(kind: str, place: Path, planned: Brokers, cut: Callable[[], None]) -> int:
    """Write until the power goes; return how many writes were acknowledged."""
    acknowledged = 0

    async def write() -> None:
        nonlocal acknowledged
        async with opened(kind, place, planned) as opening:
            while True:
                await KINDS[kind].write(opening, acknowledged)
                acknowledged += 1

    writing = asyncio.create_task(write())
    while not acknowledged:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(random.uniform(*CUT_S))
    counted = acknowledged
    cut()  # nothing else runs meanwhile
    writing.cancel()
    await asyncio.wait({writing}, timeout=5)
    return counted


async def answered(kind: str, place: Path, planned: Brokers) -> None:
    """Wait until a server that has just been started answers, if it ever does: before that it has
    no files, and nothing of what it reads again."""
    async with opened(kind, place, planned) as opening:
        deadline = time.monotonic() + ANSWERS_S
        while kind == "redis" and time.monotonic() < deadline:
            with contextlib.suppress(DigenRLError):
                await opening.lookup(0)
                return
            await asyncio.sleep(0.1)


async def num_lost(kind: str, place: Path, planned: Brokers, written: int) -> int:
    await answered(kind, place, planned)
    async with opened(kind, place, planned) as opening:
        there = [await KINDS[kind].has(opening, number) for number in range(written)]
    return there.count(False)


def lost(kind: str, folder: Path, start: StartProgram, change: Callable[[Path], None]) -> int:
    """Return how many acknowledged writes a power cut has lost; ``change``: to the settings."""
    image, copy = folder / "disk", folder / "copy"
    _make_disk(image)
    with ExitStack() as cleanup:
        before = cleanup.enter_context(mounted(image, folder / "before"))
        keys = keys_of(folder)
        planned = plan_brokers(before, keys)
        change(before)
        server = start(program(planned, NAMES[kind])) if kind in NAMES else None
        if server is not None:
            cleanup.callback(_kill, server)
        asyncio.run(answered(kind, before, planned))
        subprocess.run(["sync", "-f", str(before)], check=True)  # what was there before the writing

        def cut() -> None:
            if server is not None:
                server.send_signal(signal.SIGSTOP)
            subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True)

        written = asyncio.run(until_cut(kind, before, planned, cut))
        after = cleanup.enter_context(mounted(copy, folder / "after"))
        planned = plan_brokers(after, keys)
        if kind in NAMES:
            cleanup.callback(_kill, start(program(planned, NAMES[kind])))
        gone = asyncio.run(num_lost(kind, after, planned, written))
        log.info("power_cut", kind=kind, written=written, lost=gone)
        return gone


def _make_disk(image: Path) -> None:
    image.parent.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        with mounted(image, image.parent / "tried"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and loop devices: {error}")


def _kill(server: "subprocess.Popen[bytes]") -> None:
    server.kill()
    server.wait()


@TIMES
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut_loses_nothing_that_was_acknowledged(
    kind: str, tmp_path: Path, start: StartProgram, times: int
) -> None:
    for number in range(times):
        assert lost(kind, tmp_path / str(number), start, lambda _: None) == 0
        for name in ("disk", "copy"):
            (tmp_path / str(number) / name).unlink()


@pytest.fixture
def unflushed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Changes settings so that nothing is flushed."""

    def change(folder: Path) -> None:
        nats, valkey = folder / "nats" / "nats.conf", folder / "valkey" / "valkey.conf"
        nats.write_text(nats.read_text().replace("sync_interval: always", "sync_interval: 2m"))
        valkey.write_text(valkey.read_text().replace("appendfsync always", "appendfsync no"))
        monkeypatch.setattr(os, "fsync", lambda _: None)

    yield change


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_without_fsync_a_power_cut_loses_something(
    kind: str, tmp_path: Path, start: StartProgram, unflushed: Callable[[Path], None]
) -> None:
    assert lost(kind, tmp_path / "one", start, unflushed) > 0
