"""Stable Diffusion 3 and 3.5, and every smaller model of their family (the digits demo's)."""

from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family
from shared.diffusion.loading.models import Conditions


class StableDiffusion3(Family):
    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        tokenizer, tokens = self.pipeline.tokenizer_3, self.text_tokens
        if tokenizer:  # the T5 encoder may be left out of a folder
            tokens = min(tokens, tokenizer.model_max_length)
        text, empty_text, pooled, empty_pooled = self.pipeline.encode_prompt(
            prompt,
            prompt,
            prompt,
            negative_prompt=negative,
            do_classifier_free_guidance=negative is not None,
            max_sequence_length=tokens,
        )
        conditions = {"text": text, "pooled": pooled}
        if negative is not None:
            conditions |= {NEGATIVE + "text": empty_text, NEGATIVE + "pooled": empty_pooled}
        return conditions

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return self.run(latents, sigma * 1000, conditions)
