"""What a power cut in the middle of writing leaves of NATS, Redis and both kinds of store: all that
was acknowledged. Without what makes each of them flush it loses some, which is what shows that the
cut is one.

Each is on a disk image, and what had been flushed is read from a copy of that image, taken while it
is stopped in its tracks."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import SecretStr

from digenrl.local.brokers import embedded as brokers
from digenrl.local.brokers import seaweedfs
from digenrl.local.brokers.embedded import Brokers, plan_brokers
from digenrl.local.secrets.keys import load_keys
from shared.bus.bus import Bus
from shared.errors import DigenRLError
from shared.limits import MAX_INDEXED_VERSIONS
from shared.messages import subjects
from shared.messages.records import ObjectRef
from shared.run.versions import Version, VersionIndex
from shared.store import ObjectStore, StoreSettings, bucket, open_store
from shared.store.folder import FolderBackend
from tests import examples
from tests.brokers import StartProgram, program

pytestmark = [pytest.mark.broker, pytest.mark.slow]
CUT_S = (0.3, 1.5)
"""Seconds of writing before the power goes."""
ANSWERS_S = 20.0
DISK_BYTES = 3 << 30
LARGE = 12 << 20
"""Bytes; sent in parts."""
NAMES = {"nats": "nats", "redis": "valkey", "objects": "objects"}
log = structlog.get_logger()
TIMES = pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.night)])


@dataclass(frozen=True, slots=True)
class Written:
    """One way to write and to read back."""

    write: Callable[[Any, int], Awaitable[None]]
    has: Callable[[Any, int], Awaitable[bool]]
    at_least: int = 1
    """Writes before the power goes."""
    begins_flushed: bool = True
    """Whether what is there before the writing is flushed first."""
    keeps: int | None = None
    """How many of the newest it keeps, None: all."""


async def _say(bus: Bus, number: int) -> None:
    await bus.publish(examples.task(batch=number))


async def _said(bus: Bus, number: int) -> bool:
    found = await bus.jetstream.stream_info(subjects.TASK.name, subjects_filter="dg.test.task.>")
    return subjects.message_subject("test", examples.task(batch=number)) in (
        found.state.subjects or {}
    )


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


async def _commit(store: ObjectStore, number: int) -> None:
    """Store weights and a commit record that names them, as a trainer does."""
    weights = os.urandom(LARGE if number % 8 == 0 else 1 << 10)
    ref = await store.put("run/weights", weights, suffix=".safetensors")
    assert await store.create(f"run/commits/{number:08d}.json", ref.model_dump_json().encode())


async def _committed(store: ObjectStore, number: int) -> bool:
    with contextlib.suppress(DigenRLError, ValueError):
        record = await store.read(f"run/commits/{number:08d}.json")
        return bool(await store.get(ObjectRef.model_validate_json(record or b"")))
    return False


KINDS = {
    "nats": Written(_say, _said),
    "redis": Written(
        _index, _indexed, keeps=MAX_INDEXED_VERSIONS - 1
    ),  # one more may have come unacknowledged
    "folder": Written(_store, _stored),
    "objects": Written(_commit, _committed, at_least=24, begins_flushed=False),
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
    elif kind == "objects":
        owner = planned.owner
        yield open_store(
            StoreSettings(
                url=f"s3://{brokers.BUCKET}",
                endpoint=planned.environment["DIGENRL_S3_ENDPOINT"],
                access_key=SecretStr(owner["DIGENRL_S3_ACCESS_KEY"]),
                secret_key=SecretStr(owner["DIGENRL_S3_SECRET_KEY"]),
            )
        )
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
    while acknowledged < KINDS[kind].at_least:  # noqa: ASYNC110
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


async def any_is_lost(kind: str, place: Path, planned: Brokers, written: int) -> bool:
    await answered(kind, place, planned)
    async with opened(kind, place, planned) as opening:
        kept = KINDS[kind].keeps or written
        for number in range(max(0, written - kept), written):
            if not await KINDS[kind].has(opening, number):
                return True
    return False


def loses(
    kind: str, folder: Path, start: StartProgram, change: Callable[[Path], None] = lambda _: None
) -> bool:
    """Whether a power cut loses something acknowledged; ``change``: to the settings."""
    image, copy = folder / "disk", folder / "copy"
    _make_disk(image)
    with ExitStack() as cleanup, pytest.MonkeyPatch.context() as patch:
        before = cleanup.enter_context(mounted(image, folder / "before"))
        keys = load_keys(folder)
        planned = plan_brokers(before, keys)
        change(before)
        server = start(program(planned, NAMES[kind])) if kind in NAMES else None
        if server is not None:
            cleanup.callback(_kill, server)
        asyncio.run(answered(kind, before, planned))
        if KINDS[kind].begins_flushed:
            subprocess.run(["sync", "-f", str(before)], check=True)

        def cut() -> None:
            if server is not None:
                server.send_signal(signal.SIGSTOP)
            subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True)

        written = asyncio.run(until_cut(kind, before, planned, cut))
        after = cleanup.enter_context(mounted(copy, folder / "after"))
        planned = plan_brokers(after, keys)
        if kind in NAMES:
            cleanup.callback(_kill, start(program(planned, NAMES[kind])))
        patch.setattr(bucket, "MAX_RETRY_TIME", timedelta(0))  # what is lost does not come back
        log.info("power_cut", kind=kind, written=written)
        return asyncio.run(any_is_lost(kind, after, planned, written))


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


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
        assert not loses(kind, tmp_path / str(number), start)
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
@pytest.mark.parametrize("kind", [each for each in KINDS if each != "objects"])
def test_without_fsync_a_power_cut_loses_something(
    kind: str, tmp_path: Path, start: StartProgram, unflushed: Callable[[Path], None]
) -> None:
    assert loses(kind, tmp_path / "one", start, unflushed)


FLUSHING = {
    "ENVIRONMENT": {k: v for k, v in seaweedfs.ENVIRONMENT.items() if not k.startswith("WEED_")},
    "FSYNC_RULE": {"locations": []},
    "INDEX_AND_START": seaweedfs.START_IN_HOME,
}
"""What makes the object store flush, and what it would be without: a database that flushes, a rule
to do so, new indexes."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("setting", FLUSHING)
def test_without_each_of_its_settings_the_object_store_loses_commits(
    setting: str, tmp_path: Path, start: StartProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seaweedfs, setting, FLUSHING[setting])
    assert loses("objects", tmp_path / "one", start)
