"""What a local run records of its start: what was typed, its libraries and its machine."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STARTED_JSON = "started.json"
"""File in a run's folder."""

LIBRARIES = (
    "digenrl", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy",
    "scikit-learn", "tokenizers", "torchao",
)  # fmt: skip
"""Libraries of which samples and gradients are made, in every process of a local run."""


def write_started(folder: Path, recipe: Path, options: Mapping[str, Any]) -> None:
    """Record the start of a run in its folder."""
    started = {
        "recipe": str(recipe.resolve()),
        "options": dict(options),
        "versions": versions(),
        "machine": machine(),
    }
    (folder / STARTED_JSON).write_text(json.dumps(started, indent=1))


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed, and of Python."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
