"""Recipes of small random models of every family."""

import json
from pathlib import Path

from shared.recipe.recipe import Recipe, load_recipe
from tests import tiny_models
from tests.tiny_models import PROMPT

GUIDANCE = {
    "sd3": 3.0, "flux": 3.5, "qwen-image": 4.0, "wan": 4.0, "hunyuan-video": 6.0, "wan22": 4.0,
    "flux2": 4.0, "flux2-klein": 4.0, "z-image": 4.0, "sd3-large": 4.0, "wan-small": 4.0,
    "hunyuan-video15": 4.0, "flux-kontext": 2.5, "ltx2": 3.0, "qwen-image-edit": 4.0,
    "wan-i2v": 4.0, "wan22-i2v": 4.0,
}  # fmt: skip
HEIGHT, WIDTH, STEPS = 32, 48, 3


def recipe_of(family: str, folder: Path) -> Recipe:
    model = tiny_models.save(family, folder / "model")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT, "metadata": {}}))
    plain = {
        "run": {"name": family, "steps": 1},
        "model": {
            "folder": str(model), "height": HEIGHT, "width": WIDTH, "guidance": GUIDANCE[family],
            "frames": 5 if family in tiny_models.VIDEO else 1, "lora": {"rank": 4, "alpha": 16.0},
        },
        "data": {"prompts": "prompts.jsonl"},
        "sampling": {"steps": STEPS, "sigmas": "model", "window": 1},
        "batch": {"groups": 1, "group_size": 2},
        "trainer": {"learning_rate": 1e-3},
        "reward": {"scorers": [{"name": "size", "type": "jpeg-incompressibility"}]},
    }  # fmt: skip
    path = folder / "recipe.json"
    path.write_text(json.dumps(plain))
    return load_recipe(path)
