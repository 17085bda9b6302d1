"""Videos: latents with a dimension of frames."""

from typing import Any

import torch
from torch import Tensor

from shared.diffusion.families.base import Family
from shared.errors import UserError


class Videos(Family):
    @property
    def pixels_per_token(self) -> int:
        patch = self.config.patch_size
        side = patch if isinstance(patch, int) else patch[1]  # or (frames, rows, columns)
        return int(self.pipeline.vae_scale_factor_spatial * side)

    def shape_of(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor_spatial
        return (
            self.config.in_channels,
            _latent_frames(frames, self.pipeline.vae_scale_factor_temporal),
            height // factor,
            width // factor,
        )


def standardised(latents: Tensor, vae: Any) -> Tensor:
    """Latents (B, C, F, h, w) as a decoder takes them: times its deviations, plus its means."""
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents * std + mean


def _latent_frames(frames: int, factor: int) -> int:
    """Raises UserError if the decoder makes no video of so many frames."""
    if (frames - 1) % factor:
        below = (frames - 1) // factor * factor + 1
        raise UserError(
            f"model.frames: {frames} is not a multiple of {factor} plus 1; the nearest are {below} "
            f"and {below + factor}"
        )
    return (frames - 1) // factor + 1
