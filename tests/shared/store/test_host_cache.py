"""One process of a host fetches what all of them read, and whatever goes wrong, it is read."""

import asyncio
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.errors import IntegrityError, UserError
from shared.messages.contracts import ObjectRef
from shared.process.settings import ServiceSettings
from shared.store import CacheSettings, ObjectStore
from shared.store.backend import CHUNK
from shared.store.cache_folder import CacheFolder, ReceivedObject
from shared.store.host_cache import host_cache
from shared.telemetry import DIGESTED_BYTES
from tests.paths import ROOT
from tests.shared.store.hosts import Counting, counted, process_on

SIZE = 3 * CHUNK + 5
WAIT_S = 20.0


@pytest.fixture
def backend(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "objects")


async def stored(backend: Counting, number: int = 0, size: int = SIZE) -> ObjectRef:
    data = bytes([number]) * size
    return await ObjectStore(backend).put("run/weights", data, suffix=".safetensors")


def kept(host: Path) -> list[str]:
    """Objects, and parts of objects, in the cache of a host."""
    files = (path.name for path in host.rglob("*") if path.is_file())
    return sorted(name for name in files if not name.startswith(("lock", "secret")))


async def test_the_processes_of_a_host_read_an_object_once(
    backend: Counting, tmp_path: Path
) -> None:
    with counted(DIGESTED_BYTES, of="object") as by_the_committer:
        ref = await stored(backend)
    processes = [process_on(tmp_path / "host") for _ in range(4)]
    stores = [ObjectStore(backend, cache=each) for each in processes for _ in range(2)]
    with counted(DIGESTED_BYTES, of="object") as by_the_host:
        found = await asyncio.gather(*(store.get_shared(ref) for store in stores))
    assert all(data[:] == bytes(SIZE) for data in found)
    assert backend.read_bytes == by_the_host.value == by_the_committer.value == SIZE
    assert kept(tmp_path / "host") == [ref.sha256]
    assert (await stores[0].get_shared(ref))[:3] == bytes(3)
    assert backend.read_bytes == SIZE


async def test_hosts_read_an_object_once_each(backend: Counting, tmp_path: Path) -> None:
    ref = await stored(backend)
    hosts = [tmp_path / f"host-{number}" for number in range(3)]
    stores = [ObjectStore(backend, cache=process_on(host)) for host in hosts * 4]
    await asyncio.gather(*(store.get_shared(ref) for store in stores))
    assert backend.read_bytes == len(hosts) * SIZE


async def test_who_maps_an_object_changes_it_for_nobody_else(
    backend: Counting, tmp_path: Path
) -> None:
    ref = await stored(backend)
    store = ObjectStore(backend, cache=process_on(tmp_path / "host"))
    mine, yours = await store.get_shared(ref), await store.get_shared(ref)
    assert not isinstance(mine, bytes)
    mine[0] = 7
    assert yours[0] == 0
    assert (await store.get_shared(ref))[0] == 0


DIES = """
import asyncio, sys
from pathlib import Path
from shared.messages.contracts import ObjectRef
from shared.store import ObjectStore
from tests.shared.store.hosts import Counting, process_on

async def fetch(objects, host, ref):
    backend = Counting(Path(objects))
    backend.goes_on.clear()
    fetching = asyncio.create_task(
        process_on(Path(host)).get(ObjectRef.model_validate_json(ref), ObjectStore(backend))
    )
    while not backend.read_bytes:
        await asyncio.sleep(0.01)
    print("in the middle", flush=True)
    await fetching

asyncio.run(fetch(*sys.argv[1:]))
"""


async def test_a_fetcher_killed_in_the_middle_costs_its_host_one_more_read(
    backend: Counting, tmp_path: Path
) -> None:
    ref, host = await stored(backend), tmp_path / "host"
    argv = [sys.executable, "-c", DIES, str(tmp_path / "objects"), str(host), ref.model_dump_json()]
    dying = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT)  # noqa: ASYNC220
    assert dying.stdout is not None
    try:
        assert await asyncio.to_thread(dying.stdout.readline) == b"in the middle\n"
        stores = [ObjectStore(backend, cache=process_on(host)) for _ in range(3)]
        reading = [asyncio.create_task(store.get_shared(ref)) for store in stores]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in reading) and backend.read_bytes == 0
        assert len(kept(host)) == 1
    finally:
        dying.kill()
        dying.wait()
        dying.stdout.close()
    async with asyncio.timeout(WAIT_S):
        found = await asyncio.gather(*reading)
    assert all(data[:] == bytes(SIZE) for data in found)
    assert backend.read_bytes == SIZE
    assert kept(host) == [ref.sha256]


async def test_what_is_not_as_its_reference_says_is_never_kept(
    backend: Counting, tmp_path: Path
) -> None:
    ref = await stored(backend)
    store = ObjectStore(backend, cache=process_on(tmp_path / "host"))
    for wrong in (b"\1" * SIZE, bytes(SIZE - 1), bytes(SIZE + 1)):
        await store.write(ref.key, wrong)
        with pytest.raises(IntegrityError):
            await store.get_shared(ref)
    await store.delete([ref.key])
    with pytest.raises(IntegrityError, match="not in the store"):
        await store.get_shared(ref)
    assert kept(tmp_path / "host") == []
    await stored(backend)
    assert (await store.get_shared(ref))[:] == bytes(SIZE)


