"""Samples a model with an ODE, for evaluations and for `digenrl generate`."""

import threading
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.diffusion.decoding import decoded
from shared.diffusion.device import RowsAtOnce, fits
from shared.diffusion.encoding import encoded
from shared.diffusion.generation import SMALLER
from shared.diffusion.models import Conditions, ModelAdapter, repeat_rows
from shared.diffusion.policy import LoadedPolicy, load_policy, sampling_plan
from shared.diffusion.sampler import Denoising, Velocity, denoise
from shared.learning.seeds import derive
from shared.models.memory import Holding
from shared.recipe.recipe import Recipe

Media = npt.NDArray[np.uint8]
"""(n, C, H, W), or videos (n, F, C, H, W)"""

OnProgress = Callable[[int, int], None]
"""Gets the number of prompts done, and of all prompts."""

PROMPTS_AT_ONCE = 4


class Stopped(Exception):
    """Raised when sampling is stopped on request."""


class Sampler:
    """Holds the network and samples it with its current weights."""

    def __init__(
        self,
        recipe: Recipe,
        stopping: threading.Event | None = None,
        *,
        progress: OnProgress | None = None,
    ) -> None:
        """Load the recipe's network, text encoders and decoder; the network is streamed where
        rollout streams it, which changes no sample.

        Args:
            stopping: when it is set, `sample` raises `Stopped`, also in another thread.
            progress: is called by `sample`.
        """
        torch.set_num_threads(recipe.rollout.threads)
        self._recipe = recipe
        self._policy: LoadedPolicy = load_policy(
            recipe,
            {"transformer", "text", "decoder"},
            holding=Holding(memory=recipe.holding.memory),
        )
        self._at_once = RowsAtOnce(self._policy.device)
        self._stopping = stopping or threading.Event()
        self._progress = progress or (lambda done, all_of_them: None)

    @property
    def model(self) -> ModelAdapter:
        return self._policy.model

    def sample(
        self,
        prompts: Sequence[str],
        *,
        num_each: int,
        seed: int,
        sources: Sequence[bytes | None] | None = None,
        negatives: Sequence[str | None] | None = None,
    ) -> Media:
        """Sample each prompt ``num_each`` times, ordered by prompt. The noise of a sample depends
        only on the seed and on the numbers of the prompt and the sample. ``sources`` are the files
        of the prompts' source images, ``negatives`` their own negative prompts."""
        chunks = []
        none = [None] * len(prompts)
        rows = list(zip(prompts, sources or none, negatives or none, strict=True))
        for first in range(0, len(prompts), PROMPTS_AT_ONCE):
            self._progress(first, len(prompts))
            some = rows[first : first + PROMPTS_AT_ONCE]
            with fits(self._policy.device, "sampling for an evaluation", SMALLER):
                chunks.append(self._sample(some, first, num_each, seed))
        self._progress(len(prompts), len(prompts))
        return np.concatenate(chunks)

    def _sample(
        self,
        rows: Sequence[tuple[str, bytes | None, str | None]],
        first: int,
        num_each: int,
        seed: int,
    ) -> Media:
        """Samples as many prompts at once as have texts of one length."""
        conditions = [encoded(self.model, self._recipe, *row) for row in rows]
        made, done = [], 0
        for _, alike in groupby(conditions, key=_shapes):
            some = list(alike)
            made.append(self._sample_encoded(some, first + done, num_each, seed))
            done += len(some)
        return np.concatenate(made)

    def _sample_encoded(
        self, conditions: Sequence[Conditions], first: int, num_each: int, seed: int
    ) -> Media:
        table, model = self._recipe.model, self.model
        rows = {
            name: torch.cat([repeat_rows(one, num_each)[name] for one in conditions])
            for name in conditions[0]
        }
        denoising = Denoising(
            sampling_plan(self._recipe, window_start=None),
            seeds=[
                noise_seed(seed, number, index)
                for number in range(first, first + len(conditions))
                for index in range(num_each)
            ],
            shape=model.latent_shape(height=table.height, width=table.width, frames=table.frames),
            device=self._policy.device,
        )
        latents = denoise(self._velocity(rows), denoising)
        return np.asarray(decoded(model, latents, self._policy.device).numpy(), dtype=np.uint8)

    def _velocity(self, rows: Conditions) -> Velocity:
        guidance = self._recipe.model.guidance

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            if self._stopping.is_set():
                raise Stopped
            return self._at_once.of(
                len(latents),
                lambda some: self.model.velocity(
                    latents[some], sigma[some], _some(rows, some), guidance=guidance
                ),
            )

        return velocity


def _shapes(conditions: Conditions) -> list[tuple[str, torch.Size]]:
    return sorted((name, tensor.shape) for name, tensor in conditions.items())


def _some(conditions: Conditions, rows: slice) -> Conditions:
    return {name: tensor[rows] for name, tensor in conditions.items()}


def noise_seed(seed: int, prompt: int, index: int) -> int:
    """Return the seed of the noise of one sample of a prompt."""
    return derive(seed, "evaluation", prompt, index)
