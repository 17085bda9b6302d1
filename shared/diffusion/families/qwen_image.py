"""Qwen-Image (text-to-image) and its editing model, Qwen-Image-Edit.

Tokens are 2 x 2 latents, and guidance is rescaled. In Qwen-Image-Edit the text encoder also reads
the source image, and the tokens of the source's latents follow the tokens of the sample."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from shared.diffusion.families.base import NEGATIVE, Family, at_least_float32, joined
from shared.diffusion.families.latents import (
    as_picture,
    in_model_space,
    normalised,
    pack,
    standardised,
    unpack,
)
from shared.diffusion.loading.models import IMAGE, Conditions, ModelPart
from shared.errors import UserError
from shared.models.families import FamilySpec

IMAGE_PLACEHOLDER = "<|image_pad|>"
"""Placeholder token for a patch of the image in a text."""
MAX_PADDING = 1 / 8
"""Maximum fraction of padding tokens for which both halves of guidance share one call. A GPU
computes padding like any token, and each call needs about 8,000 kernel launches."""


class QwenImage(Family):
    pads_text: ClassVar[bool] = False

    @staticmethod
    def prepare(network: nn.Module) -> nn.Module:
        from shared.diffusion.families.qwen_attention import HalvesAttention

        blocks: Any = network.transformer_blocks
        for block in blocks:
            block.attn.set_processor(HalvesAttention())
        return network

    @property
    def lora_excluded(self) -> tuple[str, ...]:
        # The text output of the last block is unused, so these layers have no gradient.
        last = f"transformer_blocks.{self.config.num_layers - 1}"
        return tuple(
            f"{last}.{layer}" for layer in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp")
        )

    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        text = {"text": self.encode_text(prompt)}
        return text if negative is None else {**text, NEGATIVE + "text": self.encode_text(negative)}

    def both(
        self, latents: Tensor, sigma: Tensor, empty: Conditions, prompt: Conditions, guidance: float
    ) -> tuple[Tensor, Tensor]:
        """Pads the shorter text if that adds few tokens. The decision depends only on the sample,
        so rollout and trainer decide equally."""
        lengths = empty["text"].shape[1], prompt["text"].shape[1]
        is_split = self.cfg_gradient == "conditional" and torch.is_grad_enabled()
        if is_split or not _is_padding_cheaper(
            lengths, [latents, *(prompt[n] for n in prompt if n == IMAGE)]
        ):
            return super().both(latents, sigma, empty, prompt, guidance)
        padded = [
            {**half, "text": nn.functional.pad(half["text"], (0, 0, 0, max(lengths) - length))}
            for half, length in zip((empty, prompt), lengths, strict=True)
        ]
        velocities = self._run(
            torch.cat([latents, latents]),
            torch.cat([sigma, sigma]),
            joined(*padded),
            attention_kwargs={"text_lengths": lengths},
        )
        unconditional, conditional = at_least_float32(velocities).chunk(2)
        return unconditional, conditional

    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return self._run(latents, sigma, conditions)

    def _run(self, latents: Tensor, sigma: Tensor, conditions: Conditions, **inputs: Any) -> Tensor:
        rows, _, height, width = latents.shape
        tokens, grid = pack(latents), [(1, height // 2, width // 2)]
        if IMAGE in conditions:
            source = conditions[IMAGE]
            grid.append((1, source.shape[-2] // 2, source.shape[-1] // 2))
            tokens = torch.cat([tokens, pack(source).to(tokens.dtype)], dim=1)
        velocities = self.run(tokens, sigma, conditions, img_shapes=[grid] * rows, **inputs)
        return unpack(velocities[:, : height * width // 4], height, width)

    def guided(
        self, unconditional: Tensor, conditional: Tensor, guidance: float | Tensor
    ) -> Tensor:
        """Rescales every token of the guided velocity to the norm of the conditional velocity.

        All velocities are (B, C, h, w).
        """
        height, width = conditional.shape[-2:]
        tokens = pack(conditional)
        guided = pack(super().guided(unconditional, conditional, guidance))
        scale = tokens.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack(guided * scale, height, width)

    def decode_latents(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        video: Tensor = vae.decode(standardised(latents.unsqueeze(2), vae), return_dict=False)[0]
        return video[:, :, 0]


def _is_padding_cheaper(lengths: tuple[int, int], images: list[Tensor]) -> bool:
    """Whether padding texts to equal length is cheaper than two calls.

    Args:
        images: latents of the sample and of its source image, (B, C, h, w).
    """
    tokens = sum(each.shape[-2] * each.shape[-1] // 4 for each in images)
    padding = max(lengths) - min(lengths)
    return 0 < padding <= MAX_PADDING * (2 * tokens + sum(lengths))


class QwenImageEdit(QwenImage):
    leaves_out = ("processor",)

    @classmethod
    def load(cls, folder: Path, spec: FamilySpec, parts: set[ModelPart], **given: Any) -> Self:
        family = super().load(folder, spec, parts, **given)
        if "text" in parts:
            family.pipeline.processor = TextAndImage.load(folder, family.pipeline.tokenizer)
        return family

    def encode_edit(
        self, prompt: str, image: Tensor, *, negative: str | None, frames: int
    ) -> Conditions:
        vae = self.pipeline.vae
        pixels = in_model_space(image).to(vae.dtype).unsqueeze(2)
        encoded = vae.encode(pixels).latent_dist.mode()
        conditions = {
            "text": self._encode_with_image(prompt, image),
            IMAGE: normalised(encoded, vae)[:, :, 0].to(self.dtype),
        }
        if negative is not None:
            conditions[NEGATIVE + "text"] = self._encode_with_image(negative, image)
        return conditions

    def _encode_with_image(self, prompt: str, image: Tensor) -> Tensor:
        """Encodes an image (1, 3, H, W), uint8, followed by a prompt, to (1, L, width).

        Raises:
            UserError: if the image has at least ``text_tokens`` tokens.
        """
        picture = as_picture(image)
        tokens = self.pipeline.processor.num_tokens(picture)
        if tokens >= self.text_tokens:
            raise UserError(
                f"model.text_tokens: the source image alone has {tokens} tokens, and "
                f"{self.text_tokens} are allowed; set the key to {tokens + 256} or more"
            )
        text: Tensor = self.pipeline.encode_prompt(prompt, picture)[0]
        return text[:, : self.text_tokens]


@dataclass(frozen=True)
class TextAndImage:
    """Processor of Qwen2.5-VL for texts with an image. It replaces transformers' Qwen2VLProcessor,
    which also loads a video processor and therefore needs torchvision."""

    tokenizer: Any
    images: Any
    """Transformers' Qwen2VLImageProcessor."""

    @classmethod
    def load(cls, folder: Path, tokenizer: Any) -> "TextAndImage":
        """Raises UserError if the folder has no configuration of the image processor."""
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
        """Returns the number of tokens of an image in a text."""
        patches = self.images(images=picture, return_tensors="pt")["image_grid_thw"].prod()
        return int(patches // self.images.merge_size**2)

    def __call__(self, text: list[str], images: Any, **given: Any) -> Any:
        """Returns token ids, their mask and the patches of the image. The placeholder in each text
        is replaced by one placeholder per token of the image."""
        image_inputs = self.images(images=images, return_tensors="pt")
        placeholders = IMAGE_PLACEHOLDER * self.num_tokens(images)
        text_inputs = self.tokenizer(
            [each.replace(IMAGE_PLACEHOLDER, placeholders) for each in text], **given
        )
        return type(text_inputs)({**text_inputs, **image_inputs})
