"""Rows of the emulated cluster that a recipe can say, on hosts with 8 GPUs each.

The emulated cluster has one trainer process whatever its devices are; a recipe has the GPUs of one
host, or ranks. By the same rule as `digenrl plan` (`services.scheduler.planning.runnable`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bench.cluster.modes import MODES
from services.scheduler.costs.memory import usual, with_memory
from services.scheduler.costs.profile import Profile, Role, holds_fragments, load_profile
from services.scheduler.planning.runnable import HOST_GPUS, needs_ranks, why_not
from services.scheduler.planning.splits import Split, parse_split
from shared.recipe.schedule import RunSchedule


@dataclass(frozen=True, slots=True)
class Typed:
    mark: str
    """Behind a figure: nothing if a recipe says the row, or what is explained below the table."""
    words: str


AS_IT_IS = Typed("", "yes")
AS_RANKS = Typed("‡", "as ranks")
NOTES = (
    "† No recipe says this row: it lends a trainer of several hosts, or of unlike devices, or has "
    "devices that do not hold the model beside its text encoders.\n"
    "‡ With `trainer.ranks`, which wait for one another in every group; the emulated cluster has "
    "one trainer process instead."
)


def typed(workload: str, mode: Mapping[str, Any]) -> Typed:
    """Says whether a recipe can say one mode of a result."""
    profile, split = _profile(workload), parse_split(mode["split"])
    size, tag = mode["fragment_size"], mode["tag"] or 0
    schedule = MODES[mode["mode"]].changed(fragment_size=size, tag=tag)
    reason = why_not(profile, split, schedule, host_gpus=HOST_GPUS)
    reason = reason or _too_large(profile, split, schedule)
    if reason is not None:
        return Typed("†", f"no: {reason}")
    return AS_RANKS if needs_ranks(profile, split.trainer, host_gpus=HOST_GPUS) else AS_IT_IS


def counted(rows: list[Typed]) -> str:
    """Says how many rows can be run as they are, with ranks, or not at all."""
    whole = sum(row == AS_IT_IS for row in rows)
    ranks = sum(row == AS_RANKS for row in rows)
    return (
        f"Of {len(rows)} rows {whole} can be run as they are by a recipe, {ranks} with ranks in "
        f"place of the emulated trainer, and {len(rows) - whole - ranks} cannot be run."
    )


def _too_large(profile: Profile, split: Split, schedule: RunSchedule) -> str | None:
    size = schedule.fixed_fragment or 1
    roles: dict[Role, Any] = {"rollout": split.rollout}
    if schedule.lends_trainer:
        roles["trainer"] = split.trainer
    for role, devices in roles.items():
        for kind in devices:
            if not holds_fragments(profile, kind, role, size):
                return f"{kind} does not hold fragments of {size} samples"
    return None


@lru_cache
def _profile(workload: str) -> Profile:
    """Loads a profile with the memory that the model takes of a device."""
    profile = load_profile(workload)
    return profile if profile.memory is None else with_memory(profile, usual(profile.memory))
