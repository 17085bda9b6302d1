"""Runs of batches of a few groups of 4, which take a third of a second, and an algorithm for storms
that has everything on at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from bench.cluster.setting import Setting
from shared.learning.algorithms import ALGORITHMS, Method
from shared.recipe.schedule import RunSchedule
from tests.profile.tiny import GROUPS, tiny_profile

NAME = "emulated"
METHOD = Method(
    "shared.diffusion.training.objective:nft", ("flow",), has_ratio=False, has_old_policy=True
)
"""Paths of a shared noise, as algorithms with a ratio have them, and an old policy."""


@contextmanager
def known() -> Iterator[None]:
    """Have recipes know it meanwhile: the devices are emulated, so that nobody calls its loss."""
    with patch.dict(ALGORITHMS, {NAME: METHOD}):
        yield


def small(
    folder: Path,
    *,
    groups: int = GROUPS,
    shape: Mapping[str, float] | None = None,
    **changes: object,
) -> Setting:
    """Two rollout devices and a member, on-policy; keys may be the schedule's. ``shape``:
    changes to the profile's."""
    profile = tiny_profile(folder, groups=groups, **(shape or {}))
    plain = Setting(
        run="small", profile=str(profile), rollout={"H100": 2},
        trainer={"H100": 1}, scale=100.0, steps=4, schedule=RunSchedule(fragment_size=2, tag="off"),
    )  # fmt: skip
    keys = {key: changes.pop(key) for key in RunSchedule.model_fields if key in changes}
    changes["schedule"] = plain.schedule.changed(**keys)
    return Setting.model_validate({**plain.model_dump(), **changes})
