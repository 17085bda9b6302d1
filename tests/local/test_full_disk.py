"""Disks that are full: what has to store waits and says so, and goes on when there is room."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.brokers.embedded import plan_brokers
from services.scheduler import limits
from services.scheduler.shell import disk_watch
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.lease import Lease
from shared.bus.bus import Bus
from shared.errors import Unavailable, UserError
from shared.process.service import Health
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from shared.telemetry import ALARM, NATS_STORES_NOTHING
from tests import examples
from tests.brokers import PASSWORD, StartProgram, program
from tests.shared.run.test_garbage import RUN, begin

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("ab") as file:
        while True:
            file.write(b"\0" * 4096)
            file.flush()
    return filler


async def test_a_store_whose_disk_is_full_is_unavailable_and_leaves_nothing_behind(
    small_disk: Path,
) -> None:
    store = ObjectStore(FolderBackend(small_disk))
    await store.write("run/first", b"1")
    filler = fill(small_disk)
    with pytest.raises(Unavailable, match="disk is full"):
        await store.put("run/weights", b"\1" * (1 << 20), suffix=".w")
    assert await store.unfinished("run") == []
    filler.unlink()
    await store.put("run/weights", b"\1" * (1 << 20), suffix=".w")


@pytest.mark.broker
@pytest.mark.slow
async def test_a_nats_that_stores_nothing_is_an_alarm_until_it_is_started_with_room(
    small_disk: Path, redis_url: str, start: StartProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NATS_ALARM_DELAY_S", 2.0)
    brokers = plan_brokers(small_disk, PASSWORD)
    nats = program(brokers, "nats")
    server = await asyncio.to_thread(start, nats)
    url, store = brokers.environment["DIGENRL_NATS_URL"], FolderBackend(small_disk.parent / "o")
    health = Health()
    async with (
        Bus.connect(url, run="test", name="test") as bus,
        VersionIndex.connect(redis_url, run="test") as index,
        Lease(bus, ObjectStore(store), health).held() as lease,
    ):
        scheduler = Scheduler(examples.plan(), bus, ObjectStore(store), index, health, lease=lease)
        tasks = [asyncio.create_task(each) for each in (scheduler.run(), lease.keep())]
        try:
            await until(health, "ready")
            filler = await asyncio.to_thread(fill, small_disk)
            await until(health, NATS_STORES_NOTHING)
            assert ALARM.labels(what="nats_stores_nothing")._value.get() == 1
            filler.unlink()
            server.terminate()
            await asyncio.to_thread(server.wait)
            await asyncio.to_thread(start, nats)
            await until(health, "ready")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.broker
async def test_a_store_or_a_redis_without_room_is_an_alarm_until_there_is_some(
    small_disk: Path, nats_url: str, start: StartProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORE_ALARM_DELAY_S", 1.0)
    monkeypatch.setattr(
        limits, "PROBE_INTERVAL_S", 0.02
    )  # Redis has room left in its log's last page
    brokers = plan_brokers(small_disk, PASSWORD)
    redis = program(brokers, "valkey")
    server = await asyncio.to_thread(start, redis)
    url, health = brokers.environment["DIGENRL_REDIS_URL"], Health()
    store = ObjectStore(FolderBackend(small_disk / "objects"))
    async with (
        Bus.connect(nats_url, run="test", name="test") as bus,
        VersionIndex.connect(url, run="test") as index,
    ):
        scheduler = Scheduler(examples.plan(), bus, store, index, health)
        task = asyncio.create_task(scheduler.run())
        try:
            await until(health, "ready")
            filler = await asyncio.to_thread(fill, small_disk)
            await until(health, "the object store takes nothing (the store's disk is full")
            await asyncio.to_thread(server.wait, 60)  # it cannot write its log
            await until(health, "", "Redis takes nothing")
            fired = [ALARM.labels(what=what)._value.get() for what in disk_watch.REMEDIES]
            assert fired == [1, 1]
            filler.unlink()
            await until(health, "Redis takes nothing")
            await asyncio.to_thread(start, redis)
            await until(health, "ready")
            fired = [ALARM.labels(what=what)._value.get() for what in disk_watch.REMEDIES]
            assert fired == [0, 0]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(health: Health, reason: str, within: str = "") -> None:
    async with asyncio.timeout(60):
        while not (health.reason.startswith(reason) and within in health.reason):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_copy_to_a_full_disk_ends_with_one_line_and_continues_when_there_is_room(
    small_disk: Path, folder_store: ObjectStore, tmp_path: Path
) -> None:
    _, trainer, _ = await begin(folder_store)
    await trainer.step()
    command = ["copy", str(tmp_path / "objects" / RUN), str(small_disk)]
    filler = fill(small_disk)
    ran = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert isinstance(ran.exception, UserError)
    assert "disk is full" in str(ran.exception) and "continues the copy" in str(ran.exception)
    filler.unlink()
    assert "version 0 is in" in (await asyncio.to_thread(CliRunner().invoke, app, command)).output
