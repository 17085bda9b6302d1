"""The demo's generator: a text-to-image model of the SD3 family, small enough for one CPU core.

Saved as a real diffusers folder, it is loaded by the very code that loads Stable Diffusion 3.5.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.digits.data import SIZE
from bench.digits.network import Network
from bench.digits.text import CLIP_WIDTH, T5_WIDTH, TEMPLATES, build_text_parts, prompt_texts
from bench.digits.vae import build_vae
from digenrl.evaluation.digits import NUM_DIGITS, DataSplit
from shared.diffusion.families.sd3 import StableDiffusion3
from shared.diffusion.loading.models import Conditions
from shared.models.families import FAMILIES

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretraining:
    num_steps: int = 1600
    batch_size: int = 64
    learning_rate: float = 2e-3
    ema_decay: float = 0.99
    wrong_captions: float = 0.4
    """Share of captions drawn at random: the model then draws the digit of its prompt little more
    often than every second time, which leaves reinforcement learning something to improve."""
    report_every: int = 200


def build_pipeline(seed: int, network: Network | None = None) -> Any:
    """Builds a StableDiffusion3Pipeline whose transformer is untrained."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    size = network or Network()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = SD3Transformer2DModel(
            sample_size=SIZE,
            patch_size=size.patch,
            in_channels=1,
            out_channels=1,
            num_layers=size.layers,
            num_attention_heads=size.heads,
            attention_head_dim=size.head_width,
            joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=2 * CLIP_WIDTH,
            caption_projection_dim=size.heads * size.head_width,
            pos_embed_max_size=SIZE // size.patch,
            qk_norm="rms_norm",
        )
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=build_vae(),
        **build_text_parts(seed),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_pipeline(pipeline: Any, folder: Path) -> None:
    pipeline.save_pretrained(folder)
    # transformers 5 has one T5 tokenizer; 4 knows this one, of files like ours, by its old name.
    index = folder / "model_index.json"
    content = json.loads(index.read_text())
    content["tokenizer_3"] = ["transformers", "T5TokenizerFast"]
    index.write_text(json.dumps(content, indent=2) + "\n")


def pretrain(
    pipeline: Any, data: DataSplit, recipe: Pretraining, *, seed: int, report: Report
) -> None:
    """Trains by flow matching on real digits; the transformer gets the moving average."""
    spec = FAMILIES["StableDiffusion3Pipeline"]
    model = StableDiffusion3(
        pipeline,
        spec,
        device=torch.device("cpu"),
        dtype=torch.float32,
        text_tokens=spec.text_tokens,
    )
    transformer = model.transformer.requires_grad_(True).train()
    average = {name: tensor.detach().clone() for name, tensor in transformer.named_parameters()}
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=recipe.learning_rate, fused=True)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.num_steps)
    recent = 0.0
    for step, (images, conditions) in enumerate(_batches(model, data, recipe, seed), 1):
        loss = _flow_matching_loss(model, images, conditions, seed=seed + step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        decay.step()
        _update(average, transformer, recipe.ema_decay)
        recent += loss.item() / recipe.report_every
        if step % recipe.report_every == 0:
            report(f"pretraining step {step}/{recipe.num_steps} loss {recent:.4f}")
            recent = 0.0
    transformer.load_state_dict(average, strict=False)
    transformer.requires_grad_(False).eval()


def caption_conditions(model: StableDiffusion3) -> Conditions:
    """Encodes each caption to a row of conditioning (n, ...): by digit, then by template."""
    encoded = [
        model.encode(text, guidance=1.0)
        for digit in range(NUM_DIGITS)
        for text in prompt_texts(digit)
    ]
    return {name: torch.cat([one[name] for one in encoded]) for name in encoded[0]}


def _batches(
    model: StableDiffusion3, data: DataSplit, recipe: Pretraining, seed: int
) -> Iterator[tuple[Tensor, Conditions]]:
    captions = caption_conditions(model)
    images = torch.from_numpy(data.images)
    rng = np.random.default_rng(seed)
    for _ in range(recipe.num_steps):
        chosen = rng.integers(len(images), size=recipe.batch_size)
        digits = data.labels[chosen]
        wrong = rng.random(recipe.batch_size) < recipe.wrong_captions
        digits = np.where(wrong, rng.integers(NUM_DIGITS, size=recipe.batch_size), digits)
        templates = rng.integers(len(TEMPLATES), size=recipe.batch_size)
        rows = torch.from_numpy(digits * len(TEMPLATES) + templates)
        yield images[chosen], {name: tensor[rows] for name, tensor in captions.items()}


def _flow_matching_loss(
    model: StableDiffusion3, images: Tensor, conditions: Conditions, *, seed: int
) -> Tensor:
    """Returns the mean squared error of the velocity at sigmas of a logit-normal density."""
    generator = torch.Generator().manual_seed(seed)
    sigma = torch.sigmoid(torch.randn(len(images), generator=generator))
    noise = torch.randn(images.shape, generator=generator)
    rows = sigma.reshape(-1, 1, 1, 1)
    noisy = (1 - rows) * images + rows * noise
    velocity = model.velocity(noisy, sigma, conditions, guidance=1.0)
    return nn.functional.mse_loss(velocity, noise - images)


@torch.no_grad()
def _update(average: dict[str, Tensor], transformer: nn.Module, decay: float) -> None:
    for name, parameter in transformer.named_parameters():
        average[name].lerp_(parameter, 1 - decay)
