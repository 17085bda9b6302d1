"""Runs `digenrl profile` for SD3.5-M: what a device takes, as the planner reads it."""

import json
import subprocess
from typing import TYPE_CHECKING, Any

from digenrl.local.processes import command
from digenrl.profile.models import ModelName

if TYPE_CHECKING:
    from bench.gpu_day.day import Day


def measure(day: "Day") -> dict[str, Any]:
    """Returns the profile that the command has written."""
    path = day.folder / "profile.json"
    argv = command("profile", "--model", ModelName.sd35_medium.value, "--random-weights",
                   "--out", str(path))  # fmt: skip
    if day.tiny:
        argv += ["--tiny", "--repeats", "1", "--max-batch", "2"]
    subprocess.run(argv, check=True)
    found: dict[str, Any] = json.loads(path.read_text())
    return found
