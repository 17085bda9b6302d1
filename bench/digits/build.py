"""Make the demo's model and its rewards from nothing but scikit-learn's digits and a seed."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from bench.digits.classifiers import build_rewards
from bench.digits.data import load_halves
from bench.digits.generator import Pretraining, build_pipeline, pretrain, save_pipeline
from bench.digits.network import Network
from bench.digits.text import NUM_TOKENS
from digenrl.evaluation.digits import DataSplit

TRANSFORMER = Path("transformer", "diffusion_pytorch_model.safetensors")

MODEL_CARD = """\
# The digits demo's model

A text-to-image generator of the Stable Diffusion 3 family in miniature: 8 x 8 grey images of
handwritten digits, {num_parameters:,} trained parameters, 10 denoising steps, a second per hundred
images on one CPU core. It was made from scikit-learn's digits by

    python -m bench digits --seed {seed}

and loads like any other model of its family:

    StableDiffusion3Pipeline.from_pretrained("models/digits")

| part | meaning |
|---|---|
| transformer | SD3Transformer2DModel: 3 layers, 4 heads of 16, patches of 2; flow matching |
| text encoders | two CLIP and one T5, tiny, random and frozen; {num_tokens} tokens each |
| vae | an AutoencoderKL written down as the identity: latents are pixels in -1..1 |

In pre-training, {wrong:.0%} of the captions were drawn at random. The model therefore draws
the requested digit only about every second time. Reinforcement learning corrects this.

The same seed gives the same file on the same kind of machine. This transformer's sha256:

    {sha256}
"""


def build_model(
    folder: Path, rewards_folder: Path, *, seed: int, report: Callable[[str], None]
) -> None:
    """Writes the diffusers folder and the reward folder, in some minutes on one core."""
    started = time.monotonic()
    half_a, half_b = load_halves()
    both = DataSplit(
        np.concatenate([half_a.images, half_b.images]),
        np.concatenate([half_a.labels, half_b.labels]),
    )
    recipe = Pretraining()
    with one_thread():
        build_rewards(rewards_folder, half_a, half_b, seed=seed, report=report)
        pipeline = build_pipeline(seed)
        pretrain(pipeline, both, recipe, seed=seed, report=report)
    save_pipeline(pipeline, folder)
    (folder / "README.md").write_text(_model_card(folder, pipeline.transformer, recipe, seed))
    for path in (*folder.rglob("*.safetensors"), *rewards_folder.glob("*.safetensors")):
        path.chmod(0o644)  # safetensors writes for the owner only
    report(f"wrote {folder} and {rewards_folder} in {time.monotonic() - started:.0f} s")


def build_untrained(folder: Path, network: Network, *, seed: int) -> None:
    """Writes a diffusers folder with random weights: enough to time what a size costs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when it is imported

    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
    save_pipeline(build_pipeline(seed, network), folder)


@contextmanager
def one_thread() -> Iterator[None]:
    """Fixes the order of sums: a seed gives the same weights on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _model_card(folder: Path, transformer: torch.nn.Module, recipe: Pretraining, seed: int) -> str:
    return MODEL_CARD.format(
        seed=seed,
        num_parameters=sum(parameter.numel() for parameter in transformer.parameters()),
        num_tokens=NUM_TOKENS,
        wrong=recipe.wrong_captions,
        sha256=hashlib.sha256((folder / TRANSFORMER).read_bytes()).hexdigest(),
    )
