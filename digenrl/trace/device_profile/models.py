"""The models that can be measured: their networks at full size, and the size of a sample.

Configurations come from the published models (`shared.models.published`); sizes come from the cost
profile of the same name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from shared.models.catalogue import PartConfig, find_family
from shared.models.families import FamilySpec
from shared.models.published import PUBLISHED, published
from shared.models.sigmas import Config


class ModelName(StrEnum):
    flux1_dev = "flux1-dev"
    sd35_medium = "sd35-medium"
    qwen_image = "qwen-image"
    wan21_14b = "wan2.1-14b"
    hunyuanvideo = "hunyuanvideo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of one sample."""

    height: int
    width: int
    frames: int = 1
    text_tokens: int
    """Length of its prompt, as a recipe gives it: without the tokens of CLIP."""


TINY = Size(height=32, width=32, text_tokens=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    family: FamilySpec
    network: str
    """Its class in diffusers."""
    config: Config
    decoder: Config
    """Configuration of the decoder that it is published with."""
    size: Size
    guidance: float
    """Guidance of a forward pass: an input of the network, or 1."""
    tiny_config: Config
    """Replaces the same keys: a network of the same class that a CPU runs in milliseconds."""
    tiny_size: Size

    def tiny(self) -> "Architecture":
        return replace(self, config={**self.config, **self.tiny_config}, size=self.tiny_size)


def _architecture(
    model: ModelName, size: Size, tiny_config: Config, *, tiny_size: Size = TINY,
    guidance: float = 1.0, unused: tuple[str, ...] = (),
) -> Architecture:  # fmt: skip
    """Return the published architecture, without the keys that no network uses."""
    config: dict[str, Any] = dict(published(model, "transformer"))
    return Architecture(
        family=find_family(PUBLISHED / model),
        network=PartConfig(PUBLISHED / model / "transformer" / "config.json")["_class_name"],
        config={key: value for key, value in config.items() if key not in unused},
        decoder=published(model, "vae"),
        size=size,
        guidance=guidance,
        tiny_config=tiny_config,
        tiny_size=tiny_size,
    )


_TINY_VIDEO = replace(TINY, frames=5)
_TINY_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_TINY_ROPE = (4, 6, 6)

ARCHITECTURES: Mapping[ModelName, Architecture] = {
    ModelName.flux1_dev: _architecture(
        ModelName.flux1_dev,
        Size(height=720, width=720, text_tokens=512),
        {
            **_TINY_HEADS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32,
            "pooled_projection_dim": 16, "axes_dims_rope": _TINY_ROPE,
        },
        guidance=3.5,
    ),
    ModelName.sd35_medium: _architecture(
        ModelName.sd35_medium,
        Size(height=512, width=512, text_tokens=128),
        {
            **_TINY_HEADS, "sample_size": 4, "num_layers": 2, "joint_attention_dim": 32,
            "caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 8,
            "dual_attention_layers": (0,),
        },
    ),
    ModelName.qwen_image: _architecture(
        ModelName.qwen_image,
        Size(height=512, width=512, text_tokens=128),
        {**_TINY_HEADS, "num_layers": 1, "joint_attention_dim": 32, "axes_dims_rope": _TINY_ROPE},
        unused=("pooled_projection_dim",),
    ),
    ModelName.wan21_14b: _architecture(
        ModelName.wan21_14b,
        Size(height=240, width=416, frames=33, text_tokens=512),
        {**_TINY_HEADS, "num_layers": 1, "ffn_dim": 64, "freq_dim": 16, "text_dim": 32},
        tiny_size=_TINY_VIDEO,
    ),
    ModelName.hunyuanvideo: _architecture(
        ModelName.hunyuanvideo,
        Size(height=480, width=480, frames=53, text_tokens=256),
        {
            **_TINY_HEADS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
            "text_embed_dim": 32, "pooled_projection_dim": 16, "rope_axes_dim": _TINY_ROPE,
        },
        tiny_size=_TINY_VIDEO,
        guidance=6.0,
    ),
}  # fmt: skip
