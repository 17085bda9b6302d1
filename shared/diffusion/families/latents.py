"""Pixels and latents between the layouts of pipelines, networks and decoders."""

from typing import Any

import torch
from torch import Tensor


def pack(latents: Tensor) -> Tensor:
    """(B, C, h, w) to (B, h/2 w/2, 4 C): a token for every 2 x 2 latents, channels outermost."""
    rows, channels, height, width = latents.shape
    patches = latents.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(rows, height * width // 4, channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, h/2 w/2, 4 C) to (B, C, h, w), where ``height`` is h and ``width`` is w."""
    rows, _, channels = tokens.shape
    patches = tokens.reshape(rows, height // 2, width // 2, channels // 4, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, channels // 4, height, width)


def as_picture(image: Tensor) -> Any:
    """Pixels (1, 3, H, W), uint8, as an image of Pillow."""
    from PIL import Image

    return Image.fromarray(image[0].permute(1, 2, 0).cpu().numpy())


def in_model_space(image: Tensor) -> Tensor:
    """Pixels (B, C, H, W), uint8, to -1..1 in float32, as diffusers' image processors do."""
    return 2.0 * (image.float() / 255.0) - 1.0


def standardised(latents: Tensor, vae: Any) -> Tensor:
    """Latents (B, C, F, h, w) as a decoder takes them: times its deviations, plus its means."""
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents * std + mean


def normalised(encoded: Tensor, vae: Any) -> Tensor:
    """Latents (B, C, F, h, w) of an encoder as a network takes them; undoes `standardised`."""
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(encoded)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (encoded - mean) / std


def decode_image(latents: Tensor, vae: Any) -> Tensor:
    """Latents (B, C, h, w) to pixels (B, 3, H, W), by a decoder that shifts and scales them."""
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    pixels: Tensor = vae.decode(scaled, return_dict=False)[0]
    return pixels
