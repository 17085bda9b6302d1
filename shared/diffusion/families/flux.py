"""FLUX.1: text-to-image, tokens of 2 x 2 latents, guidance as an input of the network."""

import torch
from torch import Tensor

from shared.diffusion.families.base import Family, decode_image, pack, unpack
from shared.diffusion.models import Conditions


class Flux(Family):
    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        text, pooled, _ = self.pipeline.encode_prompt(
            prompt, prompt, max_sequence_length=self.text_tokens
        )
        return {"text": text, "pooled": pooled}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        rows, _, height, width = latents.shape
        text = conditions["text"].to(self.dtype)
        embeds = self.config.guidance_embeds
        tokens = self.run(
            pack(latents),
            sigma,
            conditions,
            guidance=sigma.new_full((rows,), guidance) if embeds else None,
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=_places(height // 2, width // 2, text),
        )
        return unpack(tokens, height, width)

    def decode_latents(self, latents: Tensor) -> Tensor:
        return decode_image(latents, self.pipeline.vae)


def _places(rows: int, columns: int, like: Tensor) -> Tensor:
    """Returns (tokens, 3): 0, row and column of each token."""
    grid = torch.zeros(rows, columns, 3, device=like.device)
    grid[..., 1] += torch.arange(rows, device=like.device)[:, None]
    grid[..., 2] += torch.arange(columns, device=like.device)
    return grid.flatten(0, 1).to(like)
