"""Runs of batches of a few groups of 4, which take a third of a second."""

from collections.abc import Mapping
from pathlib import Path

from bench.cluster.setting import Setting
from shared.recipe.schedule import RunSchedule
from tests.profile.tiny import GROUPS, tiny_profile

SAMPLES = 16
"""Samples of a batch."""


def small(
    folder: Path,
    *,
    groups: int = GROUPS,
    shape: Mapping[str, float] | None = None,
    **changes: object,
) -> Setting:
    """Two rollout devices and a trainer of one, on-policy; keys may be the schedule's. ``shape``:
    changes to the profile's."""
    profile = tiny_profile(folder, groups=groups, **(shape or {}))
    plain = Setting(
        run="small", profile=str(profile), rollout={"H100": 2},
        trainer={"H100": 1}, scale=100.0, steps=4, schedule=RunSchedule(fragment_size=2, tag="off"),
    )  # fmt: skip
    keys = {key: changes.pop(key) for key in RunSchedule.model_fields if key in changes}
    changes["schedule"] = plain.schedule.changed(**keys)
    return Setting.model_validate({**plain.model_dump(), **changes})