async def test_what_was_not_used_for_longest_makes_room(backend: Counting, tmp_path: Path) -> None:
    refs = [await stored(backend, number) for number in range(3)]
    store = ObjectStore(backend, cache=process_on(tmp_path / "host", limit=2 * SIZE))
    oldest = await store.get_shared(refs[0])
    await store.get_shared(refs[1])
    await store.get_shared(refs[0])
    await store.get_shared(refs[2])
    assert kept(tmp_path / "host") == sorted([refs[0].sha256, refs[2].sha256])
    await store.get_shared(refs[1])
    assert kept(tmp_path / "host") == sorted([refs[1].sha256, refs[2].sha256])
    assert oldest[:] == bytes(SIZE)  # who has it keeps it


async def test_a_cache_without_room_stops_nobody(
    backend: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await stored(backend)
    small = ObjectStore(backend, cache=process_on(tmp_path / "small", limit=SIZE - 1))
    full = ObjectStore(backend, cache=process_on(tmp_path / "full"))

    def add(part: ReceivedObject, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with capture_logs() as logs:
        assert await small.get_shared(ref) == bytes(SIZE)
        with monkeypatch.context() as disk:
            disk.setattr(ReceivedObject, "add", add)
            assert await full.get_shared(ref) == bytes(SIZE)
    assert [log["event"] for log in logs] == ["host_cache_unusable"] * 2
    assert kept(tmp_path / "small") == kept(tmp_path / "full") == []
    assert not isinstance(await full.get_shared(ref), bytes)  # there is room again


async def test_a_fetch_ends_with_the_last_of_its_readers(backend: Counting, tmp_path: Path) -> None:
    ref, process = await stored(backend), process_on(tmp_path / "host")
    store = ObjectStore(backend, cache=process)
    backend.goes_on.clear()
    one, other = (asyncio.create_task(store.get_shared(ref)) for _ in range(2))
    while not backend.read_bytes:  # noqa: ASYNC110 -- it counts
        await asyncio.sleep(0.01)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    assert process.folder.is_locked(ref.sha256)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    while process.folder.is_locked(ref.sha256):  # noqa: ASYNC110 -- by a task that is ending
        await asyncio.sleep(0.01)
    assert kept(tmp_path / "host") == []
    backend.goes_on.set()
    assert (await store.get_shared(ref))[:] == bytes(SIZE)


def opened_with(folder: Path, *, chosen: bool) -> CacheFolder | None:
    async def opened() -> CacheFolder | None:
        settings = CacheSettings(folder=folder, is_chosen=chosen, limit=1)
        async with host_cache(settings, redis_url="", run="test") as cache:
            return None if cache is None else cache.folder

    return asyncio.run(opened())


def test_a_folder_that_others_may_look_into_or_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path, why: str) -> None:
        with pytest.raises(UserError, match=why):
            opened_with(folder, chosen=True)
        with capture_logs() as logs:
            assert opened_with(folder, chosen=False) is None
        assert [log["event"] for log in logs] == ["host_cache_off"]

    ours = tmp_path / "ours"
    assert opened_with(ours, chosen=True) is not None
    assert ours.stat().st_mode & 0o777 == 0o700
    ours.chmod(0o750)
    refused(ours, "host_cache: .*mode 750.*chmod 700")
    ours.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(ours)
    refused(link, "link or no folder")
    file = tmp_path / "file"
    file.touch()
    refused(file, "host_cache")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(ours, "not this user's")


async def test_links_in_the_folder_are_not_followed(backend: Counting, tmp_path: Path) -> None:
    ref, process = await stored(backend), process_on(tmp_path / "host")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"\1" * SIZE)
    (process.folder.root / ref.sha256).symlink_to(elsewhere)
    assert await ObjectStore(backend, cache=process).get_shared(ref) == bytes(SIZE)
    assert elsewhere.read_bytes() == b"\1" * SIZE
    with pytest.raises(ValueError, match="no digest"):
        process.folder.map("../elsewhere", SIZE)


def test_what_another_boot_has_left_is_believed_by_nobody_and_goes_after_a_day(
    tmp_path: Path,
) -> None:
    host = tmp_path / "host"
    CacheFolder.open(host)
    old, young = (host / f"{number:08x}-0000-0000-0000-000000000000" for number in (1, 2))
    for folder in (old, young):
        folder.mkdir()
        (folder / "object").touch()
    (host / "somebody's").mkdir()
    long_ago = time.time() - 2 * 86_400
    os.utime(old, (long_ago, long_ago))
    CacheFolder.open(host)
    assert not old.exists() and young.exists() and (host / "somebody's").exists()


def test_the_cache_is_on_where_a_host_would_read_over_a_line(tmp_path: Path) -> None:
    def settings(**given: object) -> CacheSettings | None:
        return ServiceSettings(run="test", **given).cache  # type: ignore[arg-type]

    assert settings(store_url="file:///objects") is None
    found = settings(store_url="s3://bucket", share_at="10.0.0.5:7800")
    assert found is not None and not found.is_chosen and found.folder.name == "digenrl"
    assert found.share_at == ("10.0.0.5", 7800)
    chosen = settings(store_url="file:///objects", host_cache=str(tmp_path), host_cache_gib=1)
    assert chosen == CacheSettings(folder=tmp_path, is_chosen=True, limit=1 << 30)
    assert settings(store_url="s3://bucket", host_cache="off") is None
    with pytest.raises(UserError, match="share_at"):
        settings(host_cache="off", share_at="10.0.0.5:7800")
    for wrong in ({"host_cache": "relative"}, {"share_at": "10.0.0.5"}, {"host_cache_gib": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            settings(**wrong)
