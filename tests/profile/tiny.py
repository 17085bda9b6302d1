"""A workload whose batches are over at once."""

import json
from pathlib import Path

from services.scheduler.costs.profile import PROFILES

GROUPS, GROUP_SIZE = 4, 4


def tiny_profile(folder: Path, *, groups: int = GROUPS, **shape: float) -> Path:
    """Qwen-Image's costs, in batches of a few groups of 4."""
    plain = json.loads((PROFILES / "qwen-image.json").read_text())
    plain["shape"] |= {"groups": groups, "group_size": GROUP_SIZE, **shape}
    path = folder / "tiny.json"
    path.write_text(json.dumps(plain))
    return path
