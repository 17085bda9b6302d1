"""Reads what a run has done from its object store, whether it still runs or not.

Everything is read once: commit records and evaluations never change. The store is read only while a
page is open.
"""

import asyncio
import time
from dataclasses import dataclass, field

from digenrl.evaluation.best import Best, comparable, find_best
from digenrl.evaluation.records import EvaluationRecord
from digenrl.reading.facts import USAGE_BATCHES, StepFacts
from services.scheduler.shell.api_letters import Letters, RunProgress
from shared.caches import SharedResults
from shared.errors import ContractError
from shared.messages.contracts import ObjectRef
from shared.recipe.recipe import Recipe
from shared.run.chain import Chain, CommitSummary, read_chain
from shared.run.commits import read_stored
from shared.run.layout import timeline_key, usage_key
from shared.run.log import Log
from shared.run.run_recipe import read_recipe
from shared.run.usage import BatchUsage, Timeline
from shared.store import ObjectStore
from shared.store.previews import shrink

POLL_S = 1.0
"""Seconds between two looks at the store, however many people look at the page."""
LOG_S = 3.0
TIMELINES = 256
"""Timelines that are kept in memory."""
MAX_REDUCED_PICTURES = 1000
"""Reduced pictures that are kept in memory, each of some 30 KB."""


@dataclass(slots=True)
class RunHistory:
    """Knows the steps, evaluations and timelines of a run that are in its object store."""

    store: ObjectStore
    run: str
    recipe: Recipe | None = None
    steps: list[CommitSummary] = field(default_factory=list)
    """All steps, from version 0 on."""
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    """Evaluations at one set of settings, oldest version first."""
    usage: dict[int, BatchUsage] = field(default_factory=dict)
    """Use of the devices in the newest batches."""
    _chain: Chain | None = None
    _evaluated: dict[str, EvaluationRecord] = field(default_factory=dict)
    _media: dict[str, ObjectRef] = field(default_factory=dict)
    _timelines: SharedResults[int, Timeline | None] = field(
        default_factory=lambda: SharedResults(TIMELINES)
    )
    prompted: dict[str, bytes] = field(default_factory=dict)
    """Pictures and videos of prompts of callers, by name."""
    _small: SharedResults[str, bytes] = field(
        default_factory=lambda: SharedResults(MAX_REDUCED_PICTURES)
    )
    _shrinking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    log: Log = field(init=False)
    _letters: Letters = field(init=False)
    _looked: float = float("-inf")
    _looked_for_steps: float = float("-inf")
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.log = Log.of_run(self.store, self.run)
        self._letters = Letters(lambda: RunProgress(max(0, self.version)))

    @property
    def version(self) -> int:
        """Number of the newest version; -1 before the first."""
        return len(self.steps) - 1

    @property
    def step_facts(self) -> list[StepFacts]:
        """All steps, as a reading of the run takes them."""
        return [
            StepFacts(each.version, each.policy.weights_digest, each.metrics, each.staleness)
            for each in self.steps
        ]

    @property
    def recent_usage(self) -> list[BatchUsage]:
        """Use of the devices in the newest batches, the oldest first."""
        return [self.usage[batch] for batch in sorted(self.usage)]

    def best(self) -> Best | None:
        """Return the version that no evaluated one is better than; None if none is evaluated."""
        return find_best(self.evaluations, self.recipe) if self.recipe else None

    async def look(self) -> None:
        """Read what is new, at most once a second; raises Unavailable if the store is silent."""
        async with self._lock:
            if time.monotonic() - self._looked < POLL_S:
                return
            if self.recipe is None:
                self.recipe = await read_recipe(self.store, self.run)
            await self._read_steps()
            await self._read_usage()
            await self._read_evaluations()
            self._looked = time.monotonic()

    async def look_for_steps(self, max_age_s: float) -> None:
        """Read new commits, unless the last look for them is younger.

        Raises:
            Unavailable: if the store does not answer.
            ContractError: if a record is damaged and has no copy.
        """
        async with self._lock:
            if time.monotonic() - self._looked_for_steps >= max_age_s:
                await self._read_steps()

    async def _read_steps(self) -> None:
        if self._chain is None or self._chain.newest is None:
            self._chain = await read_chain(self.store, self.run)
            number = self._chain.version + 1
            self.steps = [*reversed(await self._chain.page(number, number))]
        while True:
            stored = await read_stored(self.store, self.run, self.version + 1)
            if stored is None:
                self._looked_for_steps = time.monotonic()
                return
            self.steps.append(self._chain.add(stored))

    async def _read_usage(self) -> None:
        wanted = range(max(0, self.version - USAGE_BATCHES), self.version)
        for batch in wanted:
            if batch in self.usage:
                continue
            usage = BatchUsage.decode(await self.store.read(usage_key(self.run, batch)))
            if usage is not None:
                self.usage[batch] = usage
        self.usage = {batch: each for batch, each in self.usage.items() if batch in wanted}

    async def _read_evaluations(self) -> None:
        chosen = await comparable(self.store, self.run)
        for key in chosen:
            if key not in self._evaluated:
                self._evaluated[key] = await self._read_evaluation(key)
        self.evaluations = [self._evaluated[key] for key in chosen]

    async def _read_evaluation(self, key: str) -> EvaluationRecord:
        """Return a record, whose pictures can be requested from now on."""
        record = await EvaluationRecord.read(self.store, key)
        if record is None:
            raise ContractError(f"{key} is gone")
        for sample in record.samples:
            for ref in (sample.media, sample.still, sample.source):
                if ref is not None:
                    self._media[ref.key.rsplit("/", 1)[1]] = ref
        return record

    async def media(self, name: str, max_side: int | None = None) -> bytes | None:
        """Return a picture or video of an evaluation by the last part of its key.

        Args:
            max_side: height and width to which a larger picture is reduced, as JPEG.
        """
        if name in self.prompted:
            return self.prompted[name]
        ref = self._media.get(name)
        if ref is None or max_side is None or not name.endswith(".png"):
            return None if ref is None else await self.store.get(ref)
        return await self._small.get(name, lambda: self._reduce(ref, max_side))

    async def _reduce(self, ref: ObjectRef, max_side: int) -> bytes:
        async with self._shrinking:
            return await asyncio.to_thread(shrink, await self.store.get(ref), max_side)

    async def timeline(self, batch: int) -> Timeline | None:
        """Return a committed batch's timeline; None if it is not stored, or damaged."""
        return await self._timelines.get(batch, lambda: self._read_timeline(batch))

    async def _read_timeline(self, batch: int) -> Timeline | None:
        data = await self.store.read(timeline_key(self.run, batch))
        return None if data is None else await asyncio.to_thread(Timeline.decode, data)

    async def letters(self) -> Letters:
        """Return all dead letters, as they are if the run is over; new ones are looked for every
        few seconds."""
        await self.look()
        await self.log.look(LOG_S)
        return self._letters.read(self.log.numbered)
