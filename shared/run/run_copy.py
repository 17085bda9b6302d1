"""Copies a run to another store, also while the run is in progress.

The copy is the run as of one version. The objects of that version are copied first, because the
run may delete them some versions later; then all other objects; then the commit records, oldest
first; then the recipe, without which a store does not hold the run. A copy that is interrupted at
any moment continues, and a later copy sends what is new: an object is sent unless the target has
one of the same name and size, and a name is a digest of the content or is used once.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.errors import IntegrityError, Unavailable, UserError
from shared.limits import MAX_CONCURRENT_COPIES, MAX_COPY_ATTEMPTS, STORE_CHECK_TIMEOUT_S
from shared.messages.contracts import ObjectRef
from shared.run.commits import CommitRecord, broken_chain, decoded, read_commit
from shared.run.layout import NAMES, commit_key, numbers_in, parse_name, recipe_key, staleness_key
from shared.run.manifest import is_manifest, read_manifest
from shared.run.record_backups import read_kept, record_digest, write_kept
from shared.run.repair import CONTENT_KEY
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore

Sizes = Mapping[str, int]
"""Bytes of objects by their keys."""
BY_BATCH = ("batches", "usage", "timeline", "previews")
"""Folders whose objects are numbered by batches; batch v makes version v + 1."""
EXCLUDED_FOLDERS = ("commits", "chain")
"""Commit records are copied last, and summaries of the chain are made again."""


@dataclass(slots=True)
class RunCopy:
    source: ObjectStore
    target: ObjectStore
    run: str
    num_bytes: int = 0
    """Bytes of the copy, as far as they are known."""
    done_bytes: int = 0
    """Bytes that the target has."""
    sent_bytes: int = 0
    _present: dict[str, int] = field(default_factory=dict)
    """Sizes of the objects that the target had before, by their keys."""
    _slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_COPIES)
    )

    async def copy(self) -> int:
        """Copy the run, and return the version of the copy.

        Raises:
            UserError: if the source does not hold the run, or the target holds another one.
            IntegrityError: if an object of the source, or of the copied version, is damaged.
            ContractError: if a commit record of the source is damaged.
            Unavailable: if a store does not answer.
        """
        await self._check_stores()
        await needed_recipe(self.source, self.run)
        self._present = {each.key: each.size for each in await self.target.entries(self.run)}
        first, parent = await self._compare()
        newest, version, others = await self._copy_newest()
        await self._copy_all({key: others[key] for key in others.keys() - version.keys()})
        await self._copy_records(first, parent, newest)
        recipe = await read_kept(self.source, self.run, "recipe")
        await write_kept(self.target, self.run, "recipe", recipe or b"")
        for key, size in version.items():
            try:
                await _read(self.target, key, size)
            except IntegrityError:  # it has been damaged there
                del self._present[key]
                self.done_bytes -= size
                await self._copy(key, size)
                await _read(self.target, key, size)
        return newest

    async def _check_stores(self) -> None:
        for name, store in (("RUN", self.source), ("STORE", self.target)):
            try:
                async with asyncio.timeout(STORE_CHECK_TIMEOUT_S):
                    await store.read(recipe_key(self.run))
            except TimeoutError as error:
                raise Unavailable(f"{name}: its store does not answer") from error

    async def _copy_newest(self) -> tuple[int, Sizes, Sizes]:
        """Copy the objects of the newest version; return its number, these objects, and all that
        belong to the run as of this version.

        A source without new versions may be a copy that was interrupted: its newest version that
        has its objects is copied.
        """
        before: list[int] = []
        for _ in range(MAX_COPY_ATTEMPTS):
            # Before the newest version is read: no object in the list belongs to a later one.
            entries = await self.source.entries(self.run)
            numbers = await numbers_in(self.source, self.run, "commits")
            if not numbers:
                raise UserError(f"RUN: {self.run} has no version yet; copy it after its first one")
            is_unchanged, before = numbers == before, numbers
            for number in reversed(numbers if is_unchanged else numbers[-1:]):
                record = await read_commit(self.source, self.run, number)
                version = {} if record is None else await self._copy_version(record)
                if version:
                    others = [each for each in entries if self._belongs(each.key, number)]
                    return number, version, {each.key: each.size for each in others}
        raise UserError(
            f"RUN: {self.run} deletes versions before they are copied; `digenrl pause` it, or "
            "keep more versions (run.keep_last)"
        )

    async def _compare(self) -> tuple[int, str | None]:
        """Return the number of versions that the target has, and the digest of the newest record.

        Raises:
            UserError: if the target has a run with other commit records than the source.
        """
        count = 1 + max(await numbers_in(self.target, self.run, "commits"), default=-1)
        newest = commit_key(self.run, max(0, count - 1))
        ours, theirs = await self.source.read(newest) or b"", await self.target.read(newest) or b""
        is_other = record_digest(ours) != record_digest(theirs) if count else (
            recipe_key(self.run) in self._present
        )  # fmt: skip
        if is_other:
            raise UserError(
                f"STORE: it holds another run {self.run!r}, or that run has gone on there; name "
                "another store, folder or prefix"
            )
        return count, record_digest(theirs) if count else None

    async def _copy_version(self, record: CommitRecord) -> Sizes:
        """Copy the objects of a version, and return their sizes by their keys; none if the run has
        deleted an object meanwhile."""
        refs = list(record.objects)
        for ref in filter(is_manifest, record.objects):
            data = await _read(self.source, ref.key, ref.size)
            if data is None:
                return {}
            refs += [each.object for each in read_manifest(data, ref.key).shards]
        sizes = {ref.key: ref.size for ref in refs if ref.key.startswith(f"{self.run}/")}
        return sizes if await self._copy_all(sizes) else {}

    def _belongs(self, key: str, version: int) -> bool:
        """Whether an object belongs to the run as of a version."""
        folder = key.split("/")[1]
        name = parse_name(self.run, folder, key) if folder in NAMES else None
        if name is None or folder in EXCLUDED_FOLDERS or "/exchange/" in key:
            return key == staleness_key(self.run)
        number = int(name.groupdict().get("number") or 0)
        return folder not in BY_BATCH or number < version

    async def _copy_all(self, sizes: Sizes) -> bool:
        """Copy objects, and return whether the source had all of them."""
        self.num_bytes += sum(sizes.values())
        return all(await asyncio.gather(*(self._copy(*each) for each in sizes.items())))

    async def _copy(self, key: str, size: int) -> bool:
        async with self._slots:
            if not (_is_final(key) and self._present.get(key) == size):
                data = await _read(self.source, key, size)
                if data is None:
                    self.num_bytes -= size
                    return False
                await self.target.write(key, data)
                self.sent_bytes += len(data)
                self._present[key] = len(data)
        self.done_bytes += size
        return True

    async def _copy_records(self, first: int, parent: str | None, version: int) -> None:
        for number in range(first, version + 1):
            key = commit_key(self.run, number)
            data = await self.source.read(key) or b""
            stored = decoded(data, self.run, number)
            if stored is None or stored.record.parent != parent:
                raise broken_chain(self.run, number)
            await self.target.create(key, data)
            parent = stored.digest


def _is_final(key: str) -> bool:
    """Whether an object of this name never changes."""
    return CONTENT_KEY.search(key) is not None or key.rsplit("/", 1)[-1][0].isdigit()


async def _read(store: ObjectStore, key: str, size: int) -> bytes | None:
    """Return an object; None if it is not in the store.

    Raises:
        IntegrityError: if it does not match the digest in its name.
    """
    digest = CONTENT_KEY.search(key)
    if digest is None or "/by/" in key or "/copies/" in key:  # digests of other bytes
        return await store.read(key)
    try:
        return await store.get(ObjectRef(key=key, sha256=digest[1], size=size))
    except IntegrityError:
        if await store.backend.size(key) is None:
            return None
        raise
