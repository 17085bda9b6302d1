"""What `digenrl gc` deletes, and what it must not."""

import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.scheduler.shell.housekeeping import VersionCleanup
from shared.errors import IntegrityError, UserError
from shared.messages.contracts import ObjectRef
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import CommitRecord, commit
from shared.run.garbage import delete_garbage, find_garbage
from shared.run.layout import (
    batch_folder,
    checkpoints_folder,
    commits_folder,
    evaluations_folder,
    weights_folder,
)
from shared.run.manifest import TensorBoxes
from shared.run.retention import Manifests, named_by, retention_from, version_folders
from shared.run.shards import store_manifest, store_version_parts
from shared.store import ObjectStore
from shared.store.backend import Content, StoredObject
from tests import examples
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe

RUN = "digits"
KEPT = {"run.keep_last": 2, "run.keep_every": 100, "run.steps": 300}
HOUR = 3600.0


@dataclass
class InMemory:
    """A store of thousands of small objects, which no disk has to flush."""

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    async def write(self, key: str, data: Content) -> None:
        self.objects[key] = bytes(data), time.time()

    async def write_unnamed(self, folder: str, data: Content, ref: Awaitable[ObjectRef]) -> None:
        await self.write((await ref).key, data)

    async def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        await self.write(key, data)
        return True

    async def read(self, key: str) -> bytes | None:
        return self.objects[key][0] if key in self.objects else None

    async def stream(self, key: str, first: int) -> AsyncGenerator[bytes]:
        yield self.objects[key][0][first:]

    async def size(self, key: str) -> int | None:
        return len(self.objects[key][0]) if key in self.objects else None

    async def keys(self, prefix: str) -> list[str]:
        return [key for key in self.objects if key.startswith(prefix)]

    async def entries(self, prefix: str) -> list[StoredObject]:
        keys = await self.keys(prefix)
        return [StoredObject(k, len(self.objects[k][0]), self.objects[k][1]) for k in keys]

    async def folders(self) -> list[str]:
        return [*{key.partition("/")[0] for key in self.objects}]

    async def unfinished(self, prefix: str) -> list[StoredObject]:
        return []

    async def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)


class Killed(Exception):
    """Stands for a SIGKILL."""


@dataclass(frozen=True)
class Shard:
    data: bytes
    pieces: TensorBoxes = field(default_factory=dict)

    def pack(self) -> bytes:
        return self.data


@dataclass
class Trainer:
    """Stores versions of three shards each, of two ranks; one shard changes every tenth step."""

    store: ObjectStore
    chain: list[CommitRecord] = field(default_factory=list)
    writes_left: int | None = None
    """Number of writes after which it is killed."""

    async def step(self) -> None:
        number = len(self.chain)
        ranks = [
            [Shard(f"{number}".encode()), Shard(f"slow {number // 10}".encode())],
            [Shard(f"{number} of rank 1".encode())],
        ]
        folders = weights_folder(RUN), checkpoints_folder(RUN)
        shards: tuple[list, list] = ([], [])  # type: ignore[type-arg]
        for parts in ranks:
            self._write()
            made = await store_version_parts(self.store, RUN, parts, parts)
            shards[0].extend(made.weights)
            shards[1].extend(made.checkpoint)
        refs: list[ObjectRef] = []
        for folder, each in zip(folders, shards, strict=True):
            self._write()
            refs.append(await store_manifest(self.store, folder, each, examples.digest(number)))
        self._write()
        before = self.chain[-1] if self.chain else None
        record = examples.record(number, before, run=RUN, weights=refs[0], checkpoint=refs[1])
        await commit(self.store, record)
        self.chain.append(record)

    def _write(self) -> None:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                self.writes_left = None
                raise Killed


async def begin(store: ObjectStore, **changes: object) -> tuple[Recipe, Trainer, VersionCleanup]:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    recipe = override(load_recipe(DIGITS), {**KEPT, "evaluation.every": None, **named})
    await store_recipe(store, recipe)
    trainer = Trainer(store)
    cleanup = VersionCleanup(store, RUN, retention_from(recipe), lambda: trainer.chain, lambda: ())
    return recipe, trainer, cleanup


async def there(store: ObjectStore) -> set[str]:
    return {key for folder in version_folders(RUN) for key in await store.keys(folder)}


async def of_versions(
    store: ObjectStore, chain: Sequence[CommitRecord], kept: set[int]
) -> set[str]:
    records = [record for record in chain if record.policy.version in kept]
    return named_by(records, await Manifests(store).shards(records, await there(store), kept))


async def collect(store: ObjectStore, now: float, min_age: float = 0.0) -> dict[str, int]:
    found = await find_garbage(store, RUN, now=now, min_age=min_age)
    return {each.kind: await delete_garbage(store, each) for each in found}


