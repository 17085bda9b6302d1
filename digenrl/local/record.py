"""What a local run records of its start: what was typed, its libraries and its machine."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.process.libraries import versions

STARTED_JSON = "started.json"
"""File in a run's folder."""


def write_started(folder: Path, recipe: Path, options: Mapping[str, Any]) -> None:
    """Record the start of a run in its folder."""
    started = {
        "recipe": str(recipe.resolve()),
        "options": dict(options),
        "versions": dict(versions()),
        "machine": machine(),
    }
    (folder / STARTED_JSON).write_text(json.dumps(started, indent=1))


def machine() -> dict[str, str]:
    """Return what arithmetic depends on of this machine."""
    return {"system": platform.system(), "processor": _processor() or platform.machine()}


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None)
