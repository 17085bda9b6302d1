"""A copy of a run: of one version, whatever the run does meanwhile and whenever the copy is
killed."""

from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from shared.errors import IntegrityError, UserError
from shared.run.commits import commit, commit_chain, newest_commit, read_commit
from shared.run.garbage import find_garbage
from shared.run.layout import commit_key, previews_folder, usage_key, weights_folder
from shared.run.repair import find_damage
from shared.run.retention import Manifests, named_by, own_keys
from shared.run.run_copy import RunCopy
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore
from shared.store.backend import Content
from tests import examples
from tests.shared.run.test_garbage import RUN, InMemory, Killed, Trainer, begin


@dataclass
class Mortal(InMemory):
    """A store during whose n-th write the writing process is killed."""

    lives: int = -1
    num_writes: int = 0

    async def write(self, key: str, data: Content) -> None:
        if self.lives == 0:
            raise Killed
        self.lives -= 1
        self.num_writes += 1
        await super().write(key, data)


@dataclass
class Live(InMemory):
    """The store of a run that trains while it is read, and deletes old versions."""

    steps_left: int = 0
    trainer: Trainer | None = None
    look: object = None
    _busy: bool = field(default=False)

    async def read(self, key: str) -> bytes | None:
        if self.steps_left and self.trainer is not None and not self._busy:
            self._busy, self.steps_left = True, self.steps_left - 1
            await self.trainer.step()
            await self.look()  # type: ignore[operator]
            self._busy = False
        return await super().read(key)


async def trained(backend: InMemory, steps: int) -> tuple[ObjectStore, Trainer]:
    store = ObjectStore(backend)
    _, trainer, cleanup = await begin(store)
    for number in range(steps):
        await trainer.step()
        await store.write(usage_key(RUN, number), b"{}")
        await store.write(f"{previews_folder(RUN, number)}/0.0.0", b"preview %d" % number)
    await cleanup.look()
    if isinstance(backend, Live):
        backend.trainer, backend.look = trainer, cleanup.look
    return store, trainer


def objects(store: ObjectStore) -> dict[str, bytes]:
    held: InMemory = store.backend  # type: ignore[assignment]
    return {key: data for key, (data, _) in held.objects.items()}


async def holds(store: ObjectStore) -> bool:
    try:
        await needed_recipe(store, RUN)
    except UserError:
        return False
    return True


OPEN_BATCH = {usage_key(RUN, 5), f"{previews_folder(RUN, 5)}/0.0.0"}


async def test_a_copy_that_is_killed_at_any_write_is_no_run_and_continues_to_the_whole_run() -> (
    None
):
    source, _ = await trained(InMemory(), 6)
    whole = {key: data for key, data in objects(source).items() if key not in OPEN_BATCH}
    complete = Mortal()
    assert await RunCopy(source, ObjectStore(complete), RUN).copy() == 5
    assert objects(ObjectStore(complete)) == whole
    for lives in range(complete.num_writes):
        backend = Mortal(lives=lives)
        target = ObjectStore(backend)
        with pytest.raises(Killed):
            await RunCopy(source, target, RUN).copy()
        assert not await holds(target)
        backend.lives = -1
        assert await RunCopy(source, target, RUN).copy() == 5
        assert objects(target) == whole
        assert backend.num_writes <= complete.num_writes + 3, "the digests of files, once more"
    assert await find_damage(ObjectStore(complete), RUN) == []
    assert await find_garbage(ObjectStore(complete), RUN, now=1e12) == []


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
async def test_a_run_that_trains_meanwhile_is_copied_as_of_one_version(steps: int) -> None:
    live, target = Live(), ObjectStore(InMemory())
    source, trainer = await trained(live, 6)
    live.steps_left = steps
    version = await RunCopy(source, target, RUN).copy()
    assert 5 <= version < 6 + steps and live.steps_left == 0
    chain = await commit_chain(target, RUN)
    assert chain == trainer.chain[: version + 1]
    assert await newest_commit(target, RUN) == chain[-1]
    kept = named_by(chain[-1:], await Manifests(target).shards(chain[-1:], own_keys(chain[-1]), []))
    assert len(kept) == 8 and kept <= objects(target).keys()
    assert await find_damage(target, RUN) == []
    live.steps_left = 2
    assert await RunCopy(source, target, RUN).copy() > version
    assert await commit_chain(target, RUN) == trainer.chain[: len(await commit_chain(target, RUN))]


