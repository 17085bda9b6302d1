"""Qwen-Image: text-to-image, tokens of 2 x 2 latents, rescaled guidance; and its editing model,
Qwen-Image-Edit, whose text encoder sees the source image, and whose tokens are followed by those of
the source's latents."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from shared.diffusion.families.base import (
    NEGATIVE,
    Family,
    as_picture,
    in_model_space,
    normalised,
    pack,
    standardised,
    unpack,
)
from shared.diffusion.models import IMAGE, Conditions, Part
from shared.errors import UserError
from shared.models.families import FamilySpec

IMAGE_SIGN = "<|image_pad|>"
"""Stands in a text for a piece of the image."""


class QwenImage(Family):
    @property
    def lora_excluded(self) -> tuple[str, ...]:
        # What the last block makes of the text is not used: it never has a gradient.
        last = f"transformer_blocks.{self.config.num_layers - 1}"
        return tuple(
            f"{last}.{layer}" for layer in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp")
        )

    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        text = {"text": self._text(prompt)}
        return text if negative is None else {**text, NEGATIVE + "text": self._text(negative)}

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        rows, _, height, width = latents.shape
        tokens, grid = pack(latents), [(1, height // 2, width // 2)]
        if IMAGE in conditions:
            source = conditions[IMAGE]
            grid.append((1, source.shape[-2] // 2, source.shape[-1] // 2))
            tokens = torch.cat([tokens, pack(source).to(tokens.dtype)], dim=1)
        made = self.run(tokens, sigma, conditions, img_shapes=[grid] * rows)
        return unpack(made[:, : height * width // 4], height, width)

    def guided(
        self, unconditional: Tensor, conditional: Tensor, guidance: float | Tensor
    ) -> Tensor:
        """Scales every token to the length that it has with the prompt alone: (B, C, h, w)."""
        height, width = conditional.shape[-2:]
        alone = pack(conditional)
        both = pack(super().guided(unconditional, conditional, guidance))
        scale = alone.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True)
        return unpack(both * scale, height, width)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video: Tensor = vae.decode(standardised(latents.unsqueeze(2), vae), return_dict=False)[0]
        return video[:, :, 0]

    def _text(self, prompt: str) -> Tensor:
        """Encodes a prompt to (1, L, width), without padding."""
        text: Tensor = self.pipeline.encode_prompt(prompt, max_sequence_length=self.text_tokens)[0]
        return text


class QwenImageEdit(QwenImage):
    leaves_out = ("processor",)

    @classmethod
    def load(cls, folder: Path, spec: FamilySpec, parts: set[Part], **given: Any) -> Self:
        made = super().load(folder, spec, parts, **given)
        if "text" in parts:
            made.pipeline.processor = TextAndImage.load(folder, made.pipeline.tokenizer)
        return made

    def encode_edit(
        self, prompt: str, image: Tensor, *, negative: str | None, frames: int
    ) -> Conditions:
        vae = self.pipeline.vae
        pixels = in_model_space(image).to(vae.dtype).unsqueeze(2)
        held = vae.encode(pixels).latent_dist.mode()
        conditions = {
            "text": self._text_beside(prompt, image),
            IMAGE: normalised(held, vae)[:, :, 0].to(self.dtype),
        }
        if negative is not None:
            conditions[NEGATIVE + "text"] = self._text_beside(negative, image)
        return conditions

    def _text_beside(self, prompt: str, image: Tensor) -> Tensor:
        """Encodes an image (1, 3, H, W), uint8, and a prompt after it to (1, L, width), without
        padding; raises UserError if the image alone is as long as the text may be."""
        picture = as_picture(image)
        tokens = self.pipeline.processor.num_tokens(picture)
        if tokens >= self.text_tokens:
            raise UserError(
                f"model.text_tokens: the source image alone is {tokens} tokens, and "
                f"{self.text_tokens} are allowed; set it to {tokens + 256} or more"
            )
        text: Tensor = self.pipeline.encode_prompt(prompt, picture)[0]
        return text[:, : self.text_tokens]


@dataclass(frozen=True)
class TextAndImage:
    """Makes of texts, and of an image in each, what Qwen2.5-VL takes: as transformers'
    Qwen2VLProcessor, which also loads a processor of videos, and for that needs torchvision."""

    tokenizer: Any
    images: Any
    """Transformers' Qwen2VLImageProcessor."""

    @classmethod
    def load(cls, folder: Path, tokenizer: Any) -> "TextAndImage":
        """Raises UserError if the folder has no settings of the image's processor."""
        from transformers import Qwen2VLImageProcessor

        try:
            images = Qwen2VLImageProcessor.from_pretrained(
                folder / "processor", local_files_only=True
            )
        except OSError as error:
            raise UserError(
                f"model.folder: {folder} has no processor/preprocessor_config.json; choose a "
                "complete model"
            ) from error
        return cls(tokenizer, images)

    def num_tokens(self, picture: Any) -> int:
        """Returns the number of tokens that an image is in a text."""
        patches = self.images(images=picture, return_tensors="pt")["image_grid_thw"].prod()
        return int(patches // self.images.merge_size**2)

    def __call__(self, text: list[str], images: Any, **given: Any) -> Any:
        """Returns token ids, their mask and the patches of the image, which stands in each text at
        its sign."""
        seen = self.images(images=images, return_tensors="pt")
        signs = IMAGE_SIGN * self.num_tokens(images)
        told = self.tokenizer([each.replace(IMAGE_SIGN, signs) for each in text], **given)
        return type(told)({**told, **seen})
