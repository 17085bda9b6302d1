"""The encoder: makes the conditions of prompts before they are needed, on any idle device.

It receives no tasks: the prompts of a batch follow from the recipe, so the encoder follows the
newest commit, and encodes the prompts of that batch and the next ones, nearest first. Conditions
are keyed by their inputs and made once (`shared.run.conditions`), so several encoders share the
work without messages: each begins with its own share of a batch, and then helps with the rest.
Whenever one is killed, nothing is lost but what it was encoding.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Protocol

import structlog

from services.rollout import limits
from shared.bus.bus import Bus
from shared.errors import ContractError, DigenRLError
from shared.messages import subjects
from shared.messages.contracts import PolicyPublished, Prompt
from shared.process.worker import WorkerContext, patiently
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, newest_commit, read_commit
from shared.run.conditions import Encoding, are_stored, store_conditions
from shared.run.run_recipe import prompt_order, read_recipe
from shared.run.sources import SourceImages
from shared.telemetry import STAGE_SECONDS

log = structlog.get_logger()


class PromptEncoder(Protocol):
    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        """Return the conditioning of ``prompt``, and of the image of that file, packed."""


class EncoderApp:
    def __init__(
        self, device: PromptEncoder, context: WorkerContext, recipe: Recipe, encoding: Encoding
    ) -> None:
        self._device = device
        self._bus: Bus = context.bus
        self._store = context.store
        self._worker = context.worker
        self._recipe = recipe
        self._encoding = encoding
        self._sources = SourceImages(context.store, context.bus)
        self._prompts = prompt_order(recipe)
        self._num_batches = recipe.run.steps
        self.newest = 0
        """Version that generates the nearest batch whose prompts are encoded."""
        self._share = first_share(context.worker.name, recipe.encoder.workers)
        self._known: set[str] = set()
        """Digests of conditions that are stored."""
        self._in_store: set[str] = set()
        """Digests of those that are being stored."""
        self._storing = asyncio.Semaphore(limits.MAX_PENDING_RESULTS)
        self._newer = asyncio.Event()

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        self._worker.rest()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.report(self._bus))
            tasks.create_task(self._follow())
            tasks.create_task(self._encode_ahead(tasks))

    async def _follow(self) -> None:
        """Track the newest version, without end; first from its commit record."""
        await self._go_on_from(lambda: newest_commit(self._store, self._bus.run))
        subject = subjects.event_subject(self._bus.run, "policy_published")
        async for received in self._bus.follow(subjects.EVT, [subject]):
            event = received.message
            if isinstance(event, PolicyPublished) and event.policy.version > self.newest:
                # Whoever may publish could announce anything.
                read = partial(read_commit, self._store, self._bus.run, event.policy.version)
                await self._go_on_from(read)

    async def _go_on_from(self, read: Callable[[], Awaitable[CommitRecord | None]]) -> None:
        """Continue from the version of a commit record, if there is one."""
        try:
            record = await patiently(read, "commits_unavailable")
        except ContractError as error:
            log.error("commit_unreadable", error=str(error))
            return
        if record is not None:
            self.newest = max(record.policy.version, self.newest)
            self._newer.set()

    async def _encode_ahead(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._newer.clear()
            prompt = await patiently(self._next, "store_unavailable")
            if prompt is not None:
                await self._encode(prompt, tasks)
                continue
            try:
                async with asyncio.timeout(limits.IDLE_RECHECK_S):
                    await self._newer.wait()
            except TimeoutError:
                await self._recheck()

    async def _recheck(self) -> None:
        """Recheck everything: a faulty object was forgotten, and the run may have more steps."""
        self._known.clear()
        stored = await patiently(
            lambda: read_recipe(self._store, self._bus.run), "store_unavailable"
        )
        if stored is not None:
            self._num_batches = stored.run.steps

    async def _next(self) -> Prompt | None:
        """Return the next needed prompt without conditions; None if every prompt has them."""
        for prompt in list(self._wanted()):
            digest = self._encoding.digest(prompt.text, prompt.image, prompt.negative_prompt)
            if digest in self._known | self._in_store:
                continue
            if not await are_stored(self._store, self._bus.run, digest):
                return prompt
            self._known.add(digest)
        return None

    def _wanted(self) -> Iterator[Prompt]:
        """Yield the prompts of the batches to come in the order in which to encode them: the whole
        nearest batch goes before this encoder's share of later ones."""
        end = min(self.newest + self._recipe.encoder.ahead + 1, self._num_batches)
        wanted = range(self.newest, end)
        for batches in (wanted[:1], wanted[1:]):
            prompts = [prompt for batch in batches for prompt in self._prompts_of(batch)]
            yield from filter(self._is_mine, prompts)
            # From the other end: whose share it is begins with what is needed first.
            yield from (prompt for prompt in reversed(prompts) if not self._is_mine(prompt))

    def _prompts_of(self, batch: int) -> list[Prompt]:
        number, of_group = self._recipe.batch.groups, self._prompts.of_group
        return [of_group(batch, group, number) for group in range(number)]

    def _is_mine(self, prompt: Prompt) -> bool:
        workers = self._recipe.encoder.workers
        digest = self._encoding.digest(prompt.text, prompt.image, prompt.negative_prompt)
        return int(digest[:8], 16) % workers == self._share

    async def _encode(self, prompt: Prompt, tasks: asyncio.TaskGroup) -> None:
        """Encode a prompt; the result, or the reason of its failure, is stored while the device
        encodes the next prompt."""
        began, fault = time.monotonic(), ""
        try:
            source = await patiently(lambda: self._sources.get(prompt.image), "store_unavailable")
            with self._worker.doing("encoding"):
                packed = await self._device.conditions(prompt.text, source, prompt.negative_prompt)
        except DigenRLError as error:
            packed, fault = b"", str(error)
            log.error("prompt_not_encoded", prompt=prompt.text, error=fault)
        STAGE_SECONDS.labels(stage="encoder").observe(time.monotonic() - began)
        await self._storing.acquire()
        self._in_store.add(self._encoding.digest(prompt.text, prompt.image, prompt.negative_prompt))
        tasks.create_task(self._store_once(prompt, packed, fault))

    async def _store_once(self, prompt: Prompt, packed: bytes, fault: str) -> None:
        digest = self._encoding.digest(prompt.text, prompt.image, prompt.negative_prompt)
        worker = self._worker.address
        try:
            store = partial(store_conditions, self._store, self._bus.run, digest, packed)
            named = partial(store, prompt=prompt.text, worker=worker, fault=fault)
            first = await patiently(named, "store_unavailable")
        finally:
            self._in_store.remove(digest)
            self._storing.release()
        self._known.add(digest)
        self._worker.num_done += first
        if not first and self._is_mine(prompt):  # another encoder has this share: take the next
            self._share = (self._share + 1) % self._recipe.encoder.workers


def first_share(name: str, num_encoders: int) -> int:
    """Return the share that an encoder begins with: by the number that its name ends with.

    >>> first_share("encoder-4", 3)
    1
    >>> first_share("a-host", 3)
    0
    """
    number = re.search(r"(\d+)$", name)
    return int(number[1]) % num_encoders if number else 0
