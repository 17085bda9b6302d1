"""FLUX.1: text-to-image, tokens of 2 x 2 latents, guidance as an input of the network; and its
editing model, FLUX.1 Kontext, which appends the tokens of the source image."""

import torch
from torch import Tensor

from shared.diffusion.families.base import Family
from shared.diffusion.families.latents import in_model_space, pack, unpack
from shared.diffusion.loading.models import IMAGE, Conditions


class Flux(Family):
    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        text, pooled, _ = self.pipeline.encode_prompt(
            prompt, prompt, max_sequence_length=self.text_tokens
        )
        return {"text": text, "pooled": pooled}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        height, width = latents.shape[-2:]
        places = _places(height // 2, width // 2, conditions["text"].to(self.dtype))
        tokens = self.velocities(pack(latents), places, sigma, conditions, guidance)
        return unpack(tokens, height, width)

    def velocities(
        self, tokens: Tensor, places: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        """Runs the network: velocities (B, N, C) of tokens (B, N, C) at places (N, 3)."""
        text = conditions["text"]
        embeds = self.config.guidance_embeds
        return self.run(
            tokens,
            sigma,
            conditions,
            guidance=sigma.new_full((len(tokens),), guidance) if embeds else None,
            txt_ids=places.new_zeros(text.shape[1], 3),
            img_ids=places,
        )


class FluxKontext(Flux):
    def encode_edit(
        self, prompt: str, image: Tensor, *, negative: str | None, frames: int
    ) -> Conditions:
        vae = self.pipeline.vae
        encoded = vae.encode(in_model_space(image).to(vae.dtype)).latent_dist.mode()
        latents = (encoded - vae.config.shift_factor) * vae.config.scaling_factor
        return {**self.encode_prompt(prompt, negative=negative), IMAGE: latents.to(self.dtype)}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        (height, width), source = latents.shape[-2:], conditions[IMAGE]
        like = conditions["text"].to(self.dtype)
        of_source = _places(source.shape[-2] // 2, source.shape[-1] // 2, like)
        of_source[:, 0] = 1
        own = pack(latents)
        tokens = torch.cat([own, pack(source).to(own.dtype)], dim=1)
        places = torch.cat([_places(height // 2, width // 2, like), of_source])
        velocities = self.velocities(tokens, places, sigma, conditions, guidance)
        return unpack(velocities[:, : own.shape[1]], height, width)


def _places(rows: int, columns: int, like: Tensor) -> Tensor:
    """Returns (tokens, 3): 0, row and column of each token."""
    grid = torch.zeros(rows, columns, 3, device=like.device)
    grid[..., 1] += torch.arange(rows, device=like.device)[:, None]
    grid[..., 2] += torch.arange(columns, device=like.device)
    return grid.flatten(0, 1).to(like)
