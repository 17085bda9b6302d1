"""The models that can be measured: their networks at full size, and what a forward pass is given.

Configurations are those that the models are published with (`shared.models.published`); sizes are
those of the cost profile of the same name. Of the text encoders only the shapes count.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from shared.models.families import FAMILIES, FamilySpec
from shared.models.published import published
from shared.models.sigmas import Config

if TYPE_CHECKING:
    from torch import Tensor

DrawTensor = Callable[..., "Tensor"]
"""Normal values of the shape that is given, where and in what type the network wants them."""
Inputs = dict[str, Any]
"""Arguments of a forward pass, without latents and timestep."""


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


TINY = Size(height=32, width=32, text_tokens=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    pipeline: str
    """Names its family (`shared.models.families`)."""
    network: str
    """Its class in diffusers."""
    config: Config
    decoder: Config
    """Configuration of the decoder that it is published with."""
    size: Size
    tiny_config: Config
    """Replaces the same keys: a network of the same class that a CPU runs in milliseconds."""
    tiny_size: Size = TINY
    timestep_scale: float
    """What the network calls sigma = 1."""
    conditions: Callable[[Config, Size, int, DrawTensor], Inputs]
    """Draws them for so many samples."""

    @property
    def family(self) -> FamilySpec:
        return FAMILIES[self.pipeline]

    def latent_shape(self, config: Config) -> tuple[int, ...]:
        """Returns the shape of a sample's latents as a network of this configuration takes them."""
        size = {"height": self.size.height, "width": self.size.width, "frames": self.size.frames}
        if self.family.packed:
            tokens = self.family.num_tokens(config, self.decoder, **size)
            return (tokens, config["in_channels"])
        return self.family.latent_shape(config, self.decoder, **size)

    def tiny(self) -> "Architecture":
        return replace(self, config={**self.config, **self.tiny_config}, size=self.tiny_size)


def _flux(config: Config, size: Size, rows: int, draw: DrawTensor) -> Inputs:
    return {
        **_sd3(config, size, rows, draw),
        "img_ids": _grid(size, draw),
        "txt_ids": draw(size.text_tokens, 3).zero_(),
        "guidance": draw(rows).fill_(3.5),
    }


def _grid(size: Size, draw: DrawTensor) -> "Tensor":
    """Returns frame, row and column of each token of an image, (tokens, 3)."""
    rows, columns = size.height // 16, size.width // 16
    ids = draw(rows, columns, 3).zero_()
    ids[..., 1] += ids.new_tensor(range(rows))[:, None]
    ids[..., 2] += ids.new_tensor(range(columns))
    return ids.flatten(0, 1)


def _sd3(config: Config, size: Size, rows: int, draw: DrawTensor) -> Inputs:
    return {
        "encoder_hidden_states": draw(rows, size.text_tokens, config["joint_attention_dim"]),
        "pooled_projections": draw(rows, config["pooled_projection_dim"]),
    }


def _qwen(config: Config, size: Size, rows: int, draw: DrawTensor) -> Inputs:
    return {
        "encoder_hidden_states": draw(rows, size.text_tokens, config["joint_attention_dim"]),
        "img_shapes": [[(1, size.height // 16, size.width // 16)]] * rows,
    }


def _wan(config: Config, size: Size, rows: int, draw: DrawTensor) -> Inputs:
    return {"encoder_hidden_states": draw(rows, size.text_tokens, config["text_dim"])}


def _hunyuan(config: Config, size: Size, rows: int, draw: DrawTensor) -> Inputs:
    return {
        "encoder_hidden_states": draw(rows, size.text_tokens, config["text_embed_dim"]),
        "encoder_attention_mask": draw(rows, size.text_tokens).fill_(1).bool(),
        "pooled_projections": draw(rows, config["pooled_projection_dim"]),
        "guidance": draw(rows).fill_(6000.0),
    }


_TINY_VIDEO = replace(TINY, frames=5)
_TINY_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_TINY_ROPE = (4, 6, 6)

ARCHITECTURES: Mapping[ModelName, Architecture] = {
    ModelName.flux1_dev: Architecture(
        pipeline="FluxPipeline",
        network="FluxTransformer2DModel",
        config=published("flux1-dev", "transformer"),
        decoder=published("flux1-dev", "vae"),
        size=Size(height=720, width=720, text_tokens=512),
        tiny_config={
            **_TINY_HEADS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 32,
            "pooled_projection_dim": 16, "axes_dims_rope": _TINY_ROPE,
        },
        timestep_scale=1,
        conditions=_flux,
    ),
    ModelName.sd35_medium: Architecture(
        pipeline="StableDiffusion3Pipeline",
        network="SD3Transformer2DModel",
        config=published("sd35-medium", "transformer"),
        decoder=published("sd35-medium", "vae"),
        size=Size(height=512, width=512, text_tokens=77 + 128),
        tiny_config={
            **_TINY_HEADS, "sample_size": 4, "num_layers": 2, "joint_attention_dim": 32,
            "caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 8,
            "dual_attention_layers": (0,),
        },
        timestep_scale=1000,
        conditions=_sd3,
    ),
    ModelName.qwen_image: Architecture(
        pipeline="QwenImagePipeline",
        network="QwenImageTransformer2DModel",
        config={
            key: value
            for key, value in published("qwen-image", "transformer").items()
            if key != "pooled_projection_dim"  # used by no network
        },
        decoder=published("qwen-image", "vae"),
        size=Size(height=512, width=512, text_tokens=128),
        tiny_config={
            **_TINY_HEADS, "num_layers": 1, "joint_attention_dim": 32,
            "axes_dims_rope": _TINY_ROPE,
        },
        timestep_scale=1,
        conditions=_qwen,
    ),
    ModelName.wan21_14b: Architecture(
        pipeline="WanPipeline",
        network="WanTransformer3DModel",
        config=published("wan2.1-14b", "transformer"),
        decoder=published("wan2.1-14b", "vae"),
        size=Size(height=240, width=416, frames=33, text_tokens=512),
        tiny_config={
            **_TINY_HEADS, "num_layers": 1, "ffn_dim": 64, "freq_dim": 16, "text_dim": 32,
        },
        tiny_size=_TINY_VIDEO,
        timestep_scale=1000,
        conditions=_wan,
    ),
    ModelName.hunyuanvideo: Architecture(
        pipeline="HunyuanVideoPipeline",
        network="HunyuanVideoTransformer3DModel",
        config=published("hunyuanvideo", "transformer"),
        decoder=published("hunyuanvideo", "vae"),
        size=Size(height=480, width=480, frames=53, text_tokens=256),
        tiny_config={
            **_TINY_HEADS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
            "text_embed_dim": 32, "pooled_projection_dim": 16, "rope_axes_dim": _TINY_ROPE,
        },
        tiny_size=_TINY_VIDEO,
        timestep_scale=1000,
        conditions=_hunyuan,
    ),
}  # fmt: skip
