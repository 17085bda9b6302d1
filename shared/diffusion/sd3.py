"""Stable Diffusion 3 and 3.5, and every smaller model of their family (the digits demo's)."""

import os
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from shared.diffusion.models import Conditions, Part
from shared.errors import UserError

TEXT_PARTS = (
    "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3",
)  # fmt: skip
MAX_T5_TOKENS = 128
"""Longest T5 prompt; shorter where the folder's tokenizer says so. One fixed length in sampling
and training, because this family has no text mask."""


class StableDiffusion3:
    lora_targets: list[str] = [  # noqa: RUF012 - part of the adapter protocol, never changed
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    ]  # fmt: skip

    def __init__(self, pipeline: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self._pipeline = pipeline
        self._device = device
        self._dtype = dtype
        self.transformer: nn.Module = pipeline.transformer

    @classmethod
    def load(
        cls, folder: Path, parts: set[Part], *, device: torch.device, dtype: torch.dtype
    ) -> Self:
        # A log is no terminal. Read when transformers is imported, which warns of what is not used.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

        from diffusers import StableDiffusion3Pipeline
        from diffusers.utils import logging as diffusers_logging
        from transformers.utils import logging as transformers_logging

        for logging in (diffusers_logging, transformers_logging):
            logging.disable_progress_bar()
            logging.set_verbosity_error()
        left_out: dict[str, None] = {}
        if "text" not in parts:
            left_out |= dict.fromkeys(TEXT_PARTS)
        if "decoder" not in parts:
            left_out |= {"vae": None}
        try:
            pipeline = StableDiffusion3Pipeline.from_pretrained(
                folder, dtype=dtype, local_files_only=True, **left_out
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"model.folder: cannot load {folder}: {reason}") from error
        pipeline.set_progress_bar_config(disable=True)
        pipeline.to(device)
        pipeline.transformer.requires_grad_(False).eval()
        return cls(pipeline, device=device, dtype=dtype)

    @torch.no_grad()
    def encode(self, prompt: str, *, guidance: float) -> Conditions:
        tokenizer = self._pipeline.tokenizer_3  # the T5 encoder may be left out of a folder
        tokens = min(tokenizer.model_max_length, MAX_T5_TOKENS) if tokenizer else MAX_T5_TOKENS
        text, negative, pooled, negative_pooled = self._pipeline.encode_prompt(
            prompt, prompt, prompt,
            do_classifier_free_guidance=guidance > 1,
            max_sequence_length=tokens,
        )  # fmt: skip
        conditions = {"text": text, "pooled": pooled}
        if guidance > 1:
            conditions |= {"negative_text": negative, "negative_pooled": negative_pooled}
        return {name: tensor.detach().contiguous() for name, tensor in conditions.items()}

    def latent_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        if self._pipeline.vae is None:
            raise ValueError("the latent shape is the decoder's to say: load it as well")
        factor = self._pipeline.vae_scale_factor
        return (self._pipeline.transformer.config.in_channels, height // factor, width // factor)

    def velocity(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, *, guidance: float
    ) -> Tensor:
        text, pooled = conditions["text"], conditions["pooled"]
        if guidance <= 1:
            return self._forward(latents, sigma, text, pooled)
        both = self._forward(
            torch.cat([latents, latents]),
            torch.cat([sigma, sigma]),
            torch.cat([conditions["negative_text"], text]),
            torch.cat([conditions["negative_pooled"], pooled]),
        )
        unconditional, conditional = both.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self._pipeline.vae
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        pixels: Tensor = vae.decode(scaled.to(self._dtype), return_dict=False)[0]
        return (pixels.float() / 2 + 0.5).clamp(0, 1)

    def _forward(self, latents: Tensor, sigma: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(self._dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=text.to(self._dtype),
            pooled_projections=pooled.to(self._dtype),
            return_dict=False,
        )[0]
        return velocity.to(torch.promote_types(velocity.dtype, torch.float32))
