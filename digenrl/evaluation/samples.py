"""Samples a policy version at a fixed seed, and scores the samples."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from digenrl.evaluation.records import GOLD, REWARD, Quality
from digenrl.evaluation.sampler import Media, OnProgress, Sampler
from digenrl.evaluation.settings import as_evaluated
from services.reward.scorer import build_scorers, scorer_inputs
from services.reward.scoring import load_source, score_samples
from shared.diffusion.weights.trained_weights import load_weights
from shared.errors import DigenRLError
from shared.models.memory import Residence
from shared.recipe.recipe import Recipe, override
from shared.run.run_recipe import evaluation_rows, trained_and_held_out


@dataclass(frozen=True, slots=True)
class Samples:
    images: Media
    metadata: list[Mapping[str, object]]
    """Scorer inputs for each image, from its prompt."""
    prompts: list[str]

    @property
    def stills(self) -> Media:
        """Return the images, or a frame from the middle of each video: (n, C, H, W)."""
        return self.images if self.images.ndim == 4 else self.images[:, self.images.shape[1] // 2]


class PromptSampler:
    """Samples the recipe's evaluation prompts with one set of weights after another."""

    def __init__(
        self, recipe: Recipe, stopping: threading.Event | None = None, *,
        progress: OnProgress | None = None, memory: Residence | None = None,
    ) -> None:  # fmt: skip
        """``stopping``, ``progress`` and ``memory`` are passed to the sampler."""
        self._table, self._background = recipe.evaluation, recipe.data.background
        rows = evaluation_rows(recipe)
        self._prompts = [prompt for prompt, _ in rows]
        self._sources = [None if path is None else path.read_bytes() for _, path in rows]
        prompt_rows = [
            (prompt.text, source, prompt.negative_prompt)
            for prompt, source in zip(self._prompts, self._sources, strict=True)
        ]
        self._sampler = Sampler(
            as_evaluated(recipe), stopping, progress=progress, rows=prompt_rows, memory=memory
        )

    def sample(self, weights: Mapping[str, Tensor]) -> Samples:
        """Sample with these weights; prompts and noise are the same for all weights."""
        load_weights(self._sampler.model.transformer, weights)
        texts, num_each = [prompt.text for prompt in self._prompts], self._table.samples_per_prompt
        images = self._sampler.sample(
            texts, num_each=num_each, seed=self._table.seed, sources=self._sources,
            negatives=[prompt.negative_prompt for prompt in self._prompts],
        )  # fmt: skip
        outputs = [
            None if each is None else load_source(each, images, self._background)
            for each in self._sources
        ]
        prompt_rows = list(map(scorer_inputs, self._prompts, outputs))
        return Samples(
            images=images,
            metadata=[each for each in prompt_rows for _ in range(num_each)],
            prompts=[text for text in texts for _ in range(num_each)],
        )


