"""The model families that can be trained: one entry each. CONTRIBUTING.md explains how to add
one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from shared.models.family import FamilySpec as FamilySpec
from shared.models.family import Shapes
from shared.models.native_layers import (
    FLUX,
    FLUX2,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_15,
    SAME,
    SD3,
    WAN,
    Z_IMAGE,
)
from shared.models.sigmas import (
    Config,
    shift_by_tokens,
    shift_by_tokens_and_steps,
    single_static_shift,
    solver_shift,
    static_shift,
)
from shared.models.sound import SoundFamilySpec, ltx2_sound_tokens

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


_SD3 = FamilySpec(
    pipeline="StableDiffusion3Pipeline",
    adapter="shared.diffusion.families.sd3:StableDiffusion3",
    components=_TWO_ENCODERS | {"text_encoder_3", "tokenizer_3"},
    network_keys=frozenset({
        "attention_head_dim", "caption_projection_dim", "dual_attention_layers", "in_channels",
        "joint_attention_dim", "num_attention_heads", "num_layers", "out_channels", "patch_size",
        "pooled_projection_dim", "pos_embed_max_size", "qk_norm", "sample_size",
    }),
    names_attention=False,
    sigmas=static_shift,
    decoder_factor=_halved_per_block,
    max_tokens_per_side=lambda network: network.get("pos_embed_max_size"),
    text_tokens=128,
    max_text_tokens=512,
    text_tokenizer="tokenizer_3",
    condition_shapes=lambda network, tokens: {
        "text": (CLIP_TOKENS + tokens, network["joint_attention_dim"]),
        "pooled": (network["pooled_projection_dim"],),
    },
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
    sigmas=shift_by_tokens,
    packed=True,
    decoder_factor=_halved_per_block,
    text_tokens=512,
    max_text_tokens=512,
    condition_shapes=lambda network, tokens: {
        "text": (tokens, network["joint_attention_dim"]),
        "pooled": (network["pooled_projection_dim"],),
    },
    embeds_guidance=True,
    lora_targets=JOINT_ATTENTION,
    native_layers=FLUX,
)  # fmt: skip

_FLUX_KONTEXT = replace(
    _FLUX,
    pipeline="FluxKontextPipeline",
    adapter="shared.diffusion.families.flux:FluxKontext",
    image_shapes=lambda _, latents: {"image": latents},
)

_QWEN_IMAGE = FamilySpec(
    pipeline="QwenImagePipeline",
    adapter="shared.diffusion.families.qwen_image:QwenImage",
    components=_ONE_ENCODER,
    network_keys=frozenset({
        "attention_head_dim", "axes_dims_rope", "in_channels", "joint_attention_dim",
        "num_attention_heads", "num_layers", "out_channels", "patch_size",
        "pooled_projection_dim",  # in the published folder, and used by no network
    }),
    sigmas=shift_by_tokens,
    packed=True,
    decoder_factor=lambda decoder: int(2 ** len(decoder["temperal_downsample"])),
    text_tokens=1024,
    max_text_tokens=1024,
    condition_shapes=lambda network, tokens: {"text": (tokens, network["joint_attention_dim"])},
    negative_prompt=" ",
    guidance_arguments=lambda guidance: {"true_cfg_scale": guidance, "negative_prompt": '""'},
    lora_targets=(
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
    ),
    native_layers=SAME,
)  # fmt: skip

_QWEN_IMAGE_EDIT = replace(
    _QWEN_IMAGE,
    pipeline="QwenImageEditPipeline",
    adapter="shared.diffusion.families.qwen_image:QwenImageEdit",
    components=_ONE_ENCODER | {"processor"},
    # The text has the source image before the prompt: 1369 tokens of 1024 x 1024 pixels.
    text_tokens=2400,
    max_text_tokens=1024 + 16384,
    image_shapes=lambda _, latents: {"image": latents},
)

_OF_WAN = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，"
    "形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
"""sample_neg_prompt of Wan-Video/Wan2.1, wan/configs/shared_config.py."""

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
    sigmas=solver_shift,
    decoder_factor=lambda decoder: int(decoder.get("scale_factor_spatial", 8)),
    frame_factor=lambda decoder: int(decoder.get("scale_factor_temporal", 4)),
    text_tokens=512,
    max_text_tokens=512,
    condition_shapes=lambda network, tokens: {"text": (tokens, network["text_dim"])},
    negative_prompt=_OF_WAN,
    takes_sigmas=False,
    lora_targets=tuple(
        f"{attention}.{layer}"
        for attention in ("attn1", "attn2")
        for layer in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    native_layers=WAN,
)  # fmt: skip

CLIP_IMAGE_TOKENS = 257
"""Tokens of an image of 224 x 224 pixels in pieces of 14, and one for the whole."""


def _first_frame_shapes(network: Config, latents: tuple[int, ...]) -> Shapes:
    """Returns shapes of the first frame's latents with its mask, and of what CLIP sees in it."""
    shapes = {"image": (network["in_channels"] - latents[0], *latents[1:])}
    if network.get("image_dim") is None:  # Wan2.2
        return shapes
    return shapes | {"image_seen": (CLIP_IMAGE_TOKENS, network["image_dim"])}


