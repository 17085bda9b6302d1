"""A small random model of every family through the real services, each with another algorithm."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tests import tiny_models
from tests.e2e.local_run import LocalRun, StartRun

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]

VIDEO = tiny_models.VIDEO
GUIDANCE = {
    "sd3": 1.0, "flux": 3.5, "qwen-image": 4.0, "wan": 4.0, "hunyuan-video": 6.0,
    "sd3-large": 4.0, "wan-small": 4.0, "wan22": 4.0, "flux2": 4.0, "flux2-klein": 4.0,
    "z-image": 4.0, "hunyuan-video15": 4.0, "flux-kontext": 2.5, "ltx2": 3.0,
    "qwen-image-edit": 4.0, "wan-i2v": 4.0, "wan22-i2v": 4.0,
}  # fmt: skip
ALGORITHMS = {
    "sd3": 'name = "mix-grpo"\nadvantage_std = "batch"',
    "flux": 'name = "grpo-guard"',
    "qwen-image": 'name = "flow-grpo"\nkl_beta = 0.01',
    "wan": 'name = "cps"',
    "hunyuan-video": 'name = "diffusion-nft"',
    "sd3-large": 'name = "flow-grpo"',
    "wan-small": 'name = "dance-grpo"',
    "wan22": 'name = "flow-grpo"\nkl_beta = 0.01',
    "flux2": 'name = "grpo-guard"',
    "flux2-klein": 'name = "flow-grpo-fast"',
    "z-image": 'name = "flow-grpo"',
    "hunyuan-video15": 'name = "dance-grpo"',
    "flux-kontext": 'name = "flow-grpo"\nkl_beta = 0.01',
    "ltx2": 'name = "flow-grpo"',
    "qwen-image-edit": 'name = "flow-grpo-fast"',
    "wan-i2v": 'name = "cps"',
    "wan22-i2v": 'name = "flow-grpo"',
}
SHARED = ("flux", "wan")
"""Whose groups share their noise."""
BATCHES, GROUPS, SIZE = 2, 2, 4


def recipe_of(family: str, folder: Path) -> Path:
    is_video = family in VIDEO
    tiny_models.save(family, folder / "model")
    prompts = [{"prompt": f"a handwritten {digit}", "metadata": {}} for digit in ("one", "two")]
    if family in tiny_models.EDITS:
        tiny_models.picture(40, 40).save(folder / "source.png")
        prompts = [{**prompt, "image": "source.png"} for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    path = folder / f"{family}.toml"
    path.write_text(f"""
[run]
name = "{family}"
steps = {BATCHES}

[model]
folder = "model"
device = "cpu"
height = 32
width = 48
guidance = {GUIDANCE[family]}
{"frames = 5" if is_video else ""}
lora = {{ rank = 4, alpha = 8.0 }}

[data]
prompts = "prompts.jsonl"

[sampling]
steps = 5
sigmas = "model"
window = 2
{"first_window_starts = [1, 1]" if family.startswith("wan22") else ""}
{"shared_noise = true" if family in SHARED else ""}

[batch]
groups = {GROUPS}
group_size = {SIZE}

[algorithm]
{ALGORITHMS[family]}

[trainer]
learning_rate = 1e-3

[[reward.scorers]]
name = "texture"
type = "jpeg-incompressibility"
{VIDEO_SCORER if is_video else ""}

[evaluation]
samples_per_prompt = 2

[[evaluation.scorers]]
name = "smooth"
type = "jpeg-compressibility"
""")
    return path


VIDEO_SCORER = """
[[reward.scorers]]
name = "calm"
type = "temporal-consistency"
weight = 0.1
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.MODELS)
def test_a_model_of_every_family_is_trained(
    family: str, tmp_path: Path, start_run: StartRun
) -> None:
    run = start_run(name=family, recipe=recipe_of(family, tmp_path))
    check_trained(family, run, run.finish(), steps=BATCHES)


def check_trained(family: str, run: LocalRun, summary: dict[str, Any], *, steps: int) -> None:
    """Every batch was trained on the policy, and its results can be looked at and used."""
    assert summary["commits"] == steps
    assert summary["samples_trained"] == steps * GROUPS * SIZE
    assert summary["onpolicy_ratio_error_max"] <= 1e-6
    assert len(set(summary["reward_per_step"])) == steps
    assert summary["after"]["gold"]["smooth"] < 0 < summary["after"]["rewards"]["texture"]
    smooth = [summary[when]["gold"]["smooth"] for when in ("before", "after")]
    hacked = summary["reward_after"] > summary["reward_before"] and smooth[1] < smooth[0]
    assert len(summary["alarms"]) == hacked
    gallery = np.asarray(Image.open(run.folder / "gallery.png"))
    assert gallery.std() > 0
    videos = sorted(path.name for path in run.folder.glob("videos/*.mp4"))
    assert len(videos) == (4 if family in VIDEO else 0), "two prompts, before and after"
    adapters = sorted((run.folder / "adapter").glob("*.safetensors"))
    assert len(adapters) == (2 if family.startswith("wan22") else 1), "one of each network"
    for tensors in map(load_file, adapters):
        assert any(abs(tensor).max() > 0 for name, tensor in tensors.items() if "lora_B" in name)
