"""The model families that can be trained: one entry each. CONTRIBUTING.md says how to add one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shared.errors import UserError
from shared.models.native_layers import (
    FLUX,
    FLUX2,
    HUNYUAN_VIDEO,
    SAME,
    SD3,
    WAN,
    Z_IMAGE,
    NativeLayers,
)
from shared.models.sigmas import (
    Config,
    SigmaRule,
    shift_by_tokens,
    shift_by_tokens_and_steps,
    single_static_shift,
    static_shift,
)

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """Describes one family. No field has a default: a family answers every question."""

    pipeline: str
    """Name of its pipeline class in diffusers, which ``model_index.json`` says."""
    adapter: str
    """Import string, ``module:Class``, of its adapter in `shared.diffusion.families`."""
    components: frozenset[str]
    """Parts of a folder that the adapter uses besides network, noise schedule and decoder."""
    network_keys: frozenset[str]
    """Keys of the network's configuration that the adapter knows. Any other is a switch that has
    to be off, null or false, such as `image_dim` (image-to-video) and `zero_cond_t` (editing)."""
    has_experts: bool
    """Whether a folder may hold a second network, for low noise (`EXPERTS`)."""
    names_attention: bool
    """Whether the network's attention goes by `model.attention`; diffusers' SD3 asks torch's own
    directly."""
    sigmas: SigmaRule
    """Noise schedule that its pipeline uses."""
    packed: bool
    """Whether the network takes tokens of 2 x 2 latents, which the adapter packs."""
    decoder_factor: Callable[[Config], int]
    """Returns pixels per latent, each way, from the decoder's configuration."""
    frame_factor: Callable[[Config], int] | None
    """Returns frames of video per frame of latents after the first; None if it makes images."""
    max_tokens_per_side: Callable[[Config], int | None]
    """Returns the number of learned positions each way, from the network's configuration; None if
    any size will do."""
    text_tokens: int
    """Length of its longest prompt by default: longer ones are cut off."""
    max_text_tokens: int
    """Longest prompt that its pipeline takes."""
    text_tokenizer: str | None
    """Tokenizer of the folder whose own limit cuts a prompt off as well; None if there is none."""
    condition_shapes: Callable[[Config, int], Shapes]
    """Returns the shapes, without rows, of what its adapter encodes a prompt of so many tokens to,
    from the network's configuration. They have the network's type."""
    embeds_guidance: bool
    """Whether the network takes guidance as an input, so that one forward pass is enough."""
    guidance_arguments: Callable[[float], Mapping[str, object]]
    """Returns the arguments by which its pipeline is given a guidance, as Python writes them."""
    takes_sigmas: bool
    """Whether its pipeline has an argument for sigmas."""
    lora_targets: tuple[str, ...]
    """Suffixes of the names of the layers that LoRA adapts by default."""
    native_layers: NativeLayers
    """Names of its layers in Kohya's and ComfyUI's LoRA files; `SAME` if they are diffusers'."""

    @property
    def makes_videos(self) -> bool:
        return self.frame_factor is not None

    def forwards(self, guidance: float) -> int:
        """Returns rows of the network per sample: 2 with classifier-free guidance."""
        return 2 if guidance > 1 and not self.embeds_guidance else 1

    def pixels_per_token(self, network: Config, decoder: Config) -> int:
        """Returns the pixels of a token each way: height and width are multiples of it."""
        return self._patch(network)[1] * self.decoder_factor(decoder)

    def num_tokens(
        self, network: Config, decoder: Config, *, height: int, width: int, frames: int
    ) -> int:
        side = self.pixels_per_token(network, decoder)
        latent_frames = self._latent_frames(decoder, frames)
        return latent_frames // self._patch(network)[0] * (height // side) * (width // side)

    def latent_shape(
        self, network: Config, decoder: Config, *, height: int, width: int, frames: int
    ) -> tuple[int, ...]:
        """Returns the shape of one sample's latents: (C, h, w), or (C, F, h, w) of a video.

        Raises:
            UserError: if the model cannot make samples of that size.
        """
        self.check_size("model", network, decoder, height=height, width=width)
        factor, channels = self.decoder_factor(decoder), network["in_channels"]
        if self.packed:
            channels //= 4
        size = (height // factor, width // factor)
        if not self.makes_videos:
            return (channels, *size)
        return (channels, self._latent_frames(decoder, frames), *size)

    def check_size(
        self, table: str, network: Config, decoder: Config, *, height: int, width: int
    ) -> None:
        """Raises UserError, which names the key of ``table``, unless the model makes samples of
        ``height`` x ``width`` pixels."""
        multiple = self.pixels_per_token(network, decoder)
        tokens = self.max_tokens_per_side(network)
        for name, size in (("height", height), ("width", width)):
            if size % multiple:
                nearest = max(multiple, round(size / multiple) * multiple)
                raise UserError(
                    f"{table}.{name}: {size} is not a multiple of {multiple}; nearest is {nearest}"
                )
            if tokens is not None and size > tokens * multiple:
                raise UserError(
                    f"{table}.{name}: {size} is more than this model knows; at most "
                    f"{tokens * multiple}"
                )

    def _patch(self, network: Config) -> tuple[int, int]:
        """Returns the latents of a token: along time, and each way in a frame."""
        if self.packed:
            return 1, 2
        if "all_patch_size" in network:
            return network["all_f_patch_size"][0], network["all_patch_size"][0]
        patch = network["patch_size"]
        if isinstance(patch, int):
            return network.get("patch_size_t", 1), patch
        return patch[0], patch[1]  # (frames, rows, columns)

    def _latent_frames(self, decoder: Config, frames: int) -> int:
        """Raises UserError if the decoder makes no video of so many frames."""
        if self.frame_factor is None:
            return 1
        factor = self.frame_factor(decoder)
        if (frames - 1) % factor:
            below = (frames - 1) // factor * factor + 1
            raise UserError(
                f"model.frames: {frames} is not a multiple of {factor} plus 1; the nearest are "
                f"{below} and {below + factor}"
            )
        return (frames - 1) // factor + 1


EXPERTS: Mapping[Literal["high", "low"], str] = {"high": "transformer", "low": "transformer_2"}
"""Folders of two networks that share the noise schedule: from the boundary up, and below it."""

CLIP_TOKENS = 77

JOINT_ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
"""Layers of a block in which image and text attend to each other."""

_ONE_ENCODER = frozenset({"text_encoder", "tokenizer"})

_TWO_ENCODERS = _ONE_ENCODER | {"text_encoder_2", "tokenizer_2"}


def _halved_per_block(decoder: Config) -> int:
    return int(2 ** (len(decoder["block_out_channels"]) - 1))


def _any_size(_: Config) -> None:
    return None


def _guidance_scale(guidance: float) -> Mapping[str, object]:
    return {"guidance_scale": guidance}


_SD3 = FamilySpec(
    pipeline="StableDiffusion3Pipeline",
    adapter="shared.diffusion.families.sd3:StableDiffusion3",
    components=_TWO_ENCODERS | {"text_encoder_3", "tokenizer_3"},
    network_keys=frozenset({
        "attention_head_dim", "caption_projection_dim", "dual_attention_layers", "in_channels",
        "joint_attention_dim", "num_attention_heads", "num_layers", "out_channels", "patch_size",
        "pooled_projection_dim", "pos_embed_max_size", "qk_norm", "sample_size",
    }),
    has_experts=False,
    names_attention=False,
    sigmas=static_shift,
    packed=False,
    decoder_factor=_halved_per_block,
    frame_factor=None,
    max_tokens_per_side=lambda network: network.get("pos_embed_max_size"),
    text_tokens=128,
    max_text_tokens=512,
    text_tokenizer="tokenizer_3",
    condition_shapes=lambda network, tokens: {
        "text": (CLIP_TOKENS + tokens, network["joint_attention_dim"]),
        "pooled": (network["pooled_projection_dim"],),
    },
    embeds_guidance=False,
    guidance_arguments=_guidance_scale,
    takes_sigmas=True,
    lora_targets=JOINT_ATTENTION,
    native_layers=SD3,
)  # fmt: skip

_FLUX = FamilySpec(
    pipeline="FluxPipeline",
    adapter="shared.diffusion.families.flux:Flux",
    components=_TWO_ENCODERS,
    network_keys=frozenset({
        "attention_head_dim", "axes_dims_rope", "guidance_embeds", "in_channels",
        "joint_attention_dim", "num_attention_heads", "num_layers", "num_single_layers",
        "out_channels", "patch_size", "pooled_projection_dim",
    }),
    has_experts=False,
    names_attention=True,
    sigmas=shift_by_tokens,
    packed=True,
    decoder_factor=_halved_per_block,
    frame_factor=None,
    max_tokens_per_side=_any_size,
    text_tokens=512,
    max_text_tokens=512,
    text_tokenizer=None,
    condition_shapes=lambda network, tokens: {
        "text": (tokens, network["joint_attention_dim"]),
        "pooled": (network["pooled_projection_dim"],),
    },
    embeds_guidance=True,
    guidance_arguments=_guidance_scale,
    takes_sigmas=True,
    lora_targets=JOINT_ATTENTION,
    native_layers=FLUX,
)  # fmt: skip

_QWEN_IMAGE = FamilySpec(
    pipeline="QwenImagePipeline",
    adapter="shared.diffusion.families.qwen_image:QwenImage",
    components=_ONE_ENCODER,
    network_keys=frozenset({
        "attention_head_dim", "axes_dims_rope", "in_channels", "joint_attention_dim",
        "num_attention_heads", "num_layers", "out_channels", "patch_size",
        "pooled_projection_dim",  # in the published folder, and used by no network
    }),
    has_experts=False,
    names_attention=True,
    sigmas=shift_by_tokens,
    packed=True,
    decoder_factor=lambda decoder: int(2 ** len(decoder["temperal_downsample"])),
    frame_factor=None,
    max_tokens_per_side=_any_size,
    text_tokens=1024,
    max_text_tokens=1024,
    text_tokenizer=None,
    condition_shapes=lambda network, tokens: {"text": (tokens, network["joint_attention_dim"])},
    embeds_guidance=False,
    guidance_arguments=lambda guidance: {"true_cfg_scale": guidance, "negative_prompt": '""'},
    takes_sigmas=True,
    lora_targets=(
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    ),
    native_layers=SAME,
)  # fmt: skip

_WAN = FamilySpec(
    pipeline="WanPipeline",
    adapter="shared.diffusion.families.wan:Wan",
    components=_ONE_ENCODER,
    network_keys=frozenset({
        "attention_head_dim", "cross_attn_norm", "eps", "ffn_dim", "freq_dim", "in_channels",
        "num_attention_heads", "num_layers", "out_channels", "patch_size", "qk_norm",
        "rope_max_seq_len", "text_dim",
    }),
    has_experts=True,
    names_attention=True,
    sigmas=static_shift,
    packed=False,
    decoder_factor=lambda decoder: int(decoder.get("scale_factor_spatial", 8)),
    frame_factor=lambda decoder: int(decoder.get("scale_factor_temporal", 4)),
    max_tokens_per_side=_any_size,
    text_tokens=512,
    max_text_tokens=512,
    text_tokenizer=None,
    condition_shapes=lambda network, tokens: {"text": (tokens, network["text_dim"])},
    embeds_guidance=False,
    guidance_arguments=_guidance_scale,
    takes_sigmas=False,
    lora_targets=tuple(
        f"{attention}.{layer}"
        for attention in ("attn1", "attn2")
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    native_layers=WAN,
)  # fmt: skip

_HUNYUAN_VIDEO = FamilySpec(
    pipeline="HunyuanVideoPipeline",
    adapter="shared.diffusion.families.hunyuan_video:HunyuanVideo",
    components=_TWO_ENCODERS,
    network_keys=frozenset({
        "attention_head_dim", "guidance_embeds", "in_channels", "mlp_ratio", "num_attention_heads",
        "num_layers", "num_refiner_layers", "num_single_layers", "out_channels", "patch_size",
        "patch_size_t", "pooled_projection_dim", "qk_norm", "rope_axes_dim", "rope_theta",
        "text_embed_dim",
    }),
    has_experts=False,
    names_attention=True,
    sigmas=single_static_shift,
    packed=False,
    decoder_factor=lambda decoder: int(decoder.get("spatial_compression_ratio", 8)),
    frame_factor=lambda decoder: int(decoder.get("temporal_compression_ratio", 4)),
    max_tokens_per_side=_any_size,
    text_tokens=256,
    max_text_tokens=256,
    text_tokenizer=None,
    condition_shapes=lambda network, tokens: {
        "text": (tokens, network["text_embed_dim"]),
        "pooled": (network["pooled_projection_dim"],),
    },
    embeds_guidance=True,
    guidance_arguments=_guidance_scale,
    takes_sigmas=True,
    lora_targets=JOINT_ATTENTION,
    native_layers=HUNYUAN_VIDEO,
)  # fmt: skip

_FLUX2_KLEIN = FamilySpec(
    pipeline="Flux2KleinPipeline",
    adapter="shared.diffusion.families.flux2:Flux2Klein",
    components=_ONE_ENCODER,
    network_keys=frozenset({
        "attention_head_dim", "axes_dims_rope", "eps", "in_channels", "joint_attention_dim",
        "mlp_ratio", "num_attention_heads", "num_layers", "num_single_layers", "out_channels",
        "patch_size", "rope_theta", "timestep_guidance_channels",
    }),
    has_experts=False,
    names_attention=True,
    sigmas=shift_by_tokens_and_steps,
    packed=False,
    decoder_factor=lambda decoder: 2 * _halved_per_block(decoder),
    frame_factor=None,
    max_tokens_per_side=_any_size,
    text_tokens=512,
    max_text_tokens=512,
    text_tokenizer=None,
    condition_shapes=lambda network, tokens: {"text": (tokens, network["joint_attention_dim"])},
    embeds_guidance=False,
    guidance_arguments=_guidance_scale,
    takes_sigmas=True,
    lora_targets=(*JOINT_ATTENTION, "attn.to_qkv_mlp_proj", "attn.to_out"),
    native_layers=FLUX2,
)  # fmt: skip

_Z_IMAGE = FamilySpec(
    pipeline="ZImagePipeline",
    adapter="shared.diffusion.families.z_image:ZImage",
    components=_ONE_ENCODER,
    network_keys=frozenset({
        "all_f_patch_size", "all_patch_size", "axes_dims", "axes_lens", "cap_feat_dim", "dim",
        "in_channels", "n_heads", "n_kv_heads", "n_layers", "n_refiner_layers", "norm_eps",
        "qk_norm", "rope_theta", "t_scale",
    }),
    has_experts=False,
    names_attention=True,
    sigmas=shift_by_tokens,
    packed=False,
    decoder_factor=_halved_per_block,
    frame_factor=None,
    max_tokens_per_side=_any_size,
    text_tokens=512,
    max_text_tokens=512,
    text_tokenizer=None,
    condition_shapes=lambda network, tokens: {"text": (tokens, network["cap_feat_dim"])},
    embeds_guidance=False,
    guidance_arguments=lambda guidance: {"guidance_scale": guidance - 1},
    takes_sigmas=True,
    lora_targets=tuple(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
    native_layers=Z_IMAGE,
)  # fmt: skip

FAMILIES: dict[str, FamilySpec] = {
    spec.pipeline: spec
    for spec in (_SD3, _FLUX, _FLUX2_KLEIN, _Z_IMAGE, _QWEN_IMAGE, _WAN, _HUNYUAN_VIDEO)
}
"""Every family, by the name of its pipeline."""
