"""Wan 2.1: text-to-video."""

from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family, standardised
from shared.diffusion.models import Conditions


class Wan(Family):
    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        text, empty = self.pipeline.encode_prompt(
            prompt, "", do_classifier_free_guidance=negative, max_sequence_length=self.text_tokens
        )
        return {"text": text, NEGATIVE + "text": empty} if negative else {"text": text}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return self.run(latents, sigma * 1000, conditions)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video: Tensor = vae.decode(standardised(latents, vae), return_dict=False)[0]
        return video.transpose(1, 2)