_WAN_FROM_IMAGE = replace(
    _WAN,
    pipeline="WanImageToVideoPipeline",
    adapter="shared.diffusion.families.wan:WanFromImage",
    components=_ONE_ENCODER | {"image_encoder", "image_processor"},
    network_keys=_WAN.network_keys | {"added_kv_proj_dim", "image_dim"},
    image_shapes=_first_frame_shapes,
)

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
    sigmas=single_static_shift,
    decoder_factor=lambda decoder: int(decoder.get("spatial_compression_ratio", 8)),
    frame_factor=lambda decoder: int(decoder.get("temporal_compression_ratio", 4)),
    text_tokens=256,
    max_text_tokens=256,
    condition_shapes=lambda network, tokens: {
        "text": (tokens, network["text_embed_dim"]),
        "pooled": (network["pooled_projection_dim"],),
    },
    embeds_guidance=True,
    lora_targets=JOINT_ATTENTION,
    native_layers=HUNYUAN_VIDEO,
)  # fmt: skip

_FLUX2 = FamilySpec(
    pipeline="Flux2Pipeline",
    adapter="shared.diffusion.families.flux2:Flux2",
    components=_ONE_ENCODER,
    network_keys=frozenset({
        "attention_head_dim", "axes_dims_rope", "eps", "guidance_embeds", "in_channels",
        "joint_attention_dim", "mlp_ratio", "num_attention_heads", "num_layers",
        "num_single_layers", "out_channels", "patch_size", "rope_theta",
        "timestep_guidance_channels",
    }),
    sigmas=shift_by_tokens_and_steps,
    decoder_factor=lambda decoder: 2 * _halved_per_block(decoder),
    text_tokens=512,
    max_text_tokens=512,
    condition_shapes=lambda network, tokens: {"text": (tokens, network["joint_attention_dim"])},
    embeds_guidance=True,
    lora_targets=(*JOINT_ATTENTION, "attn.to_qkv_mlp_proj", "attn.to_out"),
    native_layers=FLUX2,
)  # fmt: skip

_FLUX2_KLEIN = replace(
    _FLUX2,
    pipeline="Flux2KleinPipeline",
    adapter="shared.diffusion.families.flux2:Flux2Klein",
    network_keys=_FLUX2.network_keys - {"guidance_embeds"},
    embeds_guidance=False,
)

