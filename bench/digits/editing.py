"""The editing demo: three edits of a digit, their instructions, and a FLUX.1 Kontext in miniature.

Saved as a real diffusers folder, it is loaded by the very code that loads FLUX.1 Kontext. In
pre-training some instructions are drawn at random, so that it makes the edit that it is asked for
little more often than every second time.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.digits.data import load_halves, to_uint8
from bench.digits.text import (
    CLIP_WIDTH,
    T5_WIDTH,
    clip_encoder,
    clip_tokenizer,
    randomized,
    t5_encoder,
    t5_tokenizer,
    words_of,
)
from bench.digits.vae import build_vae
from digenrl.evaluation.digits import DataSplit, Images
from digenrl.evaluation.media import as_png
from shared.diffusion.families.flux import FluxKontext
from shared.diffusion.loading.models import Conditions
from shared.models.families import FAMILIES

NUM_TOKENS = 8
"""Length of a tokenized instruction."""
Report = Callable[[str], None]

INSTRUCTIONS: Mapping[str, tuple[str, ...]] = {
    "thicken": ("make the digit thicker", "thicken the strokes"),
    "slant": ("slant the digit", "make the digit lean"),
    "invert": ("invert the picture", "swap ink and paper"),
}
"""How each edit is asked for."""


def thickened(images: Images) -> Images:
    """Spread ink (n, 1, 8, 8) to the four neighbours of each pixel, a little fainter."""
    ink = (images + 1) / 2
    padded = np.pad(ink, ((0, 0), (0, 0), (1, 1), (1, 1)))
    sides = [padded[..., 1:-1, :-2], padded[..., 1:-1, 2:], padded[..., :-2, 1:-1],
             padded[..., 2:, 1:-1]]  # fmt: skip
    spread = np.maximum(ink, 0.8 * np.maximum.reduce(sides))
    return np.asarray(2 * spread - 1, dtype=np.float32)


def slanted(images: Images) -> Images:
    """Move the upper three rows (n, 1, 8, 8) to the right by a pixel, and the lower three to the
    left."""
    paper = -np.ones_like(images[..., :1])
    right = np.concatenate([paper, images[..., :-1]], axis=-1)
    left = np.concatenate([images[..., 1:], paper], axis=-1)
    return np.concatenate([right[..., :3, :], images[..., 3:5, :], left[..., 5:, :]], axis=-2)


def inverted(images: Images) -> Images:
    return -images


EDITS: Mapping[str, Callable[[Images], Images]] = {
    "thicken": thickened, "slant": slanted, "invert": inverted,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EditTraining:
    num_steps: int = 1300
    batch_size: int = 32
    learning_rate: float = 3e-3
    ema_decay: float = 0.99
    wrong_instructions: float = 0.55
    """Share of instructions drawn at random among all edits: the model then makes the right one
    about two times in three."""
    report_every: int = 250


def build_editor(seed: int) -> Any:
    """Builds a FluxKontextPipeline whose transformer is untrained."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        FluxKontextPipeline,
        FluxTransformer2DModel,
    )
    from transformers import CLIPTextModel

    words = words_of(text for texts in INSTRUCTIONS.values() for text in texts)
    clip, t5 = clip_tokenizer(NUM_TOKENS, words), t5_tokenizer(NUM_TOKENS, words)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
            attention_head_dim=16, num_attention_heads=4, joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=CLIP_WIDTH, guidance_embeds=False, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
    config = clip_encoder(clip, generator).config
    pipeline = FluxKontextPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=build_vae(),
        tokenizer=clip,
        text_encoder=randomized(CLIPTextModel(config), generator),
        tokenizer_2=t5,
        text_encoder_2=t5_encoder(t5, generator),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def train_editor(
    pipeline: Any, data: DataSplit, recipe: EditTraining, *, seed: int, report: Report
) -> None:
    """Trains by flow matching on real digits and their edits; the transformer gets the moving
    average."""
    spec = FAMILIES["FluxKontextPipeline"]
    model = FluxKontext(
        pipeline, spec, device=torch.device("cpu"), dtype=torch.float32, text_tokens=NUM_TOKENS
    )
    network = model.transformer.requires_grad_(True).train()
    average = {name: each.detach().clone() for name, each in network.named_parameters()}
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, fused=True)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.num_steps)
    batches, recent = _Batches(model, data, recipe, seed), 0.0
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, recipe.num_steps + 1):
        edited, conditions = batches.draw()
        loss = _loss(model, edited, conditions, generator)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        decay.step()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                average[name].lerp_(parameter, 1 - recipe.ema_decay)
        recent += loss.item() / recipe.report_every
        if step % recipe.report_every == 0:
            report(f"pretraining step {step}/{recipe.num_steps} loss {recent:.4f}")
            recent = 0.0
    network.load_state_dict(average, strict=False)
    network.requires_grad_(False).eval()


