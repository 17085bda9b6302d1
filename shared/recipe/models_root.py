"""Where a host keeps its models, rewards and prompts, if not beside its recipes."""

import os
from pathlib import Path

ROOT = "DIGENRL_MODELS"


def models_root() -> Path | None:
    """The folder that the variable names; None if it is not set."""
    root = os.environ.get(ROOT, "")
    return Path(root).resolve() if root else None
