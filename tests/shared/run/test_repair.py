"""Damaged bytes in a run's store: they are found wherever they are, and mended where that is
possible."""

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.cli import app
from shared.errors import ContractError
from shared.messages.contracts import ObjectRef
from shared.run.chain import read_chain
from shared.run.commits import commit, commit_chain, newest_commit, record_digest
from shared.run.copies import keep_copy
from shared.run.layout import commit_key, weights_folder
from shared.run.repair import find_damage, mend
from shared.store import ObjectStore
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


async def mend_all(store: ObjectStore) -> list[str]:
    found = await find_damage(store, RUN)
    for each in found:
        await mend(store, RUN, each)
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
        assert await mend_all(store) == ["put back"]
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
    assert await mend_all(store) == ["none", "none"], "version 3 may be the one, or 2"


async def test_a_damaged_newest_record_without_a_copy_takes_the_run_back_by_one(
    store: ObjectStore,
) -> None:
    await store.delete_folder(f"{RUN}/copies/{COUNT - 1:08d}")
    await flip(store, commit_key(RUN, COUNT - 1), 0)
    assert await mend_all(store) == ["move"]
    newest = await newest_commit(store, RUN)
    assert newest is not None and newest.policy.version == COUNT - 2


async def test_a_damaged_object_of_any_kind_is_found_and_moved_away(store: ObjectStore) -> None:
    refs = dict[str, ObjectRef]()
    for folder in ("weights", "checkpoints", "conditions", "batches/00000001"):
        refs[folder] = await store.put(f"{RUN}/{folder}", folder.encode(), suffix=".x")
    for key in ("chain/32/00000000.json", "recipe.json", "usage/00000001.json"):
        await store.write(f"{RUN}/{key}", b"{}")
    assert await find_damage(store, RUN) == []
    for ref in refs.values():
        await flip(store, ref.key, 1)
    await flip(store, f"{RUN}/chain/32/00000000.json", 0)
    await flip(store, f"{RUN}/recipe.json", 1)
    assert await mend_all(store) == ["move"] * 6
    assert await find_damage(store, RUN) == []
    assert len(await store.keys(f"{RUN}/quarantine")) == 6


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
    assert "its bytes are not what its name says" in first.output
    again = CliRunner().invoke(app, ["repair", "digits", "--apply"])
    assert (again.exit_code, path.exists()) == (0, False)
    assert CliRunner().invoke(app, ["repair", "digits"]).exit_code == 0
