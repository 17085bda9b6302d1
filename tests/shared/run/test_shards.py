"""Shards and their manifest: what is stored comes back, and what is not a version is refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared import limits
from shared.errors import ContractError, IntegrityError
from shared.messages.contracts import ObjectRef
from shared.run import manifest as manifests
from shared.run.manifest import MANIFEST, Manifest, TensorBox, TensorBoxes, cut, read_manifest
from shared.run.shards import open_tensors, store_manifest, store_version_parts
from shared.store import ObjectStore
from tests import examples

RUN = "run"
FOLDER = f"{RUN}/weights"
DIGEST = examples.digest(7)


@dataclass
class Rows:
    """Some rows of a tensor of four, as a part of a version."""

    first: int
    last: int
    data: bytes = b"0123456789abcdef"
    pieces: TensorBoxes = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.last - self.first, 1)
        piece = TensorBox(dtype="F32", whole=(4, 1), offset=(self.first, 0), shape=shape)
        self.pieces = {"weight": piece}

    def pack(self) -> bytes:
        return self.data


async def stored(store: ObjectStore, *parts: Rows) -> ObjectRef:
    made = await store_version_parts(store, RUN, parts, [])
    return await store_manifest(store, FOLDER, made.weights, DIGEST)


async def content(store: ObjectStore, ref: ObjectRef) -> list[bytes]:
    opened = await open_tensors(store, ref, DIGEST)
    return [part.data[:] async for part in opened.parts()]


async def test_one_shard_needs_no_manifest_and_several_come_back_in_order(
    folder_store: ObjectStore,
) -> None:
    one = await stored(folder_store, Rows(0, 4))
    assert one.key == f"{FOLDER}/{one.sha256}.safetensors"
    assert await content(folder_store, one) == [Rows(0, 4).data]
    three = await stored(folder_store, Rows(0, 1, b"a" * 9), Rows(1, 2, b"b" * 9), Rows(2, 4))
    assert three.key == f"{FOLDER}/{three.sha256}{MANIFEST}"
    assert await content(folder_store, three) == [b"a" * 9, b"b" * 9, Rows(2, 4).data]


async def test_equal_shards_of_two_ranks_are_one_object_and_both_parts(
    folder_store: ObjectStore,
) -> None:
    ref = await stored(folder_store, Rows(0, 2), Rows(2, 4))
    assert await content(folder_store, ref) == [Rows(0, 4).data] * 2
    assert len(await folder_store.keys(FOLDER)) == 2


async def test_only_what_is_wanted_is_fetched(
    folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await stored(folder_store, Rows(0, 1, b"first" * 4), Rows(1, 4, b"second" * 4))
    opened = await open_tensors(folder_store, ref, DIGEST)
    found = [part.data async for part in opened.parts(lambda _, piece: piece.offset[0] == 1)]
    assert found == [b"second" * 4]


async def test_parts_that_are_no_whole_tensor_are_no_version(folder_store: ObjectStore) -> None:
    with pytest.raises(ContractError, match="weight is not whole"):
        await stored(folder_store, Rows(0, 1), Rows(2, 4))
    with pytest.raises(ContractError, match="overlap"):
        await stored(folder_store, Rows(0, 2), Rows(1, 3))


async def test_a_manifest_or_shard_that_is_missing_or_changed_is_refused(
    folder_store: ObjectStore,
) -> None:
    ref = await stored(folder_store, Rows(0, 1, b"a" * 9), Rows(1, 4, b"b" * 99))
    shards = [key for key in await folder_store.keys(FOLDER) if key != ref.key]
    whole = await folder_store.read(ref.key) or b""
    with pytest.raises(IntegrityError, match="belongs to weights"):
        await open_tensors(folder_store, ref, examples.digest(8))
    await folder_store.write(ref.key, whole[:-1])
    with pytest.raises(IntegrityError):
        await content(folder_store, ref)
    await folder_store.write(ref.key, whole)
    await folder_store.write(shards[0], b"other")
    with pytest.raises(IntegrityError):
        await content(folder_store, ref)
    await folder_store.delete([ref.key])
    with pytest.raises(IntegrityError, match="not in the store"):
        await content(folder_store, ref)


Poison = Callable[[dict[str, Any]], None]


def _first(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["shards"][0]
    return found


def _piece(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _first(manifest)["pieces"]["weight"]
    return found


def _elsewhere(manifest: dict[str, Any], key: str) -> None:
    _first(manifest)["object"]["key"] = key


POISON: dict[str, Poison] = {
    "another run's folder": lambda m: _elsewhere(m, f"other/weights/{'0' * 64}.safetensors"),
    "a key that climbs": lambda m: _elsewhere(m, f"{FOLDER}/../../etc/passwd"),
    "a record of this run": lambda m: _elsewhere(m, f"{RUN}/commits/00000000.json"),
    "another digest than its key's": lambda m: _first(m)["object"].update(sha256="0" * 64),
    "no digest": lambda m: _first(m)["object"].update(sha256="abc"),
    "a shard too few": lambda m: m["shards"].pop(),
    "the same shard twice": lambda m: m["shards"].append(_first(m)),
    "no shards": lambda m: m.update(shards=[]),
    "a piece outside its tensor": lambda m: _piece(m).update(offset=[9, 0]),
    "a piece of other dimensions": lambda m: _piece(m).update(offset=[0]),
    "a negative offset": lambda m: _piece(m).update(offset=[-1, 0]),
    "more than the object holds": lambda m: _piece(m).update(
        whole=[1 << 40, 1], shape=[1 << 40, 1]
    ),
    "an unknown type": lambda m: _piece(m).update(dtype="F8"),
    "an unknown field": lambda m: m.update(pickle="..."),
    "another format": lambda m: m.update(format=2),
    "a name without end": lambda m: _first(m)["pieces"].update({"x" * 9999: _piece(m)}),
    "a size that is no number": lambda m: _first(m)["object"].update(size="big"),
}


@pytest.mark.parametrize("poison", list(POISON))
async def test_a_poisoned_manifest_is_refused_whatever_its_digest(
    folder_store: ObjectStore, poison: str
) -> None:
    ref = await stored(folder_store, Rows(0, 1, b"a" * 9), Rows(1, 4, b"b" * 99))
    manifest = json.loads(await folder_store.read(ref.key) or b"")
    read_manifest(json.dumps(manifest).encode(), ref.key)
    POISON[poison](manifest)
    bad = await folder_store.put(FOLDER, json.dumps(manifest).encode(), suffix=MANIFEST)
    with pytest.raises(ContractError):
        await open_tensors(folder_store, bad, DIGEST)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\x00", b'{"shards": 1}'])
def test_what_is_no_manifest_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError, match="not a manifest"):
        read_manifest(data, f"{FOLDER}/x{MANIFEST}")


def test_too_many_shards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ref = {"key": f"{FOLDER}/{'0' * 64}.safetensors", "sha256": "0" * 64, "size": 1}
    shards = [{"object": ref, "pieces": {}}] * (limits.MAX_SHARDS + 1)
    data = json.dumps({"weights_digest": DIGEST, "shards": shards}).encode()
    with pytest.raises(ContractError):
        read_manifest(data, f"{FOLDER}/x{MANIFEST}")
    monkeypatch.setattr(limits, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(ContractError, match="too large"):
        read_manifest(data, f"{FOLDER}/x{MANIFEST}")


def test_boxes_along_several_dimensions_make_up_a_tensor() -> None:
    def box(*offset: int) -> TensorBox:
        return TensorBox(dtype="F32", whole=(4, 4), offset=offset, shape=(2, 2))

    four = [{"a": box(0, 0)}, {"a": box(0, 2)}, {"a": box(2, 0)}, {"a": box(2, 2)}]
    manifests.check_complete(four)
    with pytest.raises(ValueError, match="overlap"):
        manifests.check_complete([*four[:3], four[0]])
    with pytest.raises(ValueError, match="not whole"):
        manifests.check_complete(four[:3])


def test_shards_have_no_more_tensors_than_an_object_may_hold() -> None:
    names = {f"{number:04d}": 1 for number in range(7)}
    assert [len(list(each)) for each in cut(names, 100, max_tensors=3)] == [3, 3, 1]


def test_the_format_of_a_manifest_does_not_change() -> None:
    text = (
        f'{{"format":1,"weights_digest":"{DIGEST}","shards":[{{"object":'
        f'{{"key":"run/weights/{DIGEST}.safetensors","sha256":"{DIGEST}","size":16}},'
        '"pieces":{"weight":{"dtype":"F32","whole":[4,1],"offset":[0,0],"shape":[4,1]}}}]}'
    )
    assert Manifest.model_validate_json(text).encode().decode() == text
