"""Damaged bytes in a run's store: they are found wherever they are, and repaired where that is
possible."""

import json
import random
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from services.scheduler.shell.lease import newest_epoch
from shared.errors import ContractError
from shared.messages.contracts import ObjectRef
from shared.run.chain import read_chain
from shared.run.commits import commit, commit_chain, newest_commit, record_digest
from shared.run.evaluations import GoldFigures
from shared.run.files import LibrariesRecord, read_records
from shared.run.layout import commit_key, copy_key, measured_versions, numbers_in, weights_folder
from shared.run.log import Log
from shared.run.record_backups import create_kept, keep_copy, read_kept, write_kept
from shared.run.repair import apply_remedy, find_damage
from shared.store import ObjectStore
from shared.store.backend import StoredObject
from shared.telemetry import CORRUPT
from tests.shared.run.test_chain import RUN, record

COUNT = 5


@pytest.fixture
async def store(folder_store: ObjectStore) -> ObjectStore:
    """A run of some versions, each with a copy of its record."""
    digest: str | None = None
    for version in range(COUNT):
        weights = await folder_store.put(weights_folder(RUN), b"weights %d" % version, suffix=".w")
        made = record(version, digest).model_copy(update={"weights": weights})
        await commit(folder_store, made)
        digest = record_digest(made.encode())
        await keep_copy(folder_store, RUN, version, digest)
    return folder_store


async def flip(store: ObjectStore, key: str, place: int) -> None:
    data = bytearray(await store.read(key) or b"")
    data[place % len(data)] ^= 1
    await store.write(key, bytes(data))


async def repair_all(store: ObjectStore) -> list[str]:
    found = await find_damage(store, RUN)
    for each in found:
        await apply_remedy(store, RUN, each)
    return [each.remedy for each in found]


@pytest.mark.parametrize("version", range(COUNT))
async def test_a_damaged_byte_in_any_record_changes_nothing_that_is_read(
    store: ObjectStore, version: int
) -> None:
    before, newest = await commit_chain(store, RUN), await newest_commit(store, RUN)
    places = random.Random(version)
    for _ in range(5):
        data = await store.read(commit_key(RUN, version)) or b""
        await flip(store, commit_key(RUN, version), places.randrange(len(data)))
        assert await commit_chain(store, RUN) == before or version == COUNT - 1
        assert await newest_commit(store, RUN) == newest
        assert (await read_chain(store, RUN)).newest == newest
        assert await repair_all(store) == ["put back"]
        assert await commit_chain(store, RUN) == before
        assert await find_damage(store, RUN) == []


async def test_a_damaged_record_without_a_copy_stops_a_run_with_the_remedy(
    store: ObjectStore,
) -> None:
    for version in range(COUNT):
        await store.delete_folder(f"{RUN}/copies/{version:08d}")
    await flip(store, commit_key(RUN, 2), 3)
    with pytest.raises(ContractError, match=f"00000002.*digenrl repair {RUN}"):
        await read_chain(store, RUN)
    assert await repair_all(store) == ["none", "none"], "version 3 may be the one, or 2"


async def test_a_damaged_newest_record_without_a_copy_takes_the_run_back_by_one(
    store: ObjectStore,
) -> None:
    await store.delete_folder(f"{RUN}/copies/{COUNT - 1:08d}")
    await flip(store, commit_key(RUN, COUNT - 1), 0)
    assert await repair_all(store) == ["move"]
    newest = await newest_commit(store, RUN)
    assert newest is not None and newest.policy.version == COUNT - 2


async def test_a_damaged_object_of_any_kind_is_found_and_moved_away(store: ObjectStore) -> None:
    refs = dict[str, ObjectRef]()
    for folder in ("weights", "checkpoints", "conditions", "batches/00000001"):
        refs[folder] = await store.put(f"{RUN}/{folder}", folder.encode(), suffix=".x")
    await store.write(f"{RUN}/usage/00000001.json", b"{}")
    assert await find_damage(store, RUN) == []
    for ref in refs.values():
        await flip(store, ref.key, 1)
    await flip(store, f"{RUN}/usage/00000001.json", 1)
    assert await repair_all(store) == ["move"] * 5
    assert await find_damage(store, RUN) == []
    assert len(await store.keys(f"{RUN}/quarantine")) == 5


