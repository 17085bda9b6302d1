"""Reads generated media, and checks them, before they are scored."""

from dataclasses import dataclass
from typing import Self

import safetensors.numpy
from safetensors import SafetensorError

from services.reward.scorer import Media
from shared.errors import ContractError
from shared.recipe.recipe import Recipe
from shared.store.tensor_header import check_header

NAME = "images"


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Holds the size of one sample in pixels."""

    height: int
    width: int
    frames: int = 1

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        model = recipe.model
        return cls(height=model.height, width=model.width, frames=model.frames)


def read_media(data: bytes, num_samples: int, size: MediaSize | None = None) -> Media:
    """Reads images (n, C, H, W) or videos (n, F, C, H, W) of so many samples, of ``size`` if given.

    Raises:
        ContractError: if the object holds anything else.
    """
    check_header(data, dtypes=("U8",))
    try:
        media: Media = safetensors.numpy.load(data)[NAME]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ContractError(f"these media hold no {NAME}") from error
    if media.ndim not in (4, 5) or len(media) != num_samples or 0 in media.shape:
        raise ContractError(
            f"media of shape {list(media.shape)} are no images or videos of {num_samples} samples"
        )
    if size is not None:
        _check_size(media, size)
    return media


def _check_size(media: Media, size: MediaSize) -> None:
    frames = media.shape[1] if media.ndim == 5 else 1
    found = (*media.shape[-2:], frames)
    wanted = (size.height, size.width, size.frames)
    if found != wanted or media.shape[-3] not in (1, 3, 4):
        raise ContractError(
            f"media of shape {list(media.shape)}; the recipe makes {size.height} x {size.width} "
            f"pixels, {size.frames} frames"
        )
