"""A small random LTX-2, and its state: video and sound in one tensor."""

from typing import Any

import torch

from bench.digits.text import randomized


def build(tokenizer: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "max_position_embeddings": 2048,
        },
        vision_config={
            "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 14, "patch_size": 14,
        },
        mm_tokens_per_image=1,
    )  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=3,
        **{
            f"{kind}_connector_{name}": value
            for kind in ("video", "audio")
            for name, value in {
                "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1,
                "num_learnable_registers": 1,
            }.items()
        },
    )  # fmt: skip
    return LTX2Pipeline(
        **_networks(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024,
            shift_terminal=0.1,
        ),
        tokenizer=tokenizer,
        text_encoder=randomized(
            Gemma3ForConditionalGeneration(config), torch.Generator().manual_seed(1)
        ),
        connectors=connectors,
        vocoder=LTX2Vocoder(
            in_channels=32, hidden_channels=4, upsample_kernel_sizes=[4], upsample_factors=[2],
            resnet_kernel_sizes=[3], resnet_dilations=[[1]],
        ),
    )  # fmt: skip


def _networks() -> dict[str, Any]:
    """The network and the decoders of video, 16 pixels and 4 frames per latent, and of sound."""
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        LTX2VideoTransformer3DModel,
    )

    blocks = 2
    vae = AutoencoderKLLTX2Video(
        latent_channels=8, block_out_channels=(8,) * blocks,
        down_block_types=("LTX2VideoDownBlock3D",) * blocks, layers_per_block=(1,) * (blocks + 1),
        spatio_temporal_scaling=(True,) * blocks, downsample_type=("spatiotemporal",) * blocks,
        decoder_block_out_channels=(8, 16), decoder_layers_per_block=(1,) * (blocks + 1),
        decoder_spatio_temporal_scaling=(True,) * blocks,
        decoder_inject_noise=(False,) * (blocks + 1), upsample_type=("spatiotemporal",) * blocks,
        upsample_residual=(True,) * blocks, upsample_factor=(2,) * blocks,
        spatial_compression_ratio=16, temporal_compression_ratio=4,
    )  # fmt: skip
    vae.latents_mean.normal_(std=0.1)
    vae.latents_std.uniform_(0.5, 1.5)
    network = LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, vae_scale_factors=(4, 16, 16), audio_in_channels=8,
        audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=2, caption_channels=16,
    )  # fmt: skip
    sound = AutoencoderKLLTX2Audio(
        base_channels=8, latent_channels=2, mel_bins=16, num_res_blocks=1, ch_mult=(1, 1, 1)
    )
    return {"transformer": network, "vae": vae, "audio_vae": sound}


def tokens(pipeline: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What its pipeline takes as latents of the video and of the sound: (B, n, C) each."""
    video, sound, _ = _parts(pipeline, latents)
    return pipeline._pack_latents(video), sound


def joined(
    pipeline: Any, video: torch.Tensor, sound: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """The latents that its pipeline returns, as the network has them; the rest is noise."""
    vae = pipeline.vae
    video = pipeline._normalize_latents(video, vae.latents_mean, vae.latents_std)
    cells = [sound.transpose(1, 2).flatten(2).transpose(1, 2), _parts(pipeline, start)[2]]
    beside = torch.cat(cells, dim=2).reshape(*start.shape[:4], -1)
    return torch.cat([video, beside], dim=-1)


def latent_shape(pipeline: Any, rows: int, columns: int, frames: int) -> tuple[int, ...]:
    latent_frames = (frames - 1) // pipeline.vae_temporal_compression_ratio + 1
    more = -(-_sound_tokens(pipeline, latent_frames) // (latent_frames * rows))
    return (pipeline.transformer.config.in_channels, latent_frames, rows, columns + more)


def _parts(pipeline: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its video (B, C, F, h, w), its sound (B, L, C), and the cells (B, C, n) of neither."""
    frames, rows, columns = latents.shape[2:]
    count = _sound_tokens(pipeline, frames)
    more = -(-count // (frames * rows))
    video, beside = latents[..., : columns - more], latents[..., columns - more :].flatten(2)
    return video, beside[..., :count].transpose(1, 2), beside[..., count:]


def _sound_tokens(pipeline: Any, latent_frames: int) -> int:
    """What its pipeline counts at 24 frames per second."""
    frames = (latent_frames - 1) * pipeline.vae_temporal_compression_ratio + 1
    rate = pipeline.audio_sampling_rate / pipeline.audio_hop_length
    factor = float(pipeline.audio_vae_temporal_compression_ratio)
    return int(round(frames / 24 * (rate / factor)))  # noqa: RUF046
