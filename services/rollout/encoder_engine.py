"""Encodes prompts with the text part of the model alone."""

import asyncio

import torch

from shared.diffusion.device import fits
from shared.diffusion.models import load_model
from shared.diffusion.policy import REMEDY, set_matmul_precision
from shared.diffusion.tensors import pack
from shared.recipe.recipe import Recipe

SMALLER = 'use a GPU with more memory, encoder.device = "cpu" or model.dtype = "bfloat16"'


class EncoderEngine:
    """A `services.rollout.encoder.PromptEncoder` on this process's device."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises OutOfMemory if the text part does not fit."""
        torch.set_num_threads(recipe.encoder.threads)
        table = recipe.model
        self._guidance = table.guidance
        self._device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        set_matmul_precision(recipe, self._device)
        with fits(self._device, "loading text of the model", REMEDY):
            self._model = load_model(
                table.folder,
                {"text"},
                device=self._device,
                dtype=getattr(torch, table.dtype),
                max_text_tokens=table.text_tokens,
            )

    async def conditions(self, prompt: str) -> bytes:
        """Returns what a device that generates would have encoded itself, byte for byte on the same
        type of device."""
        return await asyncio.to_thread(self._conditions, prompt)

    def _conditions(self, prompt: str) -> bytes:
        with fits(self._device, "encoding a prompt", SMALLER):
            return pack(self._model.encode(prompt, guidance=self._guidance))
