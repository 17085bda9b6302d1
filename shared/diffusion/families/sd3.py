"""Stable Diffusion 3 and 3.5, and every smaller model of their family (the digits demo's)."""

from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family
from shared.diffusion.families.latents import decode_image
from shared.diffusion.models import Conditions


class StableDiffusion3(Family):
    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        tokenizer, tokens = self.pipeline.tokenizer_3, self.text_tokens
        if tokenizer:  # the T5 encoder may be left out of a folder
            tokens = min(tokens, tokenizer.model_max_length)
        text, empty_text, pooled, empty_pooled = self.pipeline.encode_prompt(
            prompt, prompt, prompt, do_classifier_free_guidance=negative, max_sequence_length=tokens
        )
        conditions = {"text": text, "pooled": pooled}
        if negative:
            conditions |= {NEGATIVE + "text": empty_text, NEGATIVE + "pooled": empty_pooled}
        return conditions

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=conditions["text"].to(self.dtype),
            pooled_projections=conditions["pooled"].to(self.dtype),
            return_dict=False,
        )[0]
        return velocity

    def decode_latents(self, latents: Tensor) -> Tensor:
        return decode_image(latents, self.pipeline.vae)
