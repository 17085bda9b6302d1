"""Encodes a prompt, and its source image, as a recipe's runs do."""

import torch

from shared.diffusion.models import Conditions, ModelAdapter
from shared.errors import ContractError
from shared.learning.pictures import decoded
from shared.recipe.recipe import Recipe


def encoded(
    model: ModelAdapter, recipe: Recipe, prompt: str, source: bytes | None = None
) -> Conditions:
    """Returns the conditions of a prompt; ``source`` is the file of the image that it edits, which
    is scaled to the recipe's size.

    Raises:
        ContractError: if it is no image, or missing, or the model takes none.
    """
    table = recipe.model
    if model.image_channels is None:
        if source is not None:
            raise ContractError("the prompt has a source image, and this model takes none")
        return model.encode(prompt, guidance=table.guidance)
    if source is None:
        raise ContractError("the prompt has no source image, and this model edits images")
    try:
        pixels = decoded(
            source, height=table.height, width=table.width, channels=model.image_channels
        )
    except ContractError as error:
        raise ContractError(f"the prompt's source image {error}") from error
    image = torch.from_numpy(pixels)[None]
    return model.encode(prompt, guidance=table.guidance, image=image, frames=table.frames)
