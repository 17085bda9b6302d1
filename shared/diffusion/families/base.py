"""What the adapters of all model families have in common: a diffusers pipeline, loaded in part."""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from shared.diffusion.models import Conditions, Part
from shared.errors import UserError

NEGATIVE = "negative_"
"""Begins the name of a condition of the empty prompt, for classifier-free guidance."""
JOINT_ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""Layers of a block in which image and text attend to each other."""
_TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


class Family(ABC):
    """Latents of a sample have channels first, then frames of a video, then rows and columns; a
    family whose network takes packed tokens packs and unpacks them in `forward`.
    """

    pipeline_name: ClassVar[str]
    """The class in diffusers."""
    lora_targets: ClassVar[tuple[str, ...]]
    lora_excluded: tuple[str, ...] = ()
    embeds_guidance: ClassVar[bool] = False
    """Whether the network is told the guidance, so that one forward pass is enough."""

    def __init__(
        self, pipeline: Any, *, device: torch.device, dtype: torch.dtype, text_tokens: int
    ) -> None:
        """``text_tokens``: where a prompt is cut off. A family without a text mask has one fixed
        length in sampling and training, and pads to it."""
        self.text_tokens = text_tokens
        self.pipeline = pipeline
        self.device = device
        self.dtype = dtype
        self.transformer: nn.Module = pipeline.transformer
        self.config: Any = pipeline.transformer.config

    @classmethod
    def load(
        cls,
        folder: Path,
        parts: set[Part],
        *,
        device: torch.device,
        dtype: torch.dtype,
        text_tokens: int,
    ) -> Self:
        """Raises UserError if the folder is not whole."""
        diffusers = _quiet_diffusers()
        pipeline_class = getattr(diffusers, cls.pipeline_name)
        left_out: dict[str, None] = {}
        if "text" not in parts:
            known = pipeline_class._get_signature_keys(pipeline_class)[0]
            left_out |= {name: None for name in (*_TEXT, *_TOKENIZERS) if name in known}
        if "decoder" not in parts:
            left_out |= {"vae": None}
        try:
            pipeline = pipeline_class.from_pretrained(
                folder,
                dtype={"vae": decoder_dtype(dtype), "default": dtype},
                local_files_only=True,
                **left_out,
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"model.folder: cannot load {folder}: {reason}") from error
        pipeline.set_progress_bar_config(disable=True)
        pipeline.to(device)
        pipeline.transformer.requires_grad_(False).eval()
        return cls(pipeline, device=device, dtype=dtype, text_tokens=text_tokens)

    def encode(self, prompt: str, *, guidance: float) -> Conditions:
        with torch.no_grad():
            conditions = self.encode_prompt(prompt, negative=self.doubles(guidance))
        return {name: tensor.detach().contiguous() for name, tensor in conditions.items()}

    @abstractmethod
    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        """``negative``: those of the empty prompt as well, by the same names after `NEGATIVE`."""

    def latent_shape(self, *, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Raises UserError if the model cannot make samples of that size."""
        if self.pipeline.vae is None:
            raise ValueError("the latent shape is the decoder's to say: load it as well")
        multiple = self.pixels_per_token
        for name, size in (("height", height), ("width", width)):
            if size % multiple:
                nearest = max(multiple, round(size / multiple) * multiple)
                raise UserError(
                    f"model.{name}: {size} is not a multiple of {multiple}; nearest is {nearest}"
                )
        return self.shape_of(height, width, frames)

    @property
    @abstractmethod
    def pixels_per_token(self) -> int:
        """Each way: height and width are multiples of it."""

    @abstractmethod
    def shape_of(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """Of the latents of one sample."""

    def doubles(self, guidance: float) -> bool:
        """Whether classifier-free guidance takes two rows for each sample."""
        return guidance > 1 and not self.embeds_guidance

    def velocity(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, *, guidance: float
    ) -> Tensor:
        if not self.doubles(guidance):
            return _at_least_float32(self.forward(latents, sigma, conditions, guidance))
        both = self.forward(
            torch.cat([latents, latents]), torch.cat([sigma, sigma]), _doubled(conditions), guidance
        )
        unconditional, conditional = _at_least_float32(both).chunk(2)
        return self.guided(unconditional, conditional, guidance)

    @abstractmethod
    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        """One pass of the network: (B, ...) from latents (B, ...), sigma (B,), conditions of B
        rows."""

    def guided(self, unconditional: Tensor, conditional: Tensor, guidance: float) -> Tensor:
        return unconditional + guidance * (conditional - unconditional)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        pixels = self.decode_latents(latents.to(decoder_dtype(self.dtype)))
        return (pixels.float() / 2 + 0.5).clamp(0, 1)

    @abstractmethod
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Images (B, C, H, W) or videos (B, F, C, H, W) in [-1, 1]."""


def decoder_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the decoder, beside a network of ``dtype``: in half precision its pixels are others."""
    return torch.promote_types(dtype, torch.float32)


def decode_image(latents: Tensor, vae: Any) -> Tensor:
    """By a decoder of images, whose latents are shifted and scaled."""
    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    pixels: Tensor = vae.decode(scaled, return_dict=False)[0]
    return pixels


def _doubled(conditions: Conditions) -> Conditions:
    """Those of the empty prompt, and then those of the prompt, as one batch."""
    return {
        name: torch.cat([conditions[NEGATIVE + name], tensor])
        for name, tensor in conditions.items()
        if not name.startswith(NEGATIVE)
    }


def _at_least_float32(velocity: Tensor) -> Tensor:
    return velocity.to(torch.promote_types(velocity.dtype, torch.float32))


def _quiet_diffusers() -> Any:
    """A log is no terminal: no progress bars, and no warnings of what is not used."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported

    import diffusers
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    return diffusers
