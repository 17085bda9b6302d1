"""Writes the recipe that trains the model with random weights, and its prompts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = ("a handwritten five", "the number three")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Says how much is generated and trained."""

    side: int
    """Height and width in pixels."""
    steps: int
    """Denoising steps, all but the last of which are trained."""
    groups: int
    group_size: int
    batches: int
    guidance: float = 4.5


def tables(model: Path, prompts: Path, shape: Shape, *, cpu: bool) -> dict[str, Any]:
    """Returns the tables of the recipe: Flow-GRPO as in recipes/sd35-medium.toml, with a reward
    that needs no weights."""
    device = {"device": "cpu"} if cpu else {}
    return {
        "run": {"name": "full-size", "steps": shape.batches},
        "model": {
            "folder": str(model), "height": shape.side, "width": shape.side,
            "guidance": shape.guidance, "dtype": "bfloat16",
            "lora": {"rank": 32, "alpha": 64.0}, **device,
        },
        "data": {"prompts": str(prompts)},
        "sampling": {
            "steps": shape.steps, "sigmas": "default", "shift": 3.0, "noise_level": 0.7,
            "window": shape.steps - 1,
        },
        "batch": {"groups": shape.groups, "group_size": shape.group_size},
        "algorithm": {"name": "flow-grpo", "clip_range": 1e-4, "kl_beta": 0.04},
        "trainer": {"learning_rate": 3e-4, "gradient_checkpointing": True},
        "schedule": {"tag": "off"},
        "reward": {"scorers": [{"name": "texture", "type": "jpeg-incompressibility"}]},
        "evaluation": {"samples_per_prompt": 1, "prompts": str(prompts)},
    }  # fmt: skip


def write_recipe(
    folder: Path, model: Path, shape: Shape, *, cpu: bool, changes: Mapping[str, Any] | None = None
) -> Path:
    """Writes recipe.json and its prompts; ``changes`` maps "table.key" to what replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    lines = [{"prompt": text, "metadata": {}} for text in PROMPTS[: max(1, shape.groups)]]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain = tables(model, prompts, shape, cpu=cpu)
    for key, value in (changes or {}).items():
        table, name = key.split(".")
        plain.setdefault(table, {})[name] = value
    path = folder / "recipe.json"
    path.write_text(json.dumps(plain, indent=1) + "\n")
    return path
