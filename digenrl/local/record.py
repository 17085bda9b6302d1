"""Record of a local run's start: the command line, its libraries and its machine."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.process.libraries import processor, versions

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


def release_of(folder: Path) -> str | None:
    """Return the release that the run in a folder records; None if it records none."""
    try:
        versions = json.loads((folder / STARTED_JSON).read_text())["versions"]
        return str(versions["digenrl"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def machine() -> dict[str, str]:
    """Return what arithmetic depends on of this machine."""
    return {"system": platform.system(), "processor": processor() or platform.machine()}
