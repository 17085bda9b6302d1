"""The part that all adapters of model families share: a diffusers pipeline, loaded in part."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from shared.diffusion.families.latents import decode_image
from shared.diffusion.loading.models import IMAGE, Conditions, ModelPart
from shared.diffusion.loading.network import (
    Place,
    Progress,
    build_network,
    diffusers_class,
    load_networks,
    no_progress,
)
from shared.diffusion.loading.part_checks import check_decoder
from shared.errors import UserError
from shared.models.catalogue import PartConfig
from shared.models.families import FamilySpec
from shared.models.memory import UNQUANTISED, WeightsHolding, file_bytes, part_folders
from shared.recipe.sampling import CfgGradient

NEGATIVE = "negative_"
"""Prefix of the names of the negative prompt's conditions, for classifier-free guidance."""

_TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3", "connectors", "image_encoder")

_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3", "processor", "image_processor")


@dataclass(eq=False)
class Family(ABC):
    """Runs a model of one family with torch; everything else about it is in its `FamilySpec`.

    Latents of a sample have channels first, then frames of a video, then rows and columns; a
    family whose network takes packed tokens packs and unpacks them in `forward`.
    """

    pipeline: Any
    spec: FamilySpec
    device: torch.device
    dtype: torch.dtype
    text_tokens: int
    """Length at which a prompt is cut off, and to which it is padded where the pipeline does not
    mask the padding."""

    guidance_2: float | None = None
    """Guidance of a second network, if it differs."""

    cfg_gradient: CfgGradient = "both"
    """`Algorithm.cfg_gradient`"""

    leaves_out: ClassVar[tuple[str, ...]] = ()
    """Components of a folder that are never loaded."""
    pads_text: ClassVar[bool] = True
    """Whether all prompts are encoded to texts of one length."""

    def __post_init__(self) -> None:
        network = self.network()
        is_there = isinstance(network, nn.Module)
        self.transformer: nn.Module = self.prepare(network) if is_there else network
        """Without the network's part, something that has its configuration alone."""
        self.config: Any = self.pipeline.transformer.config

    def network(self) -> nn.Module:
        """Returns the network that is trained, or one that stands for several."""
        network: nn.Module = self.pipeline.transformer
        return network

    @staticmethod
    def prepare(network: nn.Module) -> nn.Module:
        """Changes the network, in place, into one that computes the same faster; returns it."""
        return network

    @classmethod
    def class_named(cls, name: str) -> Any:
        """Return the class of the pipeline, or of a network, that a folder names; None if it is
        unknown. Diffusers has the classes of built-in families; a package may bring others.
        """
        return diffusers_class(name)

    @classmethod
    def load(
        cls, folder: Path, spec: FamilySpec, parts: set[ModelPart], *,
        device: torch.device, dtype: torch.dtype, text_tokens: int,
        holding: WeightsHolding = UNQUANTISED, place: Place | None = None,
        progress: Progress = no_progress,
    ) -> Self:  # fmt: skip
        """Load some parts of a folder, with the network held as in ``holding``: a streamed network
        stays on the host. ``place`` puts it elsewhere.

        Raises:
            UserError: if they are incomplete.
        """
        quiet_diffusers()
        names = part_folders(folder, "transformer") if "transformer" in parts else []
        computes_in = torch.bfloat16 if holding.weights == "bf16" else dtype
        if "decoder" in parts:
            check_decoder(folder / "vae", cls.class_named)
        try:
            networks = {
                name: build_network(folder / name, computes_in, cls.class_named, holding.weights)
                for name in names
            }
            types = {"vae": decoder_dtype(dtype), "default": dtype}
            types |= dict.fromkeys(names, computes_in)
            pipeline = cls._pipeline(folder, spec, parts, types, networks)
        except (OSError, ValueError, ImportError) as error:
            reason = next(filter(None, str(error).splitlines()), type(error).__name__)
            raise UserError(f"model.folder: cannot load {folder}: {reason}") from error
        for name, component in pipeline.components.items():
            if isinstance(component, nn.Module) and name not in networks:
                component.to(device)
        if not names:  # without its T5, Stable Diffusion 3 fills in zeros of the network's width
            config = PartConfig(folder / "transformer" / "config.json")
            pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**config))
        progress(file_bytes(folder, parts - {"transformer"}))
        family = cls(pipeline, spec, device=device, dtype=computes_in, text_tokens=text_tokens)
        if networks:
            home = torch.device("cpu") if holding.memory == "streamed" else device
            load_networks(folder, networks, family.transformer, place or Place(home), progress)
        return family

    @classmethod
    def _pipeline(
        cls, folder: Path, spec: FamilySpec, parts: set[ModelPart],
        types: Mapping[str, torch.dtype], networks: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        pipeline_class = cls.class_named(spec.pipeline)
        pipeline = pipeline_class.from_pretrained(
            folder,
            dtype=types,
            local_files_only=True,
            use_safetensors=True,  # never a pickle
            **networks,
            **_left_out(pipeline_class, folder, parts, cls.leaves_out),
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return self.spec.lora_targets

    @property
    def lora_excluded(self) -> tuple[str, ...]:
        return ()

    @property
    def image_channels(self) -> int | None:
        if not self.spec.takes_image:
            return None
        vae = self.pipeline.vae
        # Video decoders' configurations name no channels: they are all of colour.
        return 3 if vae is None else int(vae.config.get("in_channels", 3))

    def encode(
        self,
        prompt: str,
        *,
        guidance: float,
        image: Tensor | None = None,
        frames: int = 1,
        negative_prompt: str = "",
    ) -> Conditions:
        negative = negative_prompt if self.spec.forwards(guidance) == 2 else None
        with torch.no_grad():
            if image is None:
                conditions = self.encode_prompt(prompt, negative=negative)
            else:
                conditions = self.encode_edit(
                    prompt, image.to(self.device), negative=negative, frames=frames
                )
        return {name: tensor.detach().contiguous() for name, tensor in conditions.items()}

    @abstractmethod
    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        """Encodes a prompt to tensors (1, ...), and the ``negative`` one, if it is not None, by the
        same names after `NEGATIVE`."""

    def encode_edit(
        self, prompt: str, image: Tensor, *, negative: str | None, frames: int
    ) -> Conditions:
        """Encode a prompt and its image (1, C, H, W), uint8, which is edited or begins a video with
        this number of frames; tensors of the image have names that begin with `IMAGE`. Only of a
        family that takes images."""
        raise NotImplementedError(f"{type(self).__name__} takes no image")

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
            return at_least_float32(self.forward(latents, sigma, conditions, guidance))
        unconditional, conditional = self.both(latents, sigma, *_halves(conditions), guidance)
        return self.guided(unconditional, conditional, self.strength(guidance, sigma, conditional))

    def both(
        self, latents: Tensor, sigma: Tensor, empty: Conditions, prompt: Conditions, guidance: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the velocities (B, ...) of the empty prompt and of the prompt, in at least
        float32."""
        if self.cfg_gradient == "conditional" and torch.is_grad_enabled():
            with torch.no_grad():
                unconditional = at_least_float32(self.forward(latents, sigma, empty, guidance))
            return unconditional, at_least_float32(self.forward(latents, sigma, prompt, guidance))
        if not _alike(empty, prompt):
            unconditional, conditional = (
                at_least_float32(self.forward(latents, sigma, half, guidance))
                for half in (empty, prompt)
            )
            return unconditional, conditional
        velocities = self.forward(
            torch.cat([latents, latents]),
            torch.cat([sigma, sigma]),
            joined(empty, prompt),
            guidance,
        )
        unconditional, conditional = at_least_float32(velocities).chunk(2)
        return unconditional, conditional

    def strength(self, guidance: float, sigma: Tensor, like: Tensor) -> float | Tensor:
        """Returns the guidance at sigma (B,): one for all rows, or of each row of ``like``, with as
        many dimensions."""
        return guidance

    @abstractmethod
    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        """Runs the network once: velocities (B, ...) from latents (B, ...), sigma (B,) and
        conditions of B rows."""

    def run(self, latents: Tensor, time: Tensor, conditions: Conditions, **inputs: Any) -> Tensor:
        """Gives the network latents or tokens (B, ...), time (B,) and what all families call by the
        same names, besides ``inputs``; returns velocities of the shape of ``latents``."""
        if "pooled" in conditions:
            inputs["pooled_projections"] = conditions["pooled"].to(self.dtype)
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=time,
            encoder_hidden_states=conditions["text"].to(self.dtype),
            return_dict=False,
            **inputs,
        )[0]
        return velocity

    def guided(
        self, unconditional: Tensor, conditional: Tensor, guidance: float | Tensor
    ) -> Tensor:
        """Combines the velocities (B, ...) of the empty prompt and of the prompt into (B, ...)."""
        return unconditional + guidance * (conditional - unconditional)

    def decode_in_tiles(self) -> None:
        """Raises UserError if the decoder cannot; does nothing if none is loaded."""
        decoder = self.pipeline.vae
        if decoder is None:
            return
        try:
            decoder.enable_tiling()
        except (AttributeError, NotImplementedError) as error:
            raise UserError(
                f"model.vae_tiling: {type(decoder).__name__} does not decode in tiles; set it to "
                "false"
            ) from error

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        pixels = self.decode_latents(latents.to(self.pipeline.vae.dtype))
        return (pixels.float() / 2 + 0.5).clamp(0, 1)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Decodes latents (B, ...) to images (B, C, H, W) or videos (B, F, C, H, W) in [-1, 1]."""
        return decode_image(latents, self.pipeline.vae)

    def encode_text(self, prompt: str) -> Tensor:
        """Encodes a prompt to (1, L, width), where the pipeline returns this first."""
        text: Tensor = self.pipeline.encode_prompt(prompt, max_sequence_length=self.text_tokens)[0]
        return text


def _left_out(
    pipeline_class: Any, folder: Path, parts: set[ModelPart], always: tuple[str, ...]
) -> dict[str, None]:
    """Returns the components of a pipeline that are not loaded."""
    names = pipeline_class._get_signature_keys(pipeline_class)[0]
    index = PartConfig(folder / "model_index.json")
    left_out = [name for name in names if name in always or index.get(name) == [None, None]]
    if "text" not in parts:
        left_out += [name for name in (*_TEXT, *_TOKENIZERS) if name in names]
    if "decoder" not in parts:
        left_out.append("vae")
    if "transformer" not in parts:
        left_out += part_folders(folder, "transformer")
    return dict.fromkeys(left_out)


def decoder_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the decoder's type for a network of ``dtype``: at least float32, as half precision
    changes its pixels."""
    return torch.promote_types(dtype, torch.float32)


def _halves(conditions: Conditions) -> tuple[Conditions, Conditions]:
    """Returns the conditions of the empty prompt and of the prompt, by the same names."""
    prompt = {name: each for name, each in conditions.items() if not name.startswith(NEGATIVE)}
    empty = {
        name.removeprefix(NEGATIVE): each
        for name, each in conditions.items()
        if name.startswith((NEGATIVE, IMAGE))
    }
    return empty, prompt


def _alike(one: Conditions, other: Conditions) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape for name in other
    )


def joined(one: Conditions, other: Conditions) -> Conditions:
    """Joins conditions (B, ...) and others of the same shapes into one batch (2 B, ...)."""
    return {name: torch.cat([one[name], other[name]]) for name in other}


def at_least_float32(velocity: Tensor) -> Tensor:
    """Returns velocities in their own type, or in float32 if that has fewer bits."""
    return velocity.to(torch.promote_types(velocity.dtype, torch.float32))


def quiet_diffusers() -> None:
    """Imports diffusers without progress bars and warnings, which do not belong in a log."""
    for library in ("DIFFUSERS", "TRANSFORMERS"):  # read when they are imported
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for library in ("torchao", "torch.utils._pytree"):  # which warn while peft imports torchao
        getLogger(library).setLevel(ERROR)

    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
