"""What both backends promise; the same cases on a folder and on a real S3 server."""

import asyncio
import errno
import os
import random
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

import pytest

from shared.errors import ContractError, IntegrityError, Unavailable, UserError
from shared.messages.contracts import ObjectRef
from shared.process.settings import ServiceSettings
from shared.store import ObjectStore, StoreSettings, folder, open_store
from shared.store.objects import CONCURRENT_HASH_BYTES, checked_key

Case = Callable[[ObjectStore], Awaitable[None]]


async def content_comes_back(store: ObjectStore) -> None:
    ref = await store.put("run/weights", b"tensor", suffix=".safetensors")
    assert ref.key == f"run/weights/{ref.sha256}.safetensors"
    assert await store.get(ref) == b"tensor"


async def a_huge_object_is_named_by_its_content_too(store: ObjectStore) -> None:
    data = bytes(1 << 20) * 20
    ref = await store.put("run/weights", memoryview(data), suffix=".safetensors")
    assert ref.key == f"run/weights/{sha256(data).hexdigest()}.safetensors"
    assert await store.get(ref) == data
    assert await store.keys("run/weights") == [ref.key]
    assert await store.unfinished("run") == []


async def a_name_can_be_created_once(store: ObjectStore) -> None:
    assert await store.create("run/commits/00000001.json", b"first")
    assert not await store.create("run/commits/00000001.json", b"second")
    assert await store.read("run/commits/00000001.json") == b"first"


async def of_many_creators_one_wins(store: ObjectStore) -> None:
    made = await asyncio.gather(*(store.create("run/commits/1", b"%d" % i) for i in range(8)))
    assert sum(made) == 1
    winner = made.index(True)
    assert await store.read("run/commits/1") == b"%d" % winner


async def a_wrong_or_missing_object_is_refused(store: ObjectStore) -> None:
    ref = await store.put("run/x", b"right", suffix=".bin")
    await store.write(ref.key, b"wrong")
    with pytest.raises(IntegrityError):
        await store.get(ref)
    with pytest.raises(IntegrityError):
        await store.get(ObjectRef(key="run/x/none", sha256=ref.sha256, size=5))


async def what_is_there_whole_is_not_sent_again(store: ObjectStore) -> None:
    ref = await store.put_once("run/x", b"right", suffix=".bin")
    assert await store.get(ref) == b"right"
    await store.write(ref.key, b"wrong")  # as long, so that sending it would show
    assert await store.put_once("run/x", b"right", suffix=".bin") == ref
    assert await store.read(ref.key) == b"wrong"
    assert await store.put("run/x", b"right", suffix=".bin") == ref
    assert await store.get(ref) == b"right"
    await store.write(ref.key, b"cut")
    assert await store.put_once("run/x", b"right", suffix=".bin") == ref
    assert await store.get(ref) == b"right"


async def folders_are_listed_and_deleted(store: ObjectStore) -> None:
    for key in ("run/batches/1/a", "run/batches/1/b", "run/batches/10/c", "run/other"):
        await store.write(key, b"")
    assert await store.keys("run/batches/1") == ["run/batches/1/a", "run/batches/1/b"]
    assert await store.delete_folder("run/batches/1") == 2
    assert await store.keys("run/batches") == ["run/batches/10/c"]
    assert await store.delete_folder("run/nothing") == 0
    assert await store.folders() == ["run"]


async def sizes_and_ages_are_listed(store: ObjectStore) -> None:
    began = time.time()
    await store.write("run/weights/a", b"12345")
    await store.write("run/other", b"")
    [found] = await store.entries("run/weights")
    assert (found.key, found.size) == ("run/weights/a", 5)
    assert began - CLOCK_S < found.modified < time.time() + CLOCK_S
    assert await store.entries("run/nothing") == []
    assert await store.unfinished("run") == []


CASES = [
    a_huge_object_is_named_by_its_content_too,
    content_comes_back,
    a_name_can_be_created_once,
    of_many_creators_one_wins,
    a_wrong_or_missing_object_is_refused,
    what_is_there_whole_is_not_sent_again,
    folders_are_listed_and_deleted,
    sizes_and_ages_are_listed,
]
CLOCK_S = 2.0
"""Seconds by which a store's clock, or what it writes of it, may differ."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_in_a_folder(folder_store: ObjectStore, case: Case) -> None:
    await case(folder_store)


def test_on_a_real_s3_server(s3_store: ObjectStore) -> None:
    async def every_case() -> None:
        for case in CASES:
            await s3_store.delete_folder("run")
            await case(s3_store)

    asyncio.run(every_case())


@pytest.mark.parametrize(
    "key", ["../x", "/x", "x/../y", "x//y", "x/.hidden", "", "x\n", "x\\y", "x" * 600, "~/x", "x/"]
)
def test_a_key_that_could_leave_the_store_is_refused(key: str) -> None:
    with pytest.raises(ContractError):
        checked_key(key)


async def test_an_interrupted_write_is_no_object(folder_store: ObjectStore, tmp_path: Path) -> None:
    await folder_store.write("run/a", b"whole")
    (tmp_path / "objects" / "run" / ".tmp-1234").write_bytes(b"ha")
    assert await folder_store.keys("run") == ["run/a"]
    assert [each.key for each in await folder_store.entries("run")] == ["run/a"]
    unfinished = await folder_store.unfinished("run")
    assert [(each.key, each.size) for each in unfinished] == [("run/.tmp-1234", 2)]
    await folder_store.delete_unfinished(unfinished)
    assert await folder_store.unfinished("run") == []
    assert await folder_store.read("run/a") == b"whole"


@pytest.mark.parametrize(
    "size", [0, 999, 1000, 1001, CONCURRENT_HASH_BYTES, CONCURRENT_HASH_BYTES + 25_603]
)
async def test_what_is_flushed_beside_writing_has_all_its_bytes(
    size: int, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        folder, "PIECE", 1000 if size < CONCURRENT_HASH_BYTES else CONCURRENT_HASH_BYTES // 9
    )
    data = random.Random(size).randbytes(size)
    ref = await folder_store.put("run/weights", data, suffix=".bin")
    assert await folder_store.get(ref) == data


@pytest.mark.parametrize(
    ("code", "raised"),
    [(errno.EIO, OSError), (errno.ENOSPC, Unavailable), (errno.EDQUOT, Unavailable)],
)
async def test_an_error_of_the_disk_that_is_told_beside_writing_is_not_lost(
    code: int, raised: type[Exception], folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells it once: to the first that flushes."""

    def fails(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(folder, "PIECE", 1000)
    monkeypatch.setattr("os.fdatasync", fails)
    with pytest.raises(raised):
        await folder_store.put("run/weights", bytes(1 << 20), suffix=".bin")
    assert await folder_store.keys("run/weights") == []
    assert await folder_store.unfinished("run") == []


def test_a_url_of_no_known_kind_is_refused() -> None:
    with pytest.raises(UserError, match="store_url"):
        open_store(StoreSettings(url="ftp://host/x"))


async def test_a_store_that_refuses_the_key_says_which_settings_hold_it(
    s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_S3_SECRET_KEY", "mistaken")
    refused = open_store(ServiceSettings(run="test").store)
    with pytest.raises(Unavailable, match="refuses these keys") as raised:
        await refused.read("test/recipe.json")
    assert "DIGENRL_S3_SECRET_KEY" in str(raised.value) and "mistaken" not in str(raised.value)
