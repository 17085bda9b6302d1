"""Decides whether a recipe can express a plan, and with which keys.

Devices that train are processes with a GPU each, on any hosts.
"""

from collections.abc import Mapping
from typing import Any

from services.scheduler.costs.capacity import fits, training_role
from services.scheduler.costs.profile import Profile, Role
from services.scheduler.costs.split import Devices, Split, present
from shared.recipe.checks import too_many_devices
from shared.recipe.fields import Table
from shared.recipe.schedule import RunSchedule, Schedule
from shared.recipe.tables import Rollout, Tables
from shared.recipe.toml import toml_value
from shared.recipe.trainer import Trainer

PLANNED_TABLES: Mapping[str, type[Table]] = {
    "rollout": Rollout,
    "trainer": Trainer,
    "schedule": Schedule,
}
HOST_GPUS = 8
"""GPUs of a host, unless an option replaces it."""
HostGpus = int | Mapping[str, int]
"""GPUs of a host, or of the largest one of each kind."""


def why_not(profile: Profile, split: Split, schedule: RunSchedule) -> str | None:
    """Why no recipe expresses this, in a few words; None if one does."""
    return too_many_devices(sum(split.trainer.values())) or too_small(profile, split, schedule)


def recipe_keys(
    split: Split, schedule: RunSchedule, *, recipe: Tables | None = None
) -> dict[str, Any]:
    """Recipe keys of the plan, as ``table.key`` and value: for this recipe, or any that leaves out
    keys not named here."""
    trains, lends = sum(split.trainer.values()), schedule.mode == "disaggregated"
    keys: dict[str, Any] = {
        "rollout.workers": sum(split.rollout.values()),
        "trainer.devices": trains,
        "trainer.exchange": "auto" if recipe is None else recipe.trainer.exchange,
        "schedule.mode": schedule.mode,
        "schedule.fragment_size": schedule.fixed_fragment or "auto",
    }
    own_keys = {"rollout.workers", "trainer.devices", "trainer.exchange"}
    if lends:
        keys |= {"schedule.tag": schedule.tag or "off"}
        own_keys |= {"schedule.tag", "schedule.max_staleness"}
    if schedule.mode in ("disaggregated", "fluid"):
        keys |= {"schedule.max_staleness": schedule.staleness_limit}
    return {
        key: value for key, value in keys.items() if key in own_keys or value != _said(recipe, key)
    }


def _said(recipe: Tables | None, key: str) -> Any:
    """Return the recipe's value of a key, or the default of a recipe without it."""
    table, field = key.split(".")
    if recipe is not None:
        return getattr(getattr(recipe, table), field)
    return PLANNED_TABLES[table].model_fields[field].default


def as_toml(keys: Mapping[str, Any]) -> str:
    """Write recipe keys on one line, dotted as TOML takes them."""
    return ", ".join(f"{key} = {toml_value(given)}" for key, given in keys.items())


def too_small(profile: Profile, split: Split, schedule: RunSchedule) -> str | None:
    """Why a device does not hold what it is to hold; None if all do."""
    roles: dict[Role, Devices] = {"rollout": split.rollout, training_role(schedule): split.trainer}
    reasons = (fits(profile, kind, role) for role in roles for kind in present(roles[role]))
    return next(filter(None, reasons), None)