class Judges:
    """Holds the scorers of training and evaluation, loaded once."""

    def __init__(self, recipe: Recipe) -> None:
        self._trained = build_scorers(recipe.reward.scorers)
        self._gold = build_scorers(recipe.evaluation.scorers)
        self._digits = recipe.evaluation.digits

    def scores(self, samples: Samples) -> dict[str, tuple[float | None, ...]]:
        """Return the score of each sample by each scorer; gold rewards have names that begin with
        `GOLD`, and `REWARD` is the weighted sum of the training scorers.

        Raises:
            ScoringError: if a scorer fails.
        """
        images, metadata = samples.images, samples.metadata
        trained = {each.name: score_samples(each, images, metadata) for each in self._trained}
        weights = [scorer.weight for scorer in self._trained]
        sums = [_weighted_sum(weights, scores) for scores in zip(*trained.values(), strict=True)]
        gold = {f"{GOLD}{each.name}": score_samples(each, images, metadata) for each in self._gold}
        return {**trained, **gold, REWARD: tuple(sums)}

    def quality(
        self, samples: Samples, known: Mapping[str, Sequence[float | None]] | None = None
    ) -> Quality:
        """Compute the mean scores over the samples that have one and, for digits, the
        classifiers' figures; ``known``: what `scores` has returned, and raises."""
        scores = known or self.scores(samples)
        rewards = {each.name: _mean(scores[each.name]) for each in self._trained}
        quality_figures = Quality(
            reward=sum(scorer.weight * rewards[scorer.name] for scorer in self._trained),
            num_samples=len(samples.images),
            rewards=rewards,
            gold={each.name: _mean(scores[f"{GOLD}{each.name}"]) for each in self._gold},
        )
        if self._digits is None:
            return quality_figures
        return quality_figures.model_copy(update=_digit_figures(self._digits, samples))

    def right(self, samples: Samples) -> npt.NDArray[np.bool_] | None:
        """Return (n,) whether the held-out classifier recognizes each digit; None without it."""
        if self._digits is None:
            return None
        from services.reward.prompt_checks import wanted_digit
        from services.reward.scorers.digits import DigitProbability

        wanted = np.array([wanted_digit(metadata) for metadata in samples.metadata])
        predicted = DigitProbability(self._digits, "gold_mlp").predict(samples.images)
        return np.asarray(predicted == wanted, dtype=np.bool_)


def rewards_of(recipe: Recipe, prompts: Sequence[str], images: Media) -> dict[str, Any]:
    """Return the training reward of each image, made in order from ``prompts``, and why images have
    none. A prompt of the recipe has its metadata, and another prompt has none."""
    texts = [text for text in prompts for _ in range(len(images) // len(prompts))]
    try:
        rows = (*evaluation_rows(recipe), *trained_and_held_out(recipe)[0])
        known: dict[str, dict[str, object]] = {text: {"prompt": text} for text in texts}
        known |= {prompt.text: scorer_inputs(prompt) for prompt, _ in rows}
        samples = Samples(images, [known[text] for text in texts], texts)
        scores = Judges(override(recipe, {"evaluation.scorers": ()})).scores(samples)
    except DigenRLError as error:
        return {"rewards": [None] * len(images), "why_unscored": str(error)}
    return {"rewards": scores[REWARD], "why_unscored": "its scorer returned no number"}


def _weighted_sum(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(np.dot(weights, known)) if len(known) == len(scores) else None


def _digit_figures(folder: Path, samples: Samples) -> dict[str, object]:
    from digenrl.evaluation.digits import NUM_DIGITS, DataSplit, diversity, load_real, nearest_real
    from services.reward.prompt_checks import wanted_digit
    from services.reward.scorers.digits import DigitProbability, DigitSvm, to_model_space

    wanted = np.array([wanted_digit(metadata) for metadata in samples.metadata])
    right = DigitProbability(folder, "gold_mlp").predict(samples.images) == wanted
    per_digit = [_number(right[wanted == digit].mean()) for digit in range(NUM_DIGITS)]
    images = DataSplit(to_model_space(samples.images), wanted)
    nn, div = nearest_real(images, load_real(folder)), diversity(images)
    proxy = DigitProbability(folder).predict(samples.images)
    return {
        "proxy_accuracy": float((proxy == wanted).mean()),
        "gold_accuracy": float(right.mean()),
        "gold_svm_accuracy": float((DigitSvm(folder).predict(samples.images) == wanted).mean()),
        "gold_accuracy_per_digit": per_digit,
        "gold_worst_digit": min((share for share in per_digit if share is not None), default=None),
        "gold_nn": _number(nn.mean()),
        "gold_div": _number(div.mean()),
        "gold_nn_per_digit": [_number(distance) for distance in nn],
        "gold_div_per_digit": [_number(distance) for distance in div],
    }


def _mean(scores: Sequence[float | None]) -> float:
    return float(np.mean([score for score in scores if score is not None]))


def _number(value: float) -> float | None:
    """Return None for the mean of nothing, such as the distances within a single sample."""
    return None if math.isnan(value) else float(value)