_Z_IMAGE = FamilySpec(
    pipeline="ZImagePipeline",
    adapter="shared.diffusion.families.z_image:ZImage",
    components=_ONE_ENCODER,
    network_keys=frozenset({
        "all_f_patch_size", "all_patch_size", "axes_dims", "axes_lens", "cap_feat_dim", "dim",
        "in_channels", "n_heads", "n_kv_heads", "n_layers", "n_refiner_layers", "norm_eps",
        "qk_norm", "rope_theta", "t_scale",
    }),
    sigmas=shift_by_tokens,
    decoder_factor=_halved_per_block,
    text_tokens=512,
    max_text_tokens=512,
    condition_shapes=lambda network, tokens: {"text": (tokens, network["cap_feat_dim"])},
    guidance_arguments=lambda guidance: {"guidance_scale": guidance - 1},
    lora_targets=tuple(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
    native_layers=Z_IMAGE,
)  # fmt: skip

_HUNYUAN_VIDEO_15 = FamilySpec(
    pipeline="HunyuanVideo15Pipeline",
    adapter="shared.diffusion.families.hunyuan_video15:HunyuanVideo15",
    components=_TWO_ENCODERS | {"guider"},
    network_keys=frozenset({
        "attention_head_dim", "image_embed_dim", "in_channels", "mlp_ratio", "num_attention_heads",
        "num_layers", "num_refiner_layers", "out_channels", "patch_size", "patch_size_t", "qk_norm",
        "rope_axes_dim", "rope_theta", "target_size", "task_type", "text_embed_2_dim",
        "text_embed_dim",
    }),
    sigmas=single_static_shift,
    decoder_factor=lambda decoder: int(decoder.get("spatial_compression_ratio", 16)),
    frame_factor=lambda decoder: int(decoder.get("temporal_compression_ratio", 4)),
    text_tokens=1000,
    max_text_tokens=1000,
    # A prompt that quotes nothing: what is quoted is encoded besides.
    condition_shapes=lambda network, tokens: {"text": (tokens, network["text_embed_dim"])},
    guidance_arguments=lambda _: {},  # its guider has it
    lora_targets=JOINT_ATTENTION,
    native_layers=HUNYUAN_VIDEO_15,
)  # fmt: skip

_LTX2 = SoundFamilySpec(
    pipeline="LTX2Pipeline",
    adapter="shared.diffusion.families.ltx2:LTX2",
    components=_ONE_ENCODER | {"audio_vae", "connectors", "processor", "vocoder"},
    network_keys=frozenset({
        "activation_fn", "attention_bias", "attention_head_dim", "attention_out_bias",
        "audio_attention_head_dim", "audio_cross_attention_dim", "audio_ff_bias",
        "audio_hop_length", "audio_in_channels", "audio_num_attention_heads",
        "audio_out_channels", "audio_patch_size", "audio_patch_size_t",
        "audio_pos_embed_max_pos", "audio_sampling_rate", "audio_scale_factor", "base_height",
        "base_width", "caption_channels", "causal_offset", "cross_attention_dim",
        "cross_attn_timestep_scale_multiplier", "ff_bias", "in_channels", "norm_eps",
        "num_attention_heads", "num_layers", "out_channels", "patch_size", "patch_size_t",
        "pos_embed_max_pos", "qk_norm", "rope_double_precision", "rope_theta", "rope_type",
        "timestep_scale_multiplier", "use_prompt_adaln_single", "use_prompt_embeddings",
        "vae_scale_factors",
    }),
    sigmas=shift_by_tokens,
    decoder_factor=lambda decoder: int(decoder.get("spatial_compression_ratio") or 32),
    frame_factor=lambda decoder: int(decoder.get("temporal_compression_ratio") or 8),
    text_tokens=1024,
    max_text_tokens=1024,
    condition_shapes=lambda network, tokens: {
        "text": (tokens, network["caption_channels"]),
        "sound_text": (tokens, network["caption_channels"]),
    },
    guidance_arguments=lambda guidance: {
        "guidance_scale": guidance, "audio_guidance_scale": guidance,
        **dict.fromkeys(("stg_scale", "audio_stg_scale"), 0.0),
        **dict.fromkeys(("modality_scale", "audio_modality_scale"), 1.0),
        **dict.fromkeys(("guidance_rescale", "audio_guidance_rescale"), 0.0),
    },
    lora_targets=_WAN.lora_targets,
    native_layers=SAME,
    sound_tokens=ltx2_sound_tokens,
)  # fmt: skip

FAMILIES: dict[str, FamilySpec] = {
    spec.pipeline: spec
    for spec in (
        _SD3,
        _FLUX,
        _FLUX_KONTEXT,
        _FLUX2,
        _FLUX2_KLEIN,
        _Z_IMAGE,
        _QWEN_IMAGE,
        _QWEN_IMAGE_EDIT,
        _WAN,
        _WAN_FROM_IMAGE,
        _HUNYUAN_VIDEO,
        _HUNYUAN_VIDEO_15,
        _LTX2,
    )
}
"""Every family, by the name of its pipeline."""
