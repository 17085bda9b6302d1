"""Encodes prompts with the text part of the model alone, or with its decoder's other half where
they have source images."""

import asyncio

import torch

from shared.diffusion.device import choose_kernels, fits, own_device
from shared.diffusion.encoding import check_encoders, encoded
from shared.diffusion.models import load_model
from shared.diffusion.policy import REMEDY
from shared.diffusion.tensors import pack
from shared.models.catalogue import encoding_parts
from shared.recipe.recipe import Recipe

SMALLER = 'use a GPU with more memory, encoder.device = "cpu" or model.dtype = "bfloat16"'


class EncoderEngine:
    """A `services.rollout.encoder.PromptEncoder` on this process's device."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises OutOfMemory if the text part does not fit."""
        torch.set_num_threads(recipe.encoder.threads)
        table = recipe.model
        self._recipe = recipe
        self._device = own_device()
        choose_kernels(self._device, table.matmul_precision)
        with fits(self._device, "loading text of the model", REMEDY):
            self._model = load_model(
                table.folder,
                set(encoding_parts(table.folder)),
                device=self._device,
                dtype=getattr(torch, table.dtype),
                max_text_tokens=table.text_tokens,
            )
            check_encoders(self._model, recipe)

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        """Returns what a device that generates would have encoded itself, byte for byte on the same
        type of device."""
        return await asyncio.to_thread(self._conditions, prompt, source, negative)

    def _conditions(self, prompt: str, source: bytes | None, negative: str | None) -> bytes:
        with fits(self._device, "encoding a prompt", SMALLER):
            return pack(encoded(self._model, self._recipe, prompt, source, negative))
