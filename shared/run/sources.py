"""Source images in the store: put there once when the run begins, and read by their digests."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from shared.bus.bus import Bus
from shared.caches import keep_newest
from shared.errors import UserError
from shared.limits import MAX_CACHED_IMAGES
from shared.messages.contracts import Prompt, SourceImage
from shared.run.layout import source_ref, sources_folder
from shared.store import ObjectStore

PUTS_AT_ONCE = 8


async def store_sources(
    store: ObjectStore, run: str, rows: Sequence[tuple[Prompt, Path | None]]
) -> None:
    """Store the source images of a run's prompts that are not stored yet.

    Raises:
        UserError: if a file has changed since its prompt was read.
    """
    files = {
        prompt.image.sha256: (prompt.image, path) for prompt, path in rows if prompt.image and path
    }
    limit = asyncio.Semaphore(PUTS_AT_ONCE)

    async def put(image: SourceImage, path: Path) -> None:
        async with limit:
            data = await asyncio.to_thread(path.read_bytes)
            ref = await store.put_once(sources_folder(run), data, suffix="")
            if ref != source_ref(run, image):
                raise UserError(f"data.prompts: {path} is being changed; start the run again")

    async with asyncio.TaskGroup() as tasks:
        for image, path in files.values():
            tasks.create_task(put(image, path))


class SourceImages:
    """Reads source images, and caches recently used ones."""

    def __init__(self, store: ObjectStore, bus: Bus) -> None:
        self._store = store
        self._bus = bus
        self._kept: dict[str, bytes] = {}

    async def get(self, image: SourceImage | None) -> bytes | None:
        """Return the file of a prompt's source image; None if it has none.

        Raises:
            IntegrityError: if the store does not have it.
        """
        if image is None:
            return None
        data = self._kept.get(image.sha256)
        if data is None:
            data = await self._store.get(source_ref(self._bus.run, image))
        keep_newest(self._kept, image.sha256, data, MAX_CACHED_IMAGES)
        return data
