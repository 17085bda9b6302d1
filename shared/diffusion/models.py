"""The small protocol behind which every model family looks alike to rollout and trainer."""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import torch
from torch import Tensor, nn

from shared.models.catalogue import checked_family_of, text_tokens
from shared.models.memory import Part as Part

Conditions = dict[str, Tensor]
"""What the network is told about one prompt: named tensors, each with a leading dimension of 1."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ModelAdapter(Protocol):
    transformer: nn.Module

    @property
    def lora_targets(self) -> Sequence[str]:
        """Suffixes of the names of the layers that LoRA adapts by default."""

    @property
    def lora_excluded(self) -> Sequence[str]:
        """Beginnings of the names of layers that it leaves alone, whatever their suffixes."""

    def encode(self, prompt: str, *, guidance: float) -> Conditions:
        """Conditions of one prompt; for classifier-free guidance those of the empty prompt too."""

    def latent_shape(self, *, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Of one sample, from its size in pixels.

        Raises:
            UserError: if the model makes no samples of that size.
        """

    def velocity(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, *, guidance: float
    ) -> Tensor:
        """(B, ...) from latents (B, ...), sigma (B,) and conditions of B rows.

        ``guidance`` is what the family means by it: classifier-free, or told to the network.
        Classifier-free guidance runs both halves as one batch, the same way for sampling and
        training, so that a replay equals what was sampled.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, ...) to images (B, C, H, W) or videos (B, F, C, H, W), float32 in [0, 1]."""


def load_model(
    folder: Path,
    parts: set[Part],
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_text_tokens: int | None = None,
) -> ModelAdapter:
    """Load a diffusers folder through the adapter that its ``model_index.json`` names.

    ``max_text_tokens``: of a prompt, where the family's own number is not wanted.

    Raises:
        UserError: if the folder is not a diffusers model, or of a family without an adapter.
    """
    spec, tokens = checked_family_of(folder), text_tokens(folder, max_text_tokens)
    loaded: ModelAdapter = resolve_name(spec.adapter).load(
        folder, spec, parts, device=device, dtype=dtype, text_tokens=tokens
    )
    return loaded


def repeat_rows(conditions: Conditions, rows: int) -> Conditions:
    """Conditions of one prompt for a batch of ``rows``."""
    return {name: tensor.expand(rows, *tensor.shape[1:]) for name, tensor in conditions.items()}
