"""Runs `digenrl profile`: what a device takes for a model, as the planner reads it."""

import json
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from digenrl.local.running.command_lines import command
from digenrl.trace.device_profile.device_costs import base_profile
from digenrl.trace.device_profile.models import ModelName

if TYPE_CHECKING:
    from bench.gpu_day.day import Day

SHORT = ("--repeats", "2", "--max-batch", "4")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    ModelName.sd35_medium: (),
    ModelName.flux1_dev: SHORT,
    ModelName.qwen_image: SHORT,
    ModelName.wan21_14b: SHORT,
    ModelName.hunyuanvideo: ("--repeats", "2", "--max-batch", "2"),
}
"""What keeps the measurement of a model within a minute or two."""


def measure(day: "Day", model: str) -> dict[str, Any]:
    """Returns the profile that the command has written, beside the one that is shipped."""
    path = day.folder / f"{model}.json"
    argv = command("profile", "--model", model, "--random-weights", "--out", str(path))
    argv += ("--tiny", "--repeats", "1", "--max-batch", "2") if day.tiny else OPTIONS[model]
    subprocess.run(argv, check=True)
    found: dict[str, Any] = json.loads(path.read_text())
    return {**found, "shipped": base_profile(ModelName(model)).model_dump(mode="json")}
