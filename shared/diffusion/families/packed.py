"""Images whose network takes tokens of 2 x 2 latents."""

from torch import Tensor

from shared.diffusion.families.base import Family


class PackedImages(Family):
    """A network that is given `pack`ed latents."""

    @property
    def pixels_per_token(self) -> int:
        return int(2 * self.pipeline.vae_scale_factor)

    def shape_of(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return (self.config.in_channels // 4, height // factor, width // factor)


def pack(latents: Tensor) -> Tensor:
    """(B, C, h, w) to (B, h/2 w/2, 4 C): a token for every 2 x 2 latents, channels outermost."""
    rows, channels, height, width = latents.shape
    patches = latents.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(rows, height * width // 4, channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`, to (B, C, ``height``, ``width``)."""
    rows, _, channels = tokens.shape
    patches = tokens.reshape(rows, height // 2, width // 2, channels // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, channels // 4, height, width)