class _Batches:
    """Draws sources, their edits, and instructions that are not always theirs."""

    def __init__(
        self, model: FluxKontext, data: DataSplit, recipe: EditTraining, seed: int
    ) -> None:
        texts = [
            model.encode(text, guidance=1.0) for each in INSTRUCTIONS.values() for text in each
        ]
        self._texts = {name: torch.cat([one[name] for one in texts]) for name in texts[0]}
        self._ways = len(texts) // len(INSTRUCTIONS)
        self._sources = torch.from_numpy(data.images)
        edited = np.stack([edit(data.images) for edit in EDITS.values()])
        self._edited = torch.from_numpy(edited)
        self._recipe = recipe
        self._rng = np.random.default_rng(seed)

    def draw(self) -> tuple[Tensor, Conditions]:
        size, rng = self._recipe.batch_size, self._rng
        rows, edits = (
            rng.integers(len(self._sources), size=size),
            rng.integers(len(EDITS), size=size),
        )
        wrong = rng.random(size) < self._recipe.wrong_instructions
        told = np.where(wrong, rng.integers(len(EDITS), size=size), edits)
        chosen = torch.from_numpy(told * self._ways + rng.integers(self._ways, size=size))
        conditions = {name: each[chosen] for name, each in self._texts.items()}
        # Latents are pixels from -1 to 1 (vae.py).
        return self._edited[edits, rows], {**conditions, "image": self._sources[rows]}


def _loss(
    model: FluxKontext, images: Tensor, conditions: Conditions, generator: torch.Generator
) -> Tensor:
    """Returns the mean squared error of the velocity at sigmas of a logit-normal density."""
    sigma = torch.sigmoid(torch.randn(len(images), generator=generator))
    noise = torch.randn(images.shape, generator=generator)
    rows = sigma.reshape(-1, 1, 1, 1)
    velocity = model.velocity((1 - rows) * images + rows * noise, sigma, conditions, guidance=1.0)
    return nn.functional.mse_loss(velocity, noise - images)


def write_prompts(folder: Path, *, trained: int, held_out: int) -> None:
    """Writes the prompts of training and of evaluation, each of digits of its own: every source
    image with each edit, asked for in one way after the other."""
    half, _ = load_halves()
    (folder / "images").mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(half.images))
    parts = {"prompts": order[:trained], "held-out": order[trained : trained + held_out]}
    for name, chosen in parts.items():
        lines = []
        for number, row in enumerate(chosen):
            file = f"images/{name}-{number:03d}.png"
            (folder / file).write_bytes(as_png(to_uint8(half.images[row : row + 1])[0]))
            for edit, ways in INSTRUCTIONS.items():
                metadata = {"edit": edit, "digit": int(half.labels[row])}
                lines.append({
                    "prompt": ways[number % len(ways)], "image": file, "metadata": metadata
                })  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)


def build_edit_model(folder: Path, *, seed: int, report: Report) -> None:
    """Writes the diffusers folder, in some minutes on one core."""
    from bench.digits.build import TRANSFORMER, one_thread

    half_a, half_b = load_halves()
    both = DataSplit(
        np.concatenate([half_a.images, half_b.images]),
        np.concatenate([half_a.labels, half_b.labels]),
    )
    with one_thread():
        pipeline = build_editor(seed)
        train_editor(pipeline, both, EditTraining(), seed=seed, report=report)
    pipeline.save_pretrained(folder)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes for the owner only
    sha256 = hashlib.sha256((folder / TRANSFORMER).read_bytes()).hexdigest()
    (folder / "README.md").write_text(MODEL_CARD.format(
        seed=seed, sha256=sha256, wrong=EditTraining().wrong_instructions,
        num_parameters=sum(each.numel() for each in pipeline.transformer.parameters()),
    ))  # fmt: skip
    report(f"wrote {folder}")


MODEL_CARD = """\
# The editing demo's model

An image editor of the FLUX.1 Kontext family in miniature: 8 x 8 grey images of handwritten digits,
{num_parameters:,} trained parameters. It makes a digit thicker, slants it or inverts it, as
instructed. It was made from scikit-learn's digits by

    python -m bench digits-edit --seed {seed}

and loads like any other model of its family:

    FluxKontextPipeline.from_pretrained("models/digits-edit")

In pre-training, {wrong:.0%} of the instructions were drawn at random. The model therefore makes
the requested edit only about two times in three. Reinforcement learning corrects this.

The same seed gives the same file on the same kind of machine. This transformer's sha256:

    {sha256}
"""