async def test_after_300_steps_and_kills_at_any_point_only_kept_versions_are_left() -> None:
    store = ObjectStore(InMemory())
    _, trainer, cleanup = await begin(store)
    chance, kills = random.Random(0), 0
    while len(trainer.chain) < 300:
        if chance.random() < 0.1:
            trainer.writes_left = chance.randrange(5)
        try:
            await trainer.step()
        except Killed:  # its batch is trained again, to other weights or to the same ones
            kills += 1
            if chance.random() < 0.5:
                await store.put(weights_folder(RUN), b"%d" % kills, suffix=".safetensors")
        if len(trainer.chain) % 7 == 0:
            await cleanup.look()
    await cleanup.look()
    assert kills > 20
    kept = {0, 100, 200, 298, 299}
    wanted = await of_versions(store, trainer.chain, kept)
    assert len(wanted) == 2 * (4 * len(kept) - 1), "of 298 and 299 one shard is the same"
    orphans = await there(store) - wanted
    assert wanted <= await there(store) and 0 < len(orphans) <= 6 * kills
    assert sum((await collect(store, time.time() + 1)).values()) == len(orphans)
    assert await there(store) == wanted
    assert len(await store.keys(commits_folder(RUN))) == 300


async def test_what_is_young_stays_and_what_a_trainer_is_storing(folder_store: ObjectStore) -> None:
    _, trainer, _ = await begin(folder_store)
    for _ in range(5):
        await trainer.step()
    trainer.writes_left = 4  # only the commit record is missing
    with pytest.raises(Killed):
        await trainer.step()
    before = await there(folder_store)
    assert await collect(folder_store, time.time(), min_age=HOUR) == {}
    found = await find_garbage(folder_store, RUN, now=time.time() + 2 * HOUR, min_age=HOUR)
    kinds = {each.kind: len(each.found) for each in found}
    assert kinds["weights and checkpoints that no commit names"] == 6
    assert kinds["weights and checkpoints of versions that are not kept"] == 2 * 2
    trainer.writes_left = None
    await trainer.step()  # it has stored the same again, and committed it
    for each in found:
        await delete_garbage(folder_store, each)
    assert await of_versions(folder_store, trainer.chain, {0, 4, 5}) <= await there(folder_store)
    assert before > await there(folder_store)


async def test_shards_are_deleted_before_what_names_them(folder_store: ObjectStore) -> None:
    _, trainer, _ = await begin(folder_store)
    for _ in range(5):
        await trainer.step()
    first, second = (await find_garbage(folder_store, RUN, now=time.time() + 1, min_age=0))[:2]
    assert await delete_garbage(folder_store, first) == 2 * 4
    left = await find_garbage(folder_store, RUN, now=time.time() + 1, min_age=0)
    assert [each.kind for each in left] == [second.kind]


async def test_without_the_manifest_of_a_kept_version_nothing_is_deleted(
    folder_store: ObjectStore,
) -> None:
    _, trainer, cleanup = await begin(folder_store)
    for _ in range(5):
        await trainer.step()
    before = await there(folder_store)
    await folder_store.write(trainer.chain[4].weights.key, b"{}")
    for look in (cleanup.look(), collect(folder_store, time.time() + 1)):
        with pytest.raises(IntegrityError, match="nothing is deleted"):
            await look
    assert await there(folder_store) == before


async def test_versions_that_the_evaluation_found_best_stay(folder_store: ObjectStore) -> None:
    changes = {"evaluation.every": 5, "run.keep_best": 2, "run.keep_every": None}
    _, trainer, cleanup = await begin(folder_store, **changes)
    folder = f"{evaluations_folder(RUN)}/0123456789abcdef/records"
    accuracy = {0: 0.2, 5: 0.9, 10: 0.5, 15: 0.8, 20: 0.1}
    for number in range(24):
        await trainer.step()
        if number in accuracy:
            quality = {"reward": 1.0, "gold_accuracy": accuracy[number]}
            record = json.dumps({"quality": quality, "samples": []}).encode()
            await folder_store.write(f"{folder}/{number:08d}.json", record)
        await cleanup.look()
    wanted = await of_versions(folder_store, trainer.chain, {0, 5, 15, 22, 23})
    assert await there(folder_store) == wanted


async def test_old_batches_pictures_and_interrupted_writes_are_found(
    folder_store: ObjectStore, tmp_path: Path
) -> None:
    _, trainer, _ = await begin(folder_store)
    for _ in range(6):
        await trainer.step()
    for batch in range(7):
        await folder_store.put(batch_folder(RUN, batch), b"trajectory", suffix=".safetensors")
    evaluated = f"{evaluations_folder(RUN)}/0123456789abcdef"
    kept = await folder_store.put(f"{evaluated}/media", b"kept", suffix=".png")
    await folder_store.put(f"{evaluated}/media", b"left", suffix=".png")
    named = {"samples": [{"media": kept.model_dump(), "still": kept.model_dump()}]}
    await folder_store.write(f"{evaluated}/records/00000000.json", json.dumps(named).encode())
    await folder_store.write(f"{RUN}/conditions/prompt", b"")
    (tmp_path / "objects" / weights_folder(RUN) / ".tmp-1").write_bytes(b"half a shard")
    found = await collect(folder_store, time.time() + 1)
    assert found["of older batches"] == 3, "those of the newest commits, and the open one, stay"
    assert found["pictures that no evaluation names"] == 1
    assert found["interrupted writes"] == 1
    assert await folder_store.get(kept) == b"kept"
    assert await folder_store.keys(f"{RUN}/conditions")
    assert await collect(folder_store, time.time() + 1) == {}


async def test_a_run_that_is_not_there_is_named(folder_store: ObjectStore) -> None:
    with pytest.raises(UserError, match="no run 'digits'"):
        await find_garbage(folder_store, RUN, now=0.0)
