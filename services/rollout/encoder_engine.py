"""Encodes prompts with the text part of the model alone, or with its decoder's other half where
they have source images."""

import asyncio

import torch

from shared.diffusion.sampling.encoding import TextEncoders
from shared.diffusion.sampling.tensors import pack
from shared.recipe.recipe import Recipe


class EncoderEngine:
    """A `services.rollout.encoder.PromptEncoder` on this process's device."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises OutOfMemory if the text part does not fit."""
        torch.set_num_threads(recipe.encoder.threads)
        self._encoders = TextEncoders(recipe)

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        """Returns what a device that generates would have encoded itself, byte for byte on the same
        type of device."""
        return await asyncio.to_thread(self._conditions, prompt, source, negative)

    def _conditions(self, prompt: str, source: bytes | None, negative: str | None) -> bytes:
        return pack(self._encoders.encoded(prompt, source, negative))
