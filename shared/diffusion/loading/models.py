"""Loads models, and the protocol behind which all families look alike to rollout and trainer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import structlog
import torch
from torch import Tensor, nn

from shared.diffusion.loading.device import is_out_of_memory
from shared.diffusion.loading.network import Place, Progress, no_progress
from shared.diffusion.loading.part_checks import check_parts
from shared.errors import ContractError, DigenRLError, UserError
from shared.models.attention import check_device
from shared.models.catalogue import check_family, text_tokens
from shared.models.families import FamilySpec
from shared.models.memory import UNQUANTISED, WeightsHolding
from shared.models.memory import ModelPart as ModelPart
from shared.recipe.sampling import CfgGradient

Conditions = dict[str, Tensor]
"""Conditioning of one prompt: named tensors (1, ...); of a batch, a row per sample. All texts of a
batch have one length: a family whose texts have their own makes no batch of two prompts."""

IMAGE = "image"
"""How the names of a source image's conditions begin. With classifier-free guidance, both halves
have the same."""

TEXT, MASK = "text", "mask"
"""How the names of embedded texts and of their masks end."""

_OF_INPUTS = (RuntimeError, ValueError, IndexError, KeyError, TypeError)

log = structlog.get_logger()


class ModelAdapter(Protocol):
    transformer: nn.Module
    """All trained networks: the only one, or `shared.diffusion.loading.experts.Experts`."""
    guidance_2: float | None
    """Guidance of a second network, if it differs."""
    cfg_gradient: CfgGradient
    """`Algorithm.cfg_gradient`: what `velocity` has a gradient by, where it has one."""

    @property
    def lora_targets(self) -> Sequence[str]:
        """Suffixes of the names of the layers that LoRA adapts by default."""

    @property
    def lora_excluded(self) -> Sequence[str]:
        """Prefixes of the names of layers that LoRA excludes, with any suffix."""

    @property
    def image_channels(self) -> int | None:
        """Return the channels of the source images of an editing model; None for other models."""

    def encode(
        self,
        prompt: str,
        *,
        guidance: float,
        image: Tensor | None = None,
        frames: int = 1,
        negative_prompt: str = "",
    ) -> Conditions:
        """Encodes a prompt; for classifier-free guidance the negative prompt, too. ``image`` is the
        source image (1, C, H, W), uint8 and of the samples' size, of a model with source images; a
        sample has ``frames`` frames."""

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
        Classifier-free guidance runs both halves as one batch, or as two if one half has
        no gradient, or if their texts have lengths so different that padding costs more than a
        call: the sample alone decides that. A replay equals its sample but for rounding, as it does
        in a batch of another size.
        """

    def decode_in_tiles(self) -> None:
        """Decodes in overlapping tiles from now on, where samples are larger than one: in less
        memory, to pixels that differ a little.

        Raises:
            UserError: if the decoder cannot.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes latents (B, ...) to images (B, C, H, W) or videos (B, F, C, H, W), float32 in
        [0, 1]."""


def load_model(
    folder: Path,
    parts: set[ModelPart],
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_text_tokens: int | None = None,
    guidance_2: float | None = None,
    attention: str | None = None,
    holding: WeightsHolding = UNQUANTISED,
    place: Place | None = None,
    progress: Progress = no_progress,
) -> ModelAdapter:
    """Loads a diffusers folder with the adapter of the family that ``model_index.json`` names.

    ``max_text_tokens`` replaces the family's own length of a prompt, ``guidance_2`` the guidance of
    a second network, and ``attention`` torch's choice of an attention back end. ``holding`` gives
    the network its form; one that is to be streamed stays on the host. ``place`` puts it elsewhere;
    ``progress`` is called with every part and tensor. If a model is loaded without its network,
    only `encode` works.

    Raises:
        UserError: if the folder is not a diffusers model, or of a family without an adapter, or
            a part is damaged, or the attention back end cannot be used here.
    """
    spec, tokens = check_family(folder), text_tokens(folder, max_text_tokens)
    check_device(attention, on_gpu=device.type == "cuda")
    family = resolve_name(spec.adapter).load(
        folder, spec, parts, device=device, dtype=dtype, text_tokens=tokens,
        holding=holding, place=place, progress=progress,
    )  # fmt: skip
    check_parts(folder, family.pipeline)
    loaded: ModelAdapter = family
    loaded.guidance_2 = guidance_2
    if attention is not None:
        _attend_by(loaded.transformer, attention)
    if "transformer" in parts:
        log.info("network_loaded", attention=_attention_backend(spec, attention))
    return loaded


@contextmanager
def taken(
    blame: type[ContractError],
    what: str = "the network cannot take these tensors",
    errors: tuple[type[Exception], ...] = _OF_INPUTS,
) -> Iterator[None]:
    """Surrounds a forward pass: raises ``blame`` if the network does not take the shapes, types or
    names of its tensors, but not if a GPU or another rank fails. ``errors`` belong to the input."""
    try:
        yield
    except errors as error:
        message = str(error)
        if isinstance(error, DigenRLError):
            raise
        if is_out_of_memory(error) or any(sign in message for sign in ("CUDA", "NCCL", "HIP")):
            raise
        reason = " ".join(f"{type(error).__name__}: {message}".split())[:300]
        raise blame(f"{what}: {reason}") from error


def _attention_backend(spec: FamilySpec, attention: str | None) -> str:
    """Names the back end that the network's attention goes by."""
    from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND

    return (attention or DIFFUSERS_ATTN_BACKEND) if spec.names_attention else "torch"


def _attend_by(network: nn.Module, attention: str) -> None:
    """Raises UserError if the back end's package is missing, or its kernel cannot be had."""
    try:
        network.set_attention_backend(attention)  # type: ignore[operator]
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"model.attention: {attention} cannot be used here: {reason}") from error


def without_masks(conditions: Conditions) -> Conditions:
    """Cuts texts (1, L, ...) to where their masks (1, L) end, and leaves the masks out."""
    cut = {name: tensor for name, tensor in conditions.items() if not name.endswith(MASK)}
    for name in conditions.keys() - cut.keys():
        text = name.removesuffix(MASK) + TEXT
        if text in cut:
            cut[text] = cut[text][:, : int(conditions[name].sum())]
    return cut


def repeat_rows(conditions: Conditions, rows: int) -> Conditions:
    """Expands conditions (1, ...) of one prompt to (B, ...), where ``rows`` is B."""
    return {name: tensor.expand(rows, *tensor.shape[1:]) for name, tensor in conditions.items()}
