"""FLUX.2: text-to-image, a token for each latent. [dev] takes guidance as an input of the network;
[klein], the base models, has classifier-free guidance."""

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shared.diffusion.families.base import NEGATIVE, Family
from shared.diffusion.loading.models import Conditions, ModelPart
from shared.models.families import FamilySpec


class Flux2(Family):
    """Latents have the form of its network's input: the decoder's, with 2 x 2 of them as channels
    of one."""

    # [dev] names PixtralProcessor, which also loads images and for that needs torchvision.
    leaves_out: ClassVar[tuple[str, ...]] = ("tokenizer",)

    @classmethod
    def load(cls, folder: Path, spec: FamilySpec, parts: set[ModelPart], **given: Any) -> Self:
        from transformers import AutoTokenizer

        family = super().load(folder, spec, parts, **given)
        if "text" in parts:
            family.pipeline.tokenizer = AutoTokenizer.from_pretrained(
                folder / "tokenizer", local_files_only=True
            )
        return family

    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        return {"text": self.encode_text(prompt)}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        height, width = latents.shape[-2:]
        text = conditions["text"]
        tokens = self.run(
            latents.flatten(2).transpose(1, 2),
            sigma,
            conditions,
            guidance=sigma.new_full(sigma.shape, guidance) if self.config.guidance_embeds else None,
            img_ids=_places((1, height, width, 1), latents.device),
            txt_ids=_places((1, 1, 1, text.shape[1]), latents.device),
        )
        return tokens.transpose(1, 2).reshape(*latents.shape[:2], height, width)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        norm = vae.bn
        mean, variance = (
            each.view(1, -1, 1, 1).to(latents) for each in (norm.running_mean, norm.running_var)
        )
        unscaled = latents * torch.sqrt(variance + vae.config.batch_norm_eps) + mean
        pixels: Tensor = vae.decode(unpatched(unscaled), return_dict=False)[0]
        return pixels


class Flux2Klein(Flux2):
    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        text = super().encode_prompt(prompt, negative=negative)
        return text if negative is None else {**text, NEGATIVE + "text": self.encode_text(negative)}


def unpatched(latents: Tensor) -> Tensor:
    """(B, 4 C, h, w) to (B, C, 2 h, 2 w)."""
    rows, channels, height, width = latents.shape
    patches = latents.reshape(rows, channels // 4, 2, 2, height, width)
    return patches.permute(0, 1, 4, 2, 5, 3).reshape(rows, channels // 4, 2 * height, 2 * width)


def _places(sizes: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Returns (tokens, 4): image, row, column and place in the text of each token."""
    return torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))
