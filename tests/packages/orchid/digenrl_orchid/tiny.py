"""Saves a small random model of the family, for `python -m bench check-family`."""

import json
from pathlib import Path

import torch

from bench.digits.text import clip_encoder, clip_tokenizer, randomized, t5_encoder, t5_tokenizer
from digenrl.trace.device_profile.models import ARCHITECTURES, ModelName


def save(folder: Path) -> None:
    import diffusers
    from transformers import CLIPTextModel

    generator = torch.Generator().manual_seed(1)
    clip, t5 = clip_tokenizer(77), t5_tokenizer()
    blocks = 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = diffusers.FluxPipeline(
            transformer=diffusers.FluxTransformer2DModel(
                **ARCHITECTURES[ModelName.flux1_dev].tiny().config
            ),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, shift=3.0
            ),
            vae=diffusers.AutoencoderKL(
                in_channels=3, out_channels=3, latent_channels=16, norm_num_groups=2,
                block_out_channels=(4,) * blocks, layers_per_block=1,
                down_block_types=("DownEncoderBlock2D",) * blocks,
                up_block_types=("UpDecoderBlock2D",) * blocks,
                scaling_factor=0.3611, shift_factor=0.1159,
                use_quant_conv=False, use_post_quant_conv=False,
            ),
            tokenizer=clip,
            text_encoder=randomized(
                CLIPTextModel(clip_encoder(clip, generator).config), generator
            ),
            tokenizer_2=t5,
            text_encoder_2=t5_encoder(t5, generator),
        )  # fmt: skip
    pipeline.save_pretrained(folder)
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": "OrchidPipeline"}))
