"""Runs of batches of a few groups of 4, which take a third of a second."""

from pathlib import Path

from bench.cluster.setting import Setting
from tests.profile.tiny import GROUPS, tiny_profile

SAMPLES = 16
"""Of a batch."""


def small(folder: Path, *, groups: int = GROUPS, **changes: object) -> Setting:
    """Two rollout devices and a trainer of one, on-policy."""
    plain = Setting(
        run="small", profile=str(tiny_profile(folder, groups=groups)), rollout={"H100": 2},
        trainer={"H100": 1}, scale=100.0, steps=4, fragment_size=2,
    )  # fmt: skip
    return Setting.model_validate({**plain.model_dump(), **changes})
