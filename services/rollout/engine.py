"""The generating half of a rollout worker: one policy version, and samples made with it."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.contracts import GenerateFragment
from shared.diffusion.lora import WeightsInUse, load_adapter
from shared.diffusion.models import Conditions, repeat_rows
from shared.diffusion.policy import load_policy, sampling_plan
from shared.diffusion.sampler import Denoising, denoise
from shared.diffusion.tensors import pack, pack_trajectory, unpack
from shared.recipe import Recipe
from shared.seeds import sample_seed


@dataclass(frozen=True, slots=True)
class Generated:
    trajectory: bytes
    media: bytes
    weights_digest: str
    """Of the parameters that the samples were made with."""
    seconds: float


class RolloutEngine:
    """Not thread-safe: one fragment at a time, as a device allows."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(recipe.rollout.threads)
        self._recipe = recipe
        loaded = load_policy(recipe, {"transformer", "text", "decoder"})
        self._model, self._device = loaded.model, loaded.device
        self._weights = WeightsInUse(self._model.transformer)
        self._shape = self._model.latent_shape(height=recipe.model.height, width=recipe.model.width)
        self._conditions: dict[str, Conditions] = {}

    @property
    def device(self) -> str:
        return str(self._device)

    def load(self, weights: bytes) -> str:
        """Put these adapter weights in use; returns the digest of what the network then holds."""
        load_adapter(self._model.transformer, unpack(weights))
        return self._weights.digest()

    def weights_digest(self) -> str:
        return self._weights.digest()

    def conditions(self, prompt: str) -> bytes:
        """What the network is told about ``prompt``, computed once per prompt."""
        if prompt not in self._conditions:
            encoded = self._model.encode(prompt, guidance=self._recipe.model.guidance)
            self._conditions[prompt] = encoded
        return pack(self._conditions[prompt])

    def generate(self, task: GenerateFragment) -> Generated:
        began = time.monotonic()
        fragment, recipe = task.fragment, self._recipe
        rows = repeat_rows(self._conditions[task.prompt.text], fragment.num_samples)
        denoising = Denoising(
            sampling_plan(recipe.sampling, window_start=task.window_start),
            seeds=[
                sample_seed(recipe.run.seed, fragment.batch, fragment.group, sample)
                for sample in fragment.samples
            ],
            shape=self._shape,
            device=self._device,
        )
        latents = denoise(
            lambda latents, sigma: self._model.velocity(
                latents, sigma, rows, guidance=recipe.model.guidance
            ),
            denoising,
        )
        return Generated(
            trajectory=pack_trajectory(denoising.trajectory()),
            media=pack({"images": to_uint8(self._model.decode(latents))}),
            weights_digest=self._weights.digest(),
            seconds=time.monotonic() - began,
        )


def to_uint8(images: Tensor) -> Tensor:
    """(B, C, H, W) in [0, 1] to 0..255, rounded as image files are."""
    return (images * 255).round().clamp(0, 255).to(torch.uint8).cpu()
