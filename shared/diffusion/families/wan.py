"""Wan 2.1, and 2.2 with an expert for high and one for low noise: text-to-video."""

import torch
from torch import Tensor, nn

from shared.diffusion.experts import LOW, Experts
from shared.diffusion.families.base import NEGATIVE, Family, standardised
from shared.diffusion.models import Conditions
from shared.models.sigmas import TRAIN_TIMESTEPS


class Wan(Family):
    def network(self) -> nn.Module:
        second = getattr(self.pipeline, LOW, None)
        if second is None:
            return super().network()
        boundary = self.pipeline.config.boundary_ratio
        experts = Experts(self.pipeline.transformer, second, boundary=boundary)
        return experts.requires_grad_(False).eval()

    def strength(self, guidance: float, sigma: Tensor, like: Tensor) -> float | Tensor:
        if self.guidance_2 is None or not isinstance(self.transformer, Experts):
            return guidance
        is_high = self.transformer.is_high(_timestep(sigma)).reshape(-1, *[1] * (like.dim() - 1))
        return torch.where(is_high, guidance, self.guidance_2).to(like)

    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        text, empty = self.pipeline.encode_prompt(
            prompt, "", do_classifier_free_guidance=negative, max_sequence_length=self.text_tokens
        )
        return {"text": text, NEGATIVE + "text": empty} if negative else {"text": text}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return self.run(latents, _timestep(sigma), conditions)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video: Tensor = vae.decode(standardised(latents, vae), return_dict=False)[0]
        return video.transpose(1, 2)


def _timestep(sigma: Tensor) -> Tensor:
    return sigma * TRAIN_TIMESTEPS
