"""Writes the model card of an exported adapter: a README.md as model hubs expect it.

All its content comes from the run: recipe, usage and results. It contains no paths of this machine.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from digenrl.evaluation.records import Quality
from digenrl.report.pipeline_code import base_model, makes_videos, usage
from digenrl.report.summary import Summary
from shared.errors import UserError
from shared.learning.prompts import digest, read_prompts
from shared.recipe.recipe import Recipe
from shared.recipe.toml import toml_value
from shared.run.run_recipe import evaluated_on, evaluation_rows

CARD, CURVE = "README.md", "curve.png"
PICTURE = f"\n\n![Mean reward per optimizer step, and before and after]({CURVE})"
RECIPE = {
    "run": ("seed", "steps"),
    "model": (
        "height", "width", "frames", "guidance", "guidance_2", "negative_prompt", "text_tokens",
        "dtype", "weights", "attention", "lora",
    ),
    "sampling": (
        "steps", "sigmas", "shift", "variant", "noise_level", "window", "first_window_starts",
        "windows", "window_stride", "roll_back", "window_batches", "window_batches_last",
    ),
    "batch": ("groups", "group_size"),
    "algorithm": (
        "name", "clip_range", "advantage_clip", "advantage_std", "rewards", "kl_beta", "stale_loss",
    ),
    "trainer": (
        "learning_rate", "decay_steps", "betas", "weight_decay", "max_grad_norm", "updates", "ema",
    ),
    "schedule": ("max_staleness",),
}  # fmt: skip
"""Recipe keys that decide the update."""


def write_card(
    folder: Path, recipe: Recipe, summary: Summary, curve: Path, labels: Mapping[str, str]
) -> Path:
    """Write the card, and a copy of the picture ``curve`` if it was drawn, into the folder of the
    adapter.

    ``labels``: label -> field of `Quality`, for the figures to show.
    """
    has_curve = curve.is_file()
    if has_curve:
        shutil.copyfile(curve, folder / CURVE)
    path = folder / CARD
    path.write_text(_card(recipe, summary, labels, PICTURE if has_curve else ""))
    return path


def _card(recipe: Recipe, summary: Summary, labels: Mapping[str, str], picture: str) -> str:
    base, algorithm = base_model(recipe.model), recipe.algorithm.name
    parts = [
        _front_matter(recipe, base),
        f"# {recipe.run.name}\n\nA LoRA adapter for `{base}`, trained with reinforcement learning "
        f"({algorithm}) by DigenRL: {summary.steps} optimizer steps on {summary.samples_trained} "
        f"samples.{picture}",
        f"## Use\n\n```python\n{usage(recipe, *_example(recipe))}\n```",
        _results(recipe, summary, labels),
        f"## Recipe\n\n```toml\n{_toml(recipe)}\n```",
        _rewards(recipe),
        _data(recipe),
        f"## Licence\n\nThe licence of the base model `{base}` applies to this adapter, to the two "
        "together, and to what they make.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(recipe: Recipe, base: str) -> str:
    """Build the YAML header; strings in JSON are valid YAML."""
    task = "text-to-video" if makes_videos(recipe.model) else "text-to-image"
    tags = ["lora", "reinforcement-learning", recipe.algorithm.name, task, "digenrl"]
    return "\n".join([
        "---",
        "library_name: diffusers",
        f"pipeline_tag: {task}",
        f"base_model: {json.dumps(base)}",
        "base_model_relation: adapter",
        f"tags: {json.dumps(tags)}",
        "---",
    ])  # fmt: skip


def _example(recipe: Recipe) -> tuple[str, str | None]:
    """Return the first prompt that is evaluated, and its own negative one."""
    try:
        prompt = evaluation_rows(recipe)[0][0]
    except UserError:  # not on this host
        return "...", None
    return prompt.text, prompt.negative_prompt


def _results(recipe: Recipe, summary: Summary, labels: Mapping[str, str]) -> str:
    evaluation, rewards = recipe.evaluation, summary.reward_per_step
    prompts = evaluated_on(summary.num_held_out)
    begin = (
        f"## Results\n\nMean reward of the first batch {_figure(rewards[0])}, of the last "
        f"{_figure(rewards[-1])} (sampled with noise)."
    )
    if summary.before is None or summary.after is None:
        return begin
    rows = [
        f"| {label} | {_figure(before)} | {_figure(after)} |"
        for label, before, after in _figures(summary.before, summary.after, labels)
    ]
    return "\n".join([
        f"{begin} Below: {summary.after.num_samples} samples of {prompts}, without "
        f"noise, with the same start (seed {evaluation.seed}) before and after.",
        "",
        "| | before | after |",
        "|---|---|---|",
        *rows,
        *(f"\n**Reward hacking?** {alarm}" for alarm in summary.alarms),
    ])  # fmt: skip


def _figures(
    before: Quality, after: Quality, labels: Mapping[str, str]
) -> Iterator[tuple[str, float, float]]:
    for label, field in labels.items():
        if getattr(before, field) is not None:
            yield label, getattr(before, field), getattr(after, field)
    for name, value in after.rewards.items():
        yield f"`{name}` (trained on)", before.rewards[name], value
    for name, value in after.gold.items():
        yield f"`{name}` (gold: never trained on)", before.gold[name], value


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _toml(recipe: Recipe) -> str:
    plain = recipe.model_dump(mode="json")
    return "\n\n".join(
        "\n".join([f"[{table}]", *_lines(plain[table], keys)]) for table, keys in RECIPE.items()
    )


def _lines(table: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    for key in keys:
        value = table[key]
        if value is not None:
            yield f"{key} = {toml_value(value)}"


def _rewards(recipe: Recipe) -> str:
    rows = [
        f"| `{scorer.name}` | {scorer.type} | {scorer.weight:g} |"
        for scorer in recipe.reward.scorers
    ]
    return "\n".join(["## Rewards", "", "| scorer | type | weight |", "|---|---|---|", *rows])


def _data(recipe: Recipe) -> str:
    path = recipe.data.prompts
    try:
        details = f", {len(read_prompts(path))} prompts, sha256 `{digest(path)}`"
    except UserError:  # not on this host, which needs only the held-out prompts
        details = ""
    return f"## Data\n\n`{path.name}`{details}"