async def test_what_was_deleted_since_it_was_listed_is_no_damage(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await store.put(f"{RUN}/batches/00000001", b"made", suffix=".x")
    await store.write(f"{RUN}/log/00000001.json", b"{")
    entries = await store.entries(RUN)
    await store.delete([made.key, f"{RUN}/log/00000001.json"])

    async def listed(self: ObjectStore, prefix: str) -> list[StoredObject]:
        return entries

    monkeypatch.setattr(ObjectStore, "entries", listed)
    assert await find_damage(store, RUN) == []


RECORDS = (
    "recipe.json", "files/model.folder.json",
    "files/libraries.reward.0123456789abcdef.json", "chain/00000000.json",
    f"conditions/by/{'0' * 64}.json", "log/00000001.json",
    "evaluations/log/00000001.json",
)  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
async def test_a_record_that_is_json_and_not_what_its_model_says_is_found(
    store: ObjectStore, name: str
) -> None:
    await store.write(f"{RUN}/{name}", b'{"other": 1}')
    [found] = await find_damage(store, RUN)
    assert (found.key, found.remedy) == (f"{RUN}/{name}", "move")


@pytest.mark.parametrize("name", ["recipe", "files/model.folder", "files/libraries.reward.0123"])
@pytest.mark.parametrize("place", range(3, 90, 9))
async def test_a_damaged_byte_of_a_record_with_a_copy_changes_nothing_and_is_put_back(
    store: ObjectStore, name: str, place: int
) -> None:
    data = json.dumps({"digest": "0" * 64, "path": "/models/digits", "host": "here"}).encode()
    write = write_kept if name == "recipe" else create_kept
    await write(store, RUN, name, data)
    await flip(store, f"{RUN}/{name}.json", place)
    assert await read_kept(store, RUN, name) == data
    assert "put back" in await repair_all(store)
    assert await store.read(f"{RUN}/{name}.json") == data


FOREIGN = (
    "commits/files/00000099.json", "commits/00000099", "commits/recipe.json", "commits/x.json",
    "commits/000000099.json", "commits/batches/00000001.json", "copies/00000001/files/{}.z",
    "copies/files/{}.z", "epochs/files/00000099.json", "epochs/x", "log/files/00000001.json",
    "log/x.json", "log/00000001.x.json", "evaluations/log/x.json",
    "usage/x.json", "usage/files/00000001.json",
    "batches/x/{}", "batches/files/00000001/{}", "previews/x/1.2.3", "previews/00000001/x",
    "evaluations/a/b/records/00000001.json", "evaluations/a/records/x.json", "chain/files/0",
    "evaluations/00000001.json", "timeline/00000001.json", "files/a/b.json", "weights/a/b",
)  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
async def test_an_object_at_a_place_or_of_a_name_that_is_nobodys_changes_nothing_that_is_read(
    store: ObjectStore, name: str
) -> None:
    async def read() -> list[object]:
        log = Log.of_run(store, RUN)
        await log.look()
        gold = await GoldFigures(store, RUN, {}).worths()
        numbers = [await numbers_in(store, RUN, folder) for folder in ("batches", "previews")]
        versions = await measured_versions(store, RUN)
        newest = await newest_epoch(store, RUN), len(log.numbered)
        chain = [each.version for each in (await read_chain(store, RUN)).recent]
        return [
            log.numbered, gold, numbers, versions, newest, chain, await commit_chain(store, RUN),
            await newest_commit(store, RUN),
            await read_records(store, RUN, "libraries.", LibrariesRecord),
        ]  # fmt: skip

    before, counted = await read(), CORRUPT.labels(what="foreign")._value.get()
    key = f"{RUN}/{name.format('0' * 64)}"
    await store.write(key, b"{}")
    assert await read() == before
    if not name.startswith(
        ("weights", "timeline", "usage", "copies", "log")
    ):  # their names decide nothing
        assert CORRUPT.labels(what="foreign")._value.get() == counted + 1, "an alarm"
    assert [(each.key, each.remedy) for each in await find_damage(store, RUN)] == [(key, "move")]
    assert await repair_all(store) == ["move"]
    assert await find_damage(store, RUN) == []


def forged(version: int, parent: str | None) -> bytes:
    ref = ObjectRef(key=f"{RUN}/evaluations/x", sha256="e" * 64, size=1)
    return record(version, parent).model_copy(update={"weights": ref}).encode()


@pytest.mark.parametrize("version", range(COUNT))
@pytest.mark.parametrize("has_copy", [True, False])
async def test_a_copy_that_somebody_else_has_made_takes_the_place_of_no_record(
    store: ObjectStore, version: int, has_copy: bool
) -> None:
    before = await commit_chain(store, RUN)
    if not has_copy:
        await store.delete_folder(f"{RUN}/copies/{version:08d}")
    for parent in (before[version].parent, "d" * 64):
        data = forged(version, parent)
        key = copy_key(RUN, f"{version:08d}", record_digest(data))
        await store.write(key, zlib.compress(data))
    assert await commit_chain(store, RUN) == before
    assert await newest_commit(store, RUN) == before[-1]
    assert (await read_chain(store, RUN)).newest == before[-1]
    assert await find_damage(store, RUN) == []
    if has_copy and version < COUNT - 1:  # then the next record says which copy it is
        await flip(store, commit_key(RUN, version), 0)
        assert await commit_chain(store, RUN) == before
        await store.delete([commit_key(RUN, version)])
        assert await repair_all(store) == ["put back"]
        assert await commit_chain(store, RUN) == before


async def test_of_a_damaged_newest_record_no_copy_counts_that_names_another_parent(
    store: ObjectStore,
) -> None:
    await store.delete_folder(f"{RUN}/copies/{COUNT - 1:08d}")
    data = forged(COUNT - 1, "d" * 64)
    key = copy_key(RUN, f"{COUNT - 1:08d}", record_digest(data))
    await store.write(key, zlib.compress(data))
    await flip(store, commit_key(RUN, COUNT - 1), 0)
    with pytest.raises(ContractError, match="digenrl repair"):
        await newest_commit(store, RUN)


def test_the_command_says_what_it_would_do_and_does_it_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "objects"
    path = root / weights_folder("digits") / f"{'0' * 64}.w"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"other")
    monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{root}")
    first = CliRunner().invoke(app, ["repair", "digits"])
    assert (first.exit_code, path.exists()) == (1, True)
    assert "its bytes do not match the digest" in first.output
    again = CliRunner().invoke(app, ["repair", "digits", "--apply"])
    assert (again.exit_code, path.exists()) == (0, False)
    assert CliRunner().invoke(app, ["repair", "digits"]).exit_code == 0
