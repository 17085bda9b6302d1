"""Fetches what fragments are generated from, before it is needed: what encoders have made of their
prompts, or the source images that devices encode themselves.

Without encoders and images, a fragment is ready as soon as it is given to a device.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shared.caches import keep_newest
from shared.devices.protocols import FragmentGeneration
from shared.errors import ContractError, FaultyConditions, IntegrityError
from shared.limits import CONDITIONS_POLL_S, MAX_CACHED_PROMPTS
from shared.messages.contracts import GenerateFragment, Prompt, SourceImage
from shared.process.worker import Worker, patiently
from shared.recipe.recipe import Recipe
from shared.run.conditions import (
    Encoding,
    StoredConditions,
    find_encoding,
    forget_conditions,
    read_conditions,
)
from shared.run.sources import SourceImages
from shared.store import ObjectStore

MAX_SHOWN_PROMPT = 80
"""Characters of a prompt that a worker's note shows."""

log = structlog.get_logger()


class EncodedConditions:
    """Finds conditions that encoders have stored."""

    def __init__(self, store: ObjectStore, run: str, encoding: Encoding) -> None:
        self._store = store
        self._run = run
        self._encoding = encoding
        self._kept: dict[str, StoredConditions] = {}
        """Maps digests to recently used conditions, oldest first."""

    async def get(self, prompt: Prompt, wanted: Callable[[], bool]) -> StoredConditions | None:
        """Return a prompt's conditions as soon as an encoder has stored them; None if they are no
        longer ``wanted`` by then.

        Raises:
            FaultyConditions: if what is stored is not what it should be.
        """
        digest = self._encoding.digest(prompt.text, prompt.image, prompt.negative_prompt)
        while wanted():
            conditions = self._kept.get(digest) or await patiently(
                lambda: read_conditions(self._store, self._run, digest), "store_unavailable"
            )
            if conditions is not None:
                keep_newest(self._kept, digest, conditions, MAX_CACHED_PROMPTS)
                return conditions
            await asyncio.sleep(CONDITIONS_POLL_S)
        return None

    async def forget(self, prompt: Prompt) -> None:
        """Have a prompt encoded again, since its stored conditions are faulty."""
        digest = self._encoding.digest(prompt.text, prompt.image, prompt.negative_prompt)
        self._kept.pop(digest, None)
        log.warning("conditions_forgotten", prompt=prompt.text[:MAX_SHOWN_PROMPT], digest=digest)
        await patiently(
            lambda: forget_conditions(self._store, self._run, digest), "store_unavailable"
        )


async def encoded_conditions(store: ObjectStore, recipe: Recipe) -> EncodedConditions | None:
    """Return what finds the run's conditions; None if its devices encode for themselves."""
    if not recipe.encoder.workers:
        return None
    return EncodedConditions(store, recipe.run.name, await find_encoding(store, recipe))


@dataclass(slots=True, eq=False)
class QueuedFragment:
    """A fragment that waits for a device, with what it is generated from."""

    task: GenerateFragment
    conditions: StoredConditions | None = None
    """None if the device encodes the prompt, or if the fragment is stale."""
    source: bytes | None = None
    """File of its prompt's source image, if it has one and the device encodes the prompt."""
    is_ready: bool = False
    """Whether the device need not wait for its conditions."""
    fault: ContractError | None = None
    """Why it cannot be generated, if it cannot."""
    begun: FragmentGeneration | None = None
    """Its denoising steps so far, if it was interrupted between two of them."""


class FragmentQueue:
    """Holds fragments until a device is free: first come first served, of those that are ready."""

    def __init__(
        self,
        worker: Worker,
        encoded: EncodedConditions | None,
        sources: SourceImages,
        *,
        wake: Callable[[], None],
        is_stale: Callable[[GenerateFragment], bool] = lambda _: False,
    ) -> None:
        """``wake`` is called whenever a fragment has become ready. One that ``is_stale`` needs no
        conditions: it goes back."""
        self._worker = worker
        self._encoded = encoded
        self._sources = sources
        self._wake = wake
        self._is_stale = is_stale
        self._waiting: list[QueuedFragment] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_ready(self) -> bool:
        return any(queued.is_ready for queued in self._waiting)

    def put(self, task: GenerateFragment, tasks: asyncio.TaskGroup) -> None:
        """Add a fragment; its conditions, or its source image, are fetched in ``tasks``."""
        image = task.prompt.image
        queued = QueuedFragment(task, is_ready=self._encoded is None and image is None)
        self._waiting.append(queued)
        if self._encoded is not None:
            tasks.create_task(self._fetch(queued, self._encoded))
        elif image is not None:
            tasks.create_task(self._fetch_source(queued, image))
        else:
            self._wake()

    def take(self) -> QueuedFragment:
        """Remove the fragment that has been waiting longest of those that are ready."""
        queued = next(queued for queued in self._waiting if queued.is_ready)
        self._waiting.remove(queued)
        return queued

    def remove(self, chosen: Callable[[GenerateFragment], bool]) -> list[GenerateFragment]:
        """Remove the chosen fragments, and return them."""
        removed = [queued.task for queued in self._waiting if chosen(queued.task)]
        self._waiting = [queued for queued in self._waiting if not chosen(queued.task)]
        return removed

    async def _fetch(self, queued: QueuedFragment, encoded: EncodedConditions) -> None:
        task = queued.task
        shown = task.prompt.text[:MAX_SHOWN_PROMPT]
        note = (
            f"no encoder has stored the conditions of {shown!r} (batch {task.fragment.batch}, "
            f"group {task.fragment.group}); start `digenrl serve encoder`, or resume with "
            "encoder.workers = 0"
        )
        try:
            with self._worker.lacking("waiting_for_conditions", note):
                queued.conditions = await encoded.get(
                    task.prompt, lambda: queued in self._waiting and not self._is_stale(task)
                )
        except FaultyConditions as error:
            queued.fault = error
        queued.is_ready = True
        self._wake()

    async def _fetch_source(self, queued: QueuedFragment, image: SourceImage) -> None:
        try:
            queued.source = await patiently(lambda: self._sources.get(image), "store_unavailable")
        except IntegrityError as error:
            queued.fault = ContractError(f"the prompt's source image: {error}")
        queued.is_ready = True
        self._wake()
