"""Evaluates the policy versions of one run, each of them once."""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from digenrl.evaluation.media import as_mp4, as_png
from digenrl.evaluation.records import EvaluationRecord, Evaluations, KeptSample, Quality, alarms
from digenrl.evaluation.settings import settings_digest
from services.reward.scorer import SOURCES
from shared.models.memory import Residence
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord
from shared.run.log import Log
from shared.run.run_recipe import evaluation_rows
from shared.run.shards import open_tensors
from shared.store import ObjectStore

if TYPE_CHECKING:  # torch: what follows a run without a network does not need it
    from torch import Tensor

    from digenrl.evaluation.sampler import OnProgress
    from digenrl.evaluation.samples import Judges, PromptSampler, Samples

PUTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class JudgedSamples:
    samples: "Samples"
    quality: Quality
    scores: Mapping[str, Sequence[float | None]]
    """As `Judges.scores` returns them."""
    right: npt.NDArray[np.bool_] | None
    """(n,) whether the held-out classifier recognizes the digit; None without a classifier."""


class RunEvaluator:
    """Evaluates versions; loads the network and the scorers when the first one is evaluated."""

    def __init__(
        self,
        store: ObjectStore,
        recipe: Recipe,
        *,
        worker: str,
        progress: "OnProgress | None" = None,
        memory: Residence | None = None,
    ) -> None:
        """``progress`` is called in another thread, with the progress of each evaluation;
        ``memory`` is where the network's blocks are, if not where rollout has them."""
        self.recipe = recipe
        prompts = [prompt for prompt, _ in evaluation_rows(recipe)]
        settings = settings_digest(recipe, prompts)
        self.evaluations = Evaluations(store, recipe.run.name, settings)
        self._log = Log.of_evaluations(store, recipe.run.name)
        self._store = store
        self._worker = worker
        self._progress, self._memory = progress, memory
        self._stopping = threading.Event()
        self._evaluator: PromptSampler | None = None
        self._judges: Judges | None = None

    async def record_of(
        self, commit: CommitRecord, weights: "Mapping[str, Tensor] | None" = None
    ) -> EvaluationRecord:
        """Return a version's record; without one, evaluate ``weights``, by default the stored ones.

        Raises:
            IntegrityError: if its weights are not in the store.
            ScoringError: if a scorer fails.
        """
        stored = await self.evaluations.read(commit.policy.version)
        if stored is not None:
            return stored
        evaluation = await self._evaluate(commit, weights)
        is_first = await self.evaluations.add(evaluation)
        await self.announce()  # a record that is there may be this one, whose answer was lost
        if is_first:
            return evaluation
        first = await self.evaluations.read(evaluation.version)  # another evaluator was faster
        assert first is not None, "records are never deleted"
        return first

    async def announce(self) -> None:
        """Announce the records that are not announced yet to readers of events."""
        await self.evaluations.announce(self._log)

    async def _evaluate(
        self, commit: CommitRecord, weights: "Mapping[str, Tensor] | None" = None
    ) -> EvaluationRecord:
        began = time.monotonic()
        if weights is None:
            weights = await weights_to_use(self._store, self.recipe, commit)
        try:
            measured = await asyncio.to_thread(self._measure, weights)
        except asyncio.CancelledError:
            self._stopping.set()  # a thread cannot be cancelled
            raise
        kept = await self._keep(measured)
        earlier = [
            record.quality
            for record in await self.evaluations.read_all()
            if record.version < commit.policy.version
        ]
        return EvaluationRecord(
            run=commit.run,
            policy=commit.policy,
            settings=self.evaluations.settings,
            quality=measured.quality,
            alarms=tuple(alarms([*earlier, measured.quality])),
            samples=kept,
            worker=self._worker,
            seconds=round(time.monotonic() - began, 3),
        )

    async def quality_of(self, weights: "Mapping[str, Tensor]") -> Quality:
        """Compute the figures of any weights of the run's network; they are stored nowhere.

        Raises:
            ScoringError: if a scorer fails.
        """
        return (await asyncio.to_thread(self._measure, weights)).quality

    def _measure(self, weights: "Mapping[str, Tensor]") -> JudgedSamples:
        from digenrl.evaluation.samples import Judges, PromptSampler

        self._evaluator = self._evaluator or PromptSampler(
            self.recipe, self._stopping, progress=self._progress, memory=self._memory
        )
        self._judges = self._judges or Judges(self.recipe)
        samples = self._evaluator.sample(weights)
        scores = self._judges.scores(samples)
        quality = self._judges.quality(samples, scores)
        return JudgedSamples(samples, quality, scores, self._judges.right(samples))

    async def _keep(self, measured: JudgedSamples) -> tuple[KeptSample, ...]:
        """Store every sample."""
        limit = asyncio.Semaphore(PUTS_AT_ONCE)

        async def keep(index: int) -> KeptSample:
            async with limit:
                return await self._keep_sample(measured, index)

        indices = range(len(measured.samples.prompts))
        return tuple(await asyncio.gather(*(keep(index) for index in indices)))

    async def _keep_sample(self, measured: JudgedSamples, index: int) -> KeptSample:
        samples, folder = measured.samples, self.evaluations.media_folder
        png = await asyncio.to_thread(as_png, samples.stills[index])
        media = still = await self._store.put(folder, png, suffix=".png")
        if samples.images.ndim == 5:
            mp4 = await asyncio.to_thread(as_mp4, samples.images[index])
            media = await self._store.put(folder, mp4, suffix=".mp4")
        edited: Any = samples.metadata[index].get(SOURCES, ())
        source = None
        if edited:
            png = await asyncio.to_thread(as_png, edited[0])
            source = await self._store.put_once(folder, png, suffix=".png")
        return KeptSample(
            prompt=samples.prompts[index],
            media=media,
            still=still,
            right=None if measured.right is None else bool(measured.right[index]),
            source=source,
            scores={name: scores[index] for name, scores in measured.scores.items()},
        )


async def weights_to_use(
    store: ObjectStore, recipe: Recipe, record: CommitRecord
) -> "dict[str, Tensor]":
    """Return the weights of a version for evaluation and export: the trained ones, or their moving
    average; never an old policy's that only generates.

    Raises:
        IntegrityError: if they are not in the store, or do not match the record.
    """
    from services.trainer.engine.checkpoint import AVERAGE
    from shared.diffusion.weights.shards import whole_tensors

    if recipe.trainer.ema is None:
        return await trained_weights(store, record)
    stored = await open_tensors(store, record.checkpoint, record.learned.digest)
    averages = await whole_tensors(stored, AVERAGE)
    return {name.removeprefix(AVERAGE): each for name, each in averages.items()}


async def trained_weights(store: ObjectStore, record: CommitRecord) -> "dict[str, Tensor]":
    """Return the weights that the optimizer made of a version; raises as `weights_to_use`."""
    from shared.diffusion.weights.shards import whole_tensors

    trained = record.learned
    return await whole_tensors(await open_tensors(store, trained.ref, trained.digest))
