"""Loads models, and the protocol behind which all families look alike to rollout and trainer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import torch
from torch import Tensor, nn

from shared.diffusion.device import is_out_of_memory
from shared.errors import ContractError
from shared.models.catalogue import checked_family_of, text_tokens
from shared.models.memory import Part as Part

Conditions = dict[str, Tensor]
"""Conditioning of one prompt: named tensors (1, ...); of a batch, a row per sample."""


class ModelAdapter(Protocol):
    transformer: nn.Module

    @property
    def lora_targets(self) -> Sequence[str]:
        """Suffixes of the names of the layers that LoRA adapts by default."""

    @property
    def lora_excluded(self) -> Sequence[str]:
        """Prefixes of the names of layers that LoRA leaves alone, whatever their suffixes."""

    def encode(self, prompt: str, *, guidance: float) -> Conditions:
        """Encodes a prompt; for classifier-free guidance the empty prompt, too."""

    def latent_shape(self, *, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Returns the shape of one sample's latents from its size in pixels.

        Raises:
            UserError: if the model makes no samples of that size.
        """

    def velocity(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, *, guidance: float
    ) -> Tensor:
        """Returns velocities (B, ...) from latents (B, ...), sigma (B,) and conditions of B rows.

        ``guidance`` is what the family means by it: classifier-free, or an input of the network.
        Classifier-free guidance runs both halves as one batch, in sampling and in training, so that
        a replay equals its sample.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents (B, ...) to images (B, C, H, W) or videos (B, F, C, H, W), float32 in
        [0, 1]."""


def load_model(
    folder: Path,
    parts: set[Part],
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_text_tokens: int | None = None,
) -> ModelAdapter:
    """Loads a diffusers folder with the adapter of the family that ``model_index.json`` names.

    ``max_text_tokens`` replaces the family's own length of a prompt. Of a model that is loaded
    without its network, nothing but `encode` works.

    Raises:
        UserError: if the folder is not a diffusers model, or of a family without an adapter.
    """
    spec, tokens = checked_family_of(folder), text_tokens(folder, max_text_tokens)
    loaded: ModelAdapter = resolve_name(spec.adapter).load(
        folder, spec, parts, device=device, dtype=dtype, text_tokens=tokens
    )
    return loaded


@contextmanager
def taken(blame: type[ContractError]) -> Iterator[None]:
    """Surrounds a forward pass: raises ``blame`` if the network does not take the shapes, types or
    names of its tensors, but not if a GPU or another rank fails."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        said = str(error)
        if is_out_of_memory(error) or any(sign in said for sign in ("CUDA", "NCCL", "HIP")):
            raise
        reason = " ".join(f"{type(error).__name__}: {said}".split())[:300]
        raise blame(f"the network cannot take these tensors: {reason}") from error


def repeat_rows(conditions: Conditions, rows: int) -> Conditions:
    """Expands conditions (1, ...) of one prompt to (B, ...), where ``rows`` is B."""
    return {name: tensor.expand(rows, *tensor.shape[1:]) for name, tensor in conditions.items()}
