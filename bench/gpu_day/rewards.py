"""Measures the seconds that a reward worker takes to score an image with CLIP-H."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.digits.text import clip_tokenizer
from digenrl.planning.scoring import GPU_TFLOPS, THREAD_TFLOPS
from digenrl.trace.device_profile.ladder import timed
from services.reward.kinds import scorer_network
from services.reward.scorer import build_scorers
from shared.diffusion.loading.device import own_device
from shared.recipe.rewards import ScorerTable
from tests.reward import tiny_scorers

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

KIND = "hpsv2"
SIDE, PATCH = 224, 14
TEXT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16}  # fmt: skip
VISION = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
          "num_attention_heads": 16, "image_size": SIDE, "patch_size": PATCH}  # fmt: skip
THREADS, MANY_THREADS, GPU_IMAGES, CPU_IMAGES = 1, 8, 32, 2


def measure(day: "Day") -> dict[str, Any]:
    """Returns the seconds of an image on the CPU's threads or on the GPU, and those that are
    charged."""
    folder, device = day.folder / ("clip-tiny" if day.tiny else "clip-h"), own_device()
    if not (folder / "preprocessor_config.json").is_file():  # is written last
        _write(folder, device, tiny=day.tiny)
    [scorer] = build_scorers([ScorerTable(name="x", type=KIND, folder=folder)])
    network, on_gpu = scorer_network(KIND, folder), device.type == "cuda"
    assert network is not None
    found = {}
    for threads in (THREADS,) if on_gpu else (THREADS, min(MANY_THREADS, os.cpu_count() or 1)):
        torch.set_num_threads(threads)
        count = GPU_IMAGES if on_gpu else CPU_IMAGES * threads
        images, metadata = tiny_scorers.images(count, 512, 512), [{"prompt": "a cat"}] * count
        scorer.scorer.score(images[:1], metadata[:1])
        seconds = timed(device, lambda: scorer.scorer.score(images, metadata)) / count  # noqa: B023
        charged = (GPU_TFLOPS if on_gpu else threads * THREAD_TFLOPS) * 1e12
        found["GPU" if on_gpu else f"{threads} threads"] = {
            "seconds": seconds, "operations": network.image_gflop * 1e9 / seconds,
            "charged": charged,
        }  # fmt: skip
    return found


def _write(folder: Path, device: torch.device, *, tiny: bool) -> None:
    """Writes a network with random weights, as transformers saves it."""
    if tiny:
        tiny_scorers.save_clip(folder)
        return
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    tokenizer = clip_tokenizer(77)
    text = TEXT | {"vocab_size": 49408, "eos_token_id": tokenizer.eos_token_id}
    with device:
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=1024))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
                       ).save_pretrained(folder)  # fmt: skip
