"""Runs of batches of 4 groups of 4, each a third of a second."""

from pathlib import Path

from digenrl.bench.cluster.setting import Setting
from tests.bench.tiny import tiny_profile

SAMPLES = 16
"""Of a batch."""


def small(folder: Path, **changes: object) -> Setting:
    """Two rollout devices and a trainer of one, on-policy."""
    plain = Setting(
        run="small", profile=str(tiny_profile(folder)), rollout={"H100": 2}, trainer={"H100": 1},
        scale=60.0, steps=6, fragment_size=2,
    )  # fmt: skip
    return Setting.model_validate({**plain.model_dump(), **changes})
