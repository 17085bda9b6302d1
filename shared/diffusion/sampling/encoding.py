"""Encodes a prompt, and its source image, as a recipe's runs do."""

import torch
from torch import Tensor

from shared.diffusion.loading.device import choose_kernels, fits, own_device
from shared.diffusion.loading.models import Conditions, ModelAdapter, load_model, taken
from shared.errors import ContractError, UserError
from shared.learning.pictures import decoded
from shared.models.catalogue import encoding_parts
from shared.recipe.networks import negative_prompt
from shared.recipe.recipe import Recipe

PROBE = "a photo of a red apple on a table"
"""Prompt that every process encodes before it is ready."""
MEMORY_REMEDY = 'use a GPU with more memory, encoder.device = "cpu" or model.dtype = "bfloat16"'


class TextEncoders:
    """Holds only what encodes prompts: the text part of the model, and its decoder's other half
    where prompts have source images."""

    def __init__(self, recipe: Recipe, device: torch.device | None = None) -> None:
        """Loads them on a device, by default this process's.

        Raises:
            OutOfMemory: if they do not fit.
        """
        table = recipe.model
        self._recipe, self._device = recipe, device or own_device()
        choose_kernels(self._device, table.matmul_precision)
        with fits(self._device, "loading text of the model", MEMORY_REMEDY):
            self._model = load_model(
                table.folder,
                set(encoding_parts(table.folder)),
                device=self._device,
                dtype=getattr(torch, table.dtype),
                max_text_tokens=table.text_tokens,
            )
            check_encoders(self._model, recipe)

    def encoded(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> Conditions:
        """Returns a prompt's conditions, as `encoded` does."""
        with fits(self._device, "encoding a prompt", MEMORY_REMEDY):
            return encoded(self._model, self._recipe, prompt, source, negative)


def encoded(
    model: ModelAdapter,
    recipe: Recipe,
    prompt: str,
    source: bytes | None = None,
    negative: str | None = None,
) -> Conditions:
    """Returns the conditions of a prompt; ``source`` is the file of the image that it edits, which
    is scaled to the recipe's size, and ``negative`` its own negative prompt.

    Raises:
        ContractError: if it is no image, or missing, or the model takes none; or if the prompt
            cannot be encoded.
    """
    table = recipe.model
    if model.image_channels is None:
        if source is not None:
            raise ContractError("the prompt has a source image, and this model takes none")
        return _encoded(model, recipe, prompt, negative)
    if source is None:
        raise ContractError("the prompt has no source image, and this model edits images")
    try:
        pixels = decoded(
            source, height=table.height, width=table.width, channels=model.image_channels,
            background=recipe.data.background,
        )  # fmt: skip
    except ContractError as error:
        raise ContractError(f"the prompt's source image {error}") from error
    return _encoded(model, recipe, prompt, negative, torch.from_numpy(pixels)[None])


def check_encoders(model: ModelAdapter, recipe: Recipe) -> None:
    """Raises UserError unless the model encodes a prompt, and a source image if it takes one, to
    finite values: otherwise every prompt of the run would fail."""
    table, channels = recipe.model, model.image_channels
    image = None
    if channels is not None:
        image = torch.full((1, channels, table.height, table.width), 127, dtype=torch.uint8)
    try:
        conditions = _encoded(model, recipe, PROBE, None, image)
        not_finite = [name for name, each in conditions.items() if not each.isfinite().all()]
        if not_finite:
            raise ContractError(f"its {not_finite[0]} is not finite")
    except ContractError as error:
        raise UserError(
            f"model.folder: {table.folder}: {error}; fetch or copy the model again"
        ) from error


def _encoded(
    model: ModelAdapter,
    recipe: Recipe,
    prompt: str,
    negative: str | None,
    image: Tensor | None = None,
) -> Conditions:
    table = recipe.model
    away = negative_prompt(recipe) if negative is None else negative
    with taken(ContractError, "the prompt cannot be encoded", (Exception,)):
        return model.encode(
            prompt, guidance=table.guidance, image=image, frames=table.frames, negative_prompt=away
        )
