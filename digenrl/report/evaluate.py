"""Samples of a policy version at a fixed seed, by ODE, and how good they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from digenrl.report.summary import Quality
from services.reward.scorer import build_scorers
from shared.contracts import Prompt
from shared.diffusion.generation import to_uint8
from shared.diffusion.lora import load_adapter
from shared.diffusion.models import ModelAdapter, repeat_rows
from shared.diffusion.policy import LoadedPolicy, load_policy, sampling_plan
from shared.diffusion.sampler import Denoising, denoise
from shared.diffusion.tensors import unpack
from shared.prompts import read_prompts
from shared.recipe import Recipe
from shared.seeds import derive

Images = npt.NDArray[np.uint8]
"""(n, C, H, W)"""


PROMPTS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Samples:
    images: Images
    metadata: list[Mapping[str, object]]
    """Of each image's prompt."""
    prompts: list[str]


class Evaluator:
    """Holds the network, and samples it with one set of weights after the other."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(recipe.rollout.threads)
        self._recipe = recipe
        self._policy: LoadedPolicy = load_policy(recipe, {"transformer", "text", "decoder"})
        self._prompts = read_prompts(recipe.data.prompts)

    @property
    def model(self) -> ModelAdapter:
        return self._policy.model

    def sample(self, weights: bytes) -> Samples:
        """The same prompts, and the same noise for each, whatever the weights."""
        load_adapter(self._policy.model.transformer, unpack(weights))
        numbered = list(enumerate(self._prompts))
        chunks = [
            numbered[first : first + PROMPTS_AT_ONCE]
            for first in range(0, len(numbered), PROMPTS_AT_ONCE)
        ]
        images = [self._sample_prompts(chunk) for chunk in chunks]
        repeated = [p for p in self._prompts for _ in range(self._num_each)]
        return Samples(
            images=np.concatenate(images),
            metadata=[p.metadata for p in repeated],
            prompts=[p.text for p in repeated],
        )

    @property
    def _num_each(self) -> int:
        return self._recipe.evaluation.samples_per_prompt

    def _sample_prompts(self, chunk: Sequence[tuple[int, Prompt]]) -> Images:
        table, model = self._recipe.model, self._policy.model
        encoded = [model.encode(prompt.text, guidance=table.guidance) for _, prompt in chunk]
        rows = {
            name: torch.cat([repeat_rows(one, self._num_each)[name] for one in encoded])
            for name in encoded[0]
        }
        seed = self._recipe.evaluation.seed
        denoising = Denoising(
            sampling_plan(self._recipe.sampling, window_start=None),
            seeds=[
                derive(seed, "evaluation", number, index)
                for number, _ in chunk
                for index in range(self._num_each)
            ],
            shape=model.latent_shape(height=table.height, width=table.width, frames=table.frames),
            device=self._policy.device,
        )
        latents = denoise(
            lambda latents, sigma: model.velocity(latents, sigma, rows, guidance=table.guidance),
            denoising,
        )
        pixels = to_uint8(model.decode(latents))
        return np.asarray(pixels.cpu().numpy(), dtype=np.uint8)


def quality(recipe: Recipe, samples: Samples) -> Quality:
    """The training reward of the samples and, for digits, what the held-out judges say."""
    scorers = build_scorers(recipe.reward.scorers)
    columns = [
        scorer.weight * np.array(scorer.scorer.score(samples.images, samples.metadata))
        for scorer in scorers
    ]
    found = Quality(reward=float(np.sum(columns, axis=0).mean()), num_samples=len(samples.images))
    if recipe.evaluation.digits is None:
        return found
    return found.model_copy(update=_digit_figures(recipe.evaluation.digits, samples))


def taken_for_right(recipe: Recipe, samples: Samples) -> npt.NDArray[np.bool_] | None:
    """(n,) whether the held-out judge sees the digit asked for; None without such a judge."""
    if recipe.evaluation.digits is None:
        return None
    from services.reward.scorers.digits import DigitProbability, wanted_digit

    wanted = np.array([wanted_digit(metadata) for metadata in samples.metadata])
    predicted = DigitProbability(recipe.evaluation.digits, "gold_mlp").predict(samples.images)
    return np.asarray(predicted == wanted, dtype=np.bool_)


def _digit_figures(folder: Path, samples: Samples) -> dict[str, object]:
    from digenrl.digits.classifiers import load_real
    from digenrl.digits.data import NUM_DIGITS, Half
    from digenrl.digits.guards import diversity, nearest_real
    from services.reward.scorers.digits import (
        DigitProbability,
        DigitSvm,
        to_model_space,
        wanted_digit,
    )

    wanted = np.array([wanted_digit(metadata) for metadata in samples.metadata])
    right = DigitProbability(folder, "gold_mlp").predict(samples.images) == wanted
    per_digit = [float(right[wanted == digit].mean()) for digit in range(NUM_DIGITS)]
    made = Half(to_model_space(samples.images), wanted)
    nn, div = nearest_real(made, load_real(folder)), diversity(made)
    proxy = DigitProbability(folder).predict(samples.images)
    return {
        "proxy_accuracy": float((proxy == wanted).mean()),
        "gold_accuracy": float(right.mean()),
        "gold_svm_accuracy": float((DigitSvm(folder).predict(samples.images) == wanted).mean()),
        "gold_accuracy_per_digit": per_digit,
        "gold_worst_digit": min(per_digit),
        "gold_nn": float(nn.mean()),
        "gold_div": float(div.mean()),
        "gold_nn_per_digit": nn.tolist(),
        "gold_div_per_digit": div.tolist(),
    }
