"""Samples a model with an ODE, for evaluations and for `digenrl generate`."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.diffusion.generation import MEMORY_REMEDY
from shared.diffusion.loading.device import RowsAtOnce, fits, own_device, release
from shared.diffusion.loading.experts import take_rows
from shared.diffusion.loading.models import Conditions, ModelAdapter, repeat_rows
from shared.diffusion.policy import LoadedPolicy, load_policy, sampling_plan
from shared.diffusion.sampling.decoding import decoded
from shared.diffusion.sampling.encoding import TextEncoders
from shared.diffusion.sampling.sampler import Denoising, Velocity
from shared.learning.seeds import derive
from shared.models.memory import Residence
from shared.recipe.recipe import Recipe

Media = npt.NDArray[np.uint8]
"""(n, C, H, W), or videos (n, F, C, H, W)"""

OnProgress = Callable[[int, int], None]
"""Gets the number of prompts or steps done, and of all of them."""

Row = tuple[str, bytes | None, str | None]
"""A prompt, the file of its source image, and its own negative prompt."""

PROMPTS_AT_ONCE = 4


class SamplingStopped(Exception):
    """Raised when sampling is stopped on request."""


class Sampler:
    """Holds the network and samples it with its current weights."""

    def __init__(
        self, recipe: Recipe, stopping: threading.Event | None = None, *,
        progress: OnProgress | None = None, on_step: OnProgress | None = None,
        rows: Iterable[Row] = (), memory: Residence | None = None,
    ) -> None:  # fmt: skip
        """Encode prompts, let go of the text encoders, and load the recipe's network and decoder. A
        device to which the network is streamed is taken to have no room for text encoders: they run
        on the CPU.

        Args:
            stopping: when it is set, `sample` raises `SamplingStopped`, also in another thread.
            progress: is called by `sample`.
            on_step: is called after each denoising step of prompts that are sampled together.
            rows: prompts that are encoded now; others are encoded when they are sampled, with
                the network in memory.
            memory: where the network's blocks are; by default where rollout has them, which
                changes no sample.
        """
        torch.set_num_threads(recipe.rollout.threads)
        self._recipe = recipe
        self._conditions = dict[Row, Conditions]()
        holding = replace(recipe.trainer_holding, memory=memory or recipe.holding.memory)
        self._encodes_on = torch.device("cpu") if holding.memory == "streamed" else own_device()
        self._encode(rows)
        self._policy: LoadedPolicy = load_policy(
            recipe, {"transformer", "decoder"}, holding=holding
        )
        self._at_once = RowsAtOnce(self._policy.device)
        self._stopping = stopping or threading.Event()
        self._progress = progress or (lambda done, all_of_them: None)
        self._on_step = on_step or (lambda done, all_of_them: None)

    @property
    def model(self) -> ModelAdapter:
        return self._policy.model

    def sample(
        self, prompts: Sequence[str], *, num_each: int, seed: int,
        sources: Sequence[bytes | None] | None = None,
        negatives: Sequence[str | None] | None = None,
    ) -> Media:  # fmt: skip
        """Sample each prompt ``num_each`` times, ordered by prompt. The noise of a sample depends
        only on the seed and on the numbers of the prompt and the sample. ``sources`` are the files
        of the prompts' source images, ``negatives`` their own negative prompts."""
        chunks = []
        none = [None] * len(prompts)
        rows: list[Row] = list(zip(prompts, sources or none, negatives or none, strict=True))
        self._encode(rows)
        for first in range(0, len(prompts), PROMPTS_AT_ONCE):
            self._progress(first, len(prompts))
            some = rows[first : first + PROMPTS_AT_ONCE]
            with fits(self._policy.device, "sampling for an evaluation", MEMORY_REMEDY):
                chunks.append(self._sample(some, first, num_each, seed))
        self._progress(len(prompts), len(prompts))
        return np.concatenate(chunks)

    def _encode(self, rows: Iterable[Row]) -> None:
        """Encodes those that are not encoded yet, and lets go of the text encoders."""
        missing = [row for row in dict.fromkeys(rows) if row not in self._conditions]
        if missing:
            encoders = TextEncoders(self._recipe, self._encodes_on)
            self._conditions |= {row: encoders.encoded(*row) for row in missing}
            del encoders
            release(self._encodes_on)

    def _sample(self, rows: Sequence[Row], first: int, num_each: int, seed: int) -> Media:
        """Samples as many prompts at once as have texts of one length."""
        conditions = [self._conditions[row] for row in rows]
        batches, done = [], 0
        for _, alike in groupby(conditions, key=_shapes):
            some = list(alike)
            batches.append(self._sample_encoded(some, first + done, num_each, seed))
            done += len(some)
        return np.concatenate(batches)

    def _sample_encoded(
        self, conditions: Sequence[Conditions], first: int, num_each: int, seed: int
    ) -> Media:
        table, model = self._recipe.model, self.model
        rows = {
            name: torch.cat([repeat_rows(one, num_each)[name] for one in conditions])
            for name in conditions[0]
        }
        denoising = Denoising(
            plan := sampling_plan(self._recipe, window_start=None),
            seeds=[
                noise_seed(seed, number, index)
                for number in range(first, first + len(conditions))
                for index in range(num_each)
            ],
            shape=model.latent_shape(height=table.height, width=table.width, frames=table.frames),
            device=self._policy.device,
        )
        velocity = self._velocity(rows)
        while not denoising.done:
            denoising.advance(velocity)
            self._on_step(denoising.num_steps_done, len(plan.sigmas) - 1)
        media = decoded(model, denoising.latents, self._policy.device)
        return np.asarray(media.numpy(), dtype=np.uint8)

    def _velocity(self, rows: Conditions) -> Velocity:
        guidance = self._recipe.model.guidance

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            if self._stopping.is_set():
                raise SamplingStopped
            return self._at_once.run(
                len(latents),
                lambda some: self.model.velocity(
                    latents[some], sigma[some], take_rows(rows, some), guidance=guidance
                ),
            )

        return velocity


def _shapes(conditions: Conditions) -> list[tuple[str, torch.Size]]:
    return sorted((name, tensor.shape) for name, tensor in conditions.items())


def noise_seed(seed: int, prompt: int, index: int) -> int:
    """Return the seed of the noise of one sample of a prompt."""
    return derive(seed, "evaluation", prompt, index)
