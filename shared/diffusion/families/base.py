"""The part that all adapters of model families share: a diffusers pipeline, loaded in part."""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from shared.diffusion.models import Conditions, Part
from shared.errors import UserError
from shared.models.family import FamilySpec

NEGATIVE = "negative_"
"""Prefix of the names of the empty prompt's conditions, for classifier-free guidance."""
_TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


class Family(ABC):
    """Runs a model of one family with torch; everything else about it is in its `FamilySpec`.

    Latents of a sample have channels first, then frames of a video, then rows and columns; a
    family whose network takes packed tokens packs and unpacks them in `forward`.
    """

    def __init__(
        self,
        pipeline: Any,
        spec: FamilySpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        text_tokens: int,
    ) -> None:
        """``text_tokens`` is the length at which a prompt is cut off. A family without a text mask
        pads to it, in sampling and training alike."""
        self.spec = spec
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
        spec: FamilySpec,
        parts: set[Part],
        *,
        device: torch.device,
        dtype: torch.dtype,
        text_tokens: int,
    ) -> Self:
        """Loads some parts of a folder; raises UserError if they are incomplete."""
        diffusers = _quiet_diffusers()
        pipeline_class = getattr(diffusers, spec.pipeline)
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
        return cls(pipeline, spec, device=device, dtype=dtype, text_tokens=text_tokens)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return self.spec.lora_targets

    @property
    def lora_excluded(self) -> tuple[str, ...]:
        return ()

    def encode(self, prompt: str, *, guidance: float) -> Conditions:
        with torch.no_grad():
            conditions = self.encode_prompt(prompt, negative=self.spec.forwards(guidance) == 2)
        return {name: tensor.detach().contiguous() for name, tensor in conditions.items()}

    @abstractmethod
    def encode_prompt(self, prompt: str, *, negative: bool) -> Conditions:
        """Encodes a prompt to tensors (1, ...); if ``negative``, the empty prompt as well, by the
        same names after `NEGATIVE`."""

    def latent_shape(self, *, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Raises UserError if the model cannot make samples of that size."""
        if self.pipeline.vae is None:
            raise ValueError("the latent shape depends on the decoder: load it as well")
        return self.spec.latent_shape(
            self.config, self.pipeline.vae.config, height=height, width=width, frames=frames
        )

    def velocity(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, *, guidance: float
    ) -> Tensor:
        if self.spec.forwards(guidance) == 1:
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
        """Runs the network once: velocities (B, ...) from latents (B, ...), sigma (B,) and
        conditions of B rows."""

    def guided(self, unconditional: Tensor, conditional: Tensor, guidance: float) -> Tensor:
        """Combines the velocities (B, ...) of the empty prompt and of the prompt into (B, ...)."""
        return unconditional + guidance * (conditional - unconditional)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        pixels = self.decode_latents(latents.to(decoder_dtype(self.dtype)))
        return (pixels.float() / 2 + 0.5).clamp(0, 1)

    @abstractmethod
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Decodes latents (B, ...) to images (B, C, H, W) or videos (B, F, C, H, W) in [-1, 1]."""


def decoder_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the decoder's type beside a network of ``dtype``: at least float32, as half precision
    changes its pixels."""
    return torch.promote_types(dtype, torch.float32)


def _doubled(conditions: Conditions) -> Conditions:
    """Joins the empty prompt's conditions (B, ...) and the prompt's into one batch (2 B, ...)."""
    return {
        name: torch.cat([conditions[NEGATIVE + name], tensor])
        for name, tensor in conditions.items()
        if not name.startswith(NEGATIVE)
    }


def _at_least_float32(velocity: Tensor) -> Tensor:
    return velocity.to(torch.promote_types(velocity.dtype, torch.float32))


def _quiet_diffusers() -> Any:
    """Imports diffusers without progress bars and warnings, which do not belong in a log."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported

    import diffusers
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    return diffusers