async def test_a_run_that_deletes_faster_than_it_is_copied_says_what_helps() -> None:
    live, target = Live(), ObjectStore(InMemory())
    source, _ = await trained(live, 6)
    live.steps_left = 100
    with pytest.raises(UserError, match=r"RUN: digits deletes versions .* \(run\.keep_last\)"):
        await RunCopy(source, target, RUN).copy()
    assert not await holds(target)


async def test_a_later_copy_sends_only_what_is_new() -> None:
    source, trainer = await trained(InMemory(), 6)
    backend = Mortal()
    target = ObjectStore(backend)
    await RunCopy(source, target, RUN).copy()
    backend.num_writes = 0
    await trainer.step()
    assert await RunCopy(source, target, RUN).copy() == 6
    new = ("two manifests, two new shards of each", "preview and usage of batch 5", "the record",
           "recipe and three digests of files")  # fmt: skip
    assert backend.num_writes == 6 + 2 + 1 + 4, new


async def test_a_later_copy_that_is_killed_at_any_write_can_be_restored() -> None:
    live, backup, versions = Live(), Mortal(), list[int]()
    source, trainer = await trained(live, 4)
    await RunCopy(source, ObjectStore(backup), RUN).copy()
    for _ in range(4):
        await trainer.step()
    await live.look()  # type: ignore[operator]
    while versions[-1:] != [7]:
        killed = Mortal(dict(backup.objects), lives=len(versions))
        with suppress(Killed):
            await RunCopy(source, ObjectStore(killed), RUN).copy()
        killed.lives, restored = -1, ObjectStore(InMemory())
        versions.append(await RunCopy(ObjectStore(killed), restored, RUN).copy())
        assert await commit_chain(restored, RUN) == trainer.chain[: versions[-1] + 1]
        assert await find_damage(restored, RUN) == []
    assert len(versions) > 10 and {*versions} == {3, 6, 7}


async def test_another_run_of_the_name_or_one_that_has_gone_on_is_refused() -> None:
    source, _ = await trained(InMemory(), 6)
    other, _ = await trained(InMemory(), 2)
    begun, _ = await trained(InMemory(), 0)
    gone_on = ObjectStore(InMemory())
    await RunCopy(source, gone_on, RUN).copy()
    await Trainer(gone_on, await commit_chain(gone_on, RUN)).step()
    await other.delete([commit_key(RUN, 1)])
    await commit(other, examples.record(1, await newest_commit(other, RUN), run=RUN))
    for target in (other, begun, gone_on):
        before = objects(target)
        with pytest.raises(UserError, match="STORE: it holds another run 'digits', or that run"):
            await RunCopy(source, target, RUN).copy()
        assert objects(target) == before
    with pytest.raises(UserError, match="the store holds no run"):
        await RunCopy(ObjectStore(InMemory()), source, RUN).copy()
    with pytest.raises(UserError, match="RUN: digits has no version yet"):
        await RunCopy(begun, ObjectStore(InMemory()), RUN).copy()


async def test_an_object_that_is_damaged_in_the_copy_is_sent_again() -> None:
    source, _ = await trained(InMemory(), 3)
    target = ObjectStore(InMemory())
    await RunCopy(source, target, RUN).copy()
    whole = objects(target)
    for key in await target.keys(weights_folder(RUN)):
        await target.write(key, b"!" * len(whole[key]))
    copying = RunCopy(source, target, RUN)
    version = await copying.copy()
    record = await read_commit(target, RUN, version)
    assert record is not None and copying.done_bytes == copying.num_bytes
    assert all(objects(target)[ref.key] == whole[ref.key] for ref in record.objects)


async def test_a_damaged_object_is_not_copied() -> None:
    source, _ = await trained(InMemory(), 6)
    [key, *_] = await source.keys(weights_folder(RUN))
    await source.write(key, b"!" * len(await source.read(key) or b""))
    target = ObjectStore(InMemory())
    with pytest.raises(IntegrityError, match="does not match its reference"):
        await RunCopy(source, target, RUN).copy()
    assert not await holds(target)
