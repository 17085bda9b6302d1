"""Writes SD3.5-M with random weights as a diffusers folder: its published sizes, without T5.

Random weights cost what published ones do, in time and in memory. The folder has two CLIP encoders;
T5 may be left out of this family, and its embeddings are then zeros.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.digits.text import clip_tokenizer, randomized
from digenrl.trace.device_profile.models import ARCHITECTURES, ModelName
from digenrl.trace.device_profile.network import DTYPE, random_transformer
from shared.diffusion.loading.device import own_device, release
from shared.errors import UserError

COMPLETE = "complete"
"""Name of a file that is written last, so that a folder cut short is written again."""
CLIP_TOKENS = 77
VOCABULARY = 49408
Encoder = dict[str, Any]
CLIP_L: Encoder = {
    "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 768,
    "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_act": "quick_gelu",
}  # fmt: skip
CLIP_G: Encoder = {
    "hidden_size": 1280, "intermediate_size": 5120, "projection_dim": 1280,
    "num_hidden_layers": 32, "num_attention_heads": 20, "hidden_act": "gelu",
}  # fmt: skip
TINY_CLIP: Encoder = {
    "hidden_size": 16, "intermediate_size": 32, "projection_dim": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_act": "gelu",
}  # fmt: skip
"""Two of them, side by side, are as wide as the tiny network's pooled input."""
BLOCKS = 4
DECODER: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32,
    "down_block_types": ("DownEncoderBlock2D",) * BLOCKS,
    "up_block_types": ("UpDecoderBlock2D",) * BLOCKS,
    "sample_size": 1024, "scaling_factor": 1.5305, "shift_factor": 0.0609,
    "use_quant_conv": False, "use_post_quant_conv": False, "force_upcast": True,
}  # fmt: skip
TINY_DECODER: dict[str, Any] = {
    "block_out_channels": (4,) * BLOCKS, "layers_per_block": 1, "norm_num_groups": 2,
}  # fmt: skip


def write_model(
    folder: Path, *, tiny: bool = False, seed: int = 0, report: Callable[[str], None]
) -> None:
    """Writes the folder in bfloat16, unless it is there. At full size it has 6.4 GB.

    Raises:
        UserError: if another folder is in its place.
    """
    mark = folder / COMPLETE
    if mark.is_file():
        report(f"{folder} is there")
        return
    if folder.exists() and any(folder.iterdir()) and not (folder / "model_index.json").is_file():
        raise UserError(f"--model: {folder} holds something else; name an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _pipeline(tiny, own_device())
    report(f"{folder}: {_sizes(pipeline)}")
    pipeline.save_pretrained(folder, max_shard_size="10GB")
    mark.touch()
    del pipeline
    release(own_device())


def _pipeline(tiny: bool, device: torch.device) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported

    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    architecture = ARCHITECTURES[ModelName.sd35_medium]
    architecture = architecture.tiny() if tiny else architecture
    tokenizer = clip_tokenizer(CLIP_TOKENS)
    sizes = (TINY_CLIP, TINY_CLIP) if tiny else (CLIP_L, CLIP_G)
    first, second = (_clip(tokenizer, size).to(DTYPE) for size in sizes)
    transformer = random_transformer(architecture, device)  # which a GPU draws faster
    return StableDiffusion3Pipeline(
        transformer=transformer.to(DTYPE),  # with its table of positions
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_decoder(tiny),
        tokenizer=tokenizer,
        tokenizer_2=clip_tokenizer(CLIP_TOKENS),
        tokenizer_3=None,
        text_encoder=first,
        text_encoder_2=second,
        text_encoder_3=None,
    )


def _clip(tokenizer: Any, size: Encoder) -> nn.Module:
    """Builds an encoder with the published number of embeddings, of which the tokenizer uses the
    first few."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        **size,
        vocab_size=max(VOCABULARY, len(tokenizer)) if size is not TINY_CLIP else len(tokenizer),
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return randomized(CLIPTextModelWithProjection(config), torch.Generator().manual_seed(1))


def _decoder(tiny: bool) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(**{**DECODER, **(TINY_DECODER if tiny else {})}).to(DTYPE)


def _sizes(pipeline: Any) -> str:
    """Says how many weights each network has."""
    counts = {
        name: sum(parameter.numel() for parameter in part.parameters())
        for name, part in pipeline.components.items()
        if isinstance(part, nn.Module)
    }
    return ", ".join(f"{name} {count / 1e9:.3f} B" for name, count in sorted(counts.items()))
