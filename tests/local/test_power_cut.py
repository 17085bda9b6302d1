"""What of the object store a power cut leaves: its folder is on a disk image, and what had been
flushed is read from a copy of that image, taken while the store is stopped in its tracks."""

import asyncio
import dataclasses
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from digenrl.local import brokers, seaweedfs
from digenrl.local.brokers import Brokers, Program, plan_brokers
from shared.errors import Unavailable
from shared.store import ObjectStore, StoreSettings, bucket, open_store
from tests.brokers import PASSWORD, StartProgram, program

pytestmark = [pytest.mark.broker, pytest.mark.slow]

NUM_COMMITS = 24
LARGE = 12 << 20
"""Bytes; sent in parts."""
DISK_BYTES = 3 << 30


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def empty(image: Path) -> None:
    """Put an empty file system on an image."""
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """An image with an empty file system on it."""
    image = tmp_path / "disk"
    try:
        empty(image)
        with mounted(image, tmp_path / "tried"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and loop devices: {error}")
    return image


def store_of(planned: Brokers) -> ObjectStore:
    return open_store(
        StoreSettings(
            url=f"s3://{brokers.BUCKET}",
            endpoint=planned.environment["DIGENRL_S3_ENDPOINT"],
            access_key=SecretStr(brokers.USER),
            secret_key=SecretStr(PASSWORD),
        )
    )


def without_sqlite(shipped: Program) -> Program:
    kept = {k: v for k, v in shipped.environment.items() if not k.startswith("WEED_")}
    return dataclasses.replace(shipped, environment=kept)


async def acknowledged(store: ObjectStore) -> dict[str, bytes]:
    """Commit records and weights, as a trainer stores them."""
    stored: dict[str, bytes] = {}
    for version in range(NUM_COMMITS):
        weights = os.urandom(LARGE if version % 8 == 0 else 1 << 10)
        ref = await store.put("run/weights", weights, suffix=".safetensors")
        key, record = f"run/commits/{version:08d}.json", b"%d" % version * 1000
        assert await store.create(key, record)
        stored |= {ref.key: weights, key: record}
    return stored


async def any_is_lost(store: ObjectStore, stored: dict[str, bytes]) -> bool:
    for key, data in stored.items():
        try:
            if await store.read(key) != data:
                return True
        except Unavailable:
            return True
    return False


def loses_something(
    disk: Path, folder: Path, start: StartProgram, *, ships_with_sqlite: bool = True
) -> bool:
    """Whether something that was acknowledged is not there after the power cut."""

    def objects(planned: Brokers) -> Program:
        shipped = program(planned, "objects")
        return shipped if ships_with_sqlite else without_sqlite(shipped)

    with ExitStack() as cleanup, pytest.MonkeyPatch.context() as patch:
        before = plan_brokers(cleanup.enter_context(mounted(disk, folder / "before")), PASSWORD)
        server = start(objects(before))
        cleanup.callback(_kill, server)
        stored = asyncio.run(acknowledged(store_of(before)))
        server.send_signal(signal.SIGSTOP)
        copy = folder / "copy"
        subprocess.run(["cp", "--sparse=always", str(disk), str(copy)], check=True)
        after = plan_brokers(cleanup.enter_context(mounted(copy, folder / "after")), PASSWORD)
        again = start(objects(after))
        cleanup.callback(_kill, again)
        patch.setattr(bucket, "RETRIES", timedelta(0))  # what is lost does not come back
        return asyncio.run(any_is_lost(store_of(after), stored))


def _kill(server: "subprocess.Popen[bytes]") -> None:
    server.kill()
    server.wait()


@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.night)])
def test_a_power_cut_loses_nothing_that_the_object_store_has_acknowledged(
    disk: Path, tmp_path: Path, start: StartProgram, times: int
) -> None:
    lost: list[int] = []
    for number in range(times):
        (folder := tmp_path / str(number)).mkdir()
        empty(disk)
        if loses_something(disk, folder, start):
            lost.append(number)
        (folder / "copy").unlink()
    assert not lost


def test_without_the_database_that_flushes_a_power_cut_loses_commits(
    disk: Path, tmp_path: Path, start: StartProgram
) -> None:
    assert loses_something(disk, tmp_path, start, ships_with_sqlite=False)


def test_without_the_fsync_rule_a_power_cut_loses_commits(
    disk: Path, tmp_path: Path, start: StartProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seaweedfs, "FSYNC_RULE", {"locations": []})
    assert loses_something(disk, tmp_path, start)


def test_without_new_indexes_a_power_cut_loses_commits(
    disk: Path, tmp_path: Path, start: StartProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seaweedfs, "INDEX_AND_START", seaweedfs.AT_HOME)
    assert loses_something(disk, tmp_path, start)
