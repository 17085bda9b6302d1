"""Z-Image: text-to-image, texts and images as lists of samples, classifier-free guidance."""

import torch
from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family, decode_image
from shared.diffusion.models import Conditions
from shared.models.sigmas import TRAIN_TIMESTEPS


class ZImage(Family):
    @property
    def lora_excluded(self) -> tuple[str, ...]:
        # The refiners of image and text have layers of the same names.
        return ("noise_refiner", "context_refiner")

    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        text, empty = self.pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=negative, max_sequence_length=self.text_tokens
        )
        conditions = {"text": text[0].unsqueeze(0)}
        return {**conditions, NEGATIVE + "text": empty[0].unsqueeze(0)} if negative else conditions

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        # As the pipeline rounds it: the network takes sines of 1000 times this.
        time = (TRAIN_TIMESTEPS - sigma * TRAIN_TIMESTEPS) / TRAIN_TIMESTEPS
        made: list[Tensor] = self.transformer(
            list(latents.to(self.dtype).unsqueeze(2).unbind(0)),
            time,
            list(conditions["text"].to(self.dtype).unbind(0)),
            return_dict=False,
        )[0]
        return -torch.stack(made).squeeze(2)

    def guided(
        self, unconditional: Tensor, conditional: Tensor, guidance: float | Tensor
    ) -> Tensor:
        return conditional + (guidance - 1) * (conditional - unconditional)

    def decode_latents(self, latents: Tensor) -> Tensor:
        return decode_image(latents, self.pipeline.vae)
