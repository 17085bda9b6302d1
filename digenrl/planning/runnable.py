"""Whether a recipe can say what a plan does, and the keys that say it.

A trainer is one process with `trainer.devices` GPUs of one host. Fluid devices are processes with a
GPU each, on any hosts.
"""

from collections.abc import Mapping
from typing import Any

from services.scheduler.costs.profile import Profile, Role, fits
from services.scheduler.costs.split import Devices, Split, present, words
from shared.recipe.fields import Table
from shared.recipe.fluid_devices import refusal
from shared.recipe.schedule import RunSchedule, Schedule
from shared.recipe.tables import Rollout, Tables
from shared.recipe.trainer import Trainer

OF_TABLES: Mapping[str, type[Table]] = {
    "rollout": Rollout,
    "trainer": Trainer,
    "schedule": Schedule,
}
HOST_GPUS = 8
"""GPUs of a host, unless an option says otherwise."""
HostGpus = int | Mapping[str, int]
"""GPUs of a host, or of the largest one of each kind."""


def gpus_of(host_gpus: HostGpus, devices: Devices) -> int:
    """Return how many GPUs the process has at most that uses such devices."""
    if isinstance(host_gpus, int):
        return host_gpus
    return min((host_gpus.get(kind, 0) for kind in present(devices)), default=HOST_GPUS)


def why_not(
    profile: Profile, split: Split, schedule: RunSchedule, *, host_gpus: HostGpus
) -> str | None:
    """Why no recipe says this, in a few words; None if one does."""
    if profile.variant.sharded:
        return "shares weights, which is not simulated"
    number, host = sum(split.trainer.values()), gpus_of(host_gpus, split.trainer)
    if schedule.has_members:
        return refusal(number) or too_small(profile, split, schedule)
    reasons = {
        f"trains on unlike devices, {words(split.trainer)}": len(present(split.trainer)) > 1,
        f"has a trainer of {number} devices, and a host has {host}": number > host,
        f"trains in index order on {number} devices": schedule.deterministic and number > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    return too_small(profile, split, schedule)


def recipe_keys(
    split: Split, schedule: RunSchedule, *, recipe: Tables | None = None
) -> dict[str, Any]:
    """What to write into a recipe, as ``table.key`` and value: into this one, or any that leaves
    out what is not named here."""
    trains, members = sum(split.trainer.values()), schedule.has_members
    keys: dict[str, Any] = {
        "rollout.workers": sum(split.rollout.values()),
        "trainer.devices": trains,
        "trainer.exchange": "auto" if not members or recipe is None else recipe.trainer.exchange,
        "schedule.mode": schedule.mode,
        "schedule.fragment_size": schedule.fixed_fragment or "auto",
    }
    told = {"rollout.workers", "trainer.devices"}
    if members:
        told |= {"trainer.exchange"}
    else:
        keys |= {"schedule.tag": schedule.tag or "off"}
        told |= {"schedule.tag", "schedule.max_staleness"}
    if schedule.mode in ("pipelined", "fluid"):
        keys |= {"schedule.max_staleness": schedule.staleness_limit}
    return {key: value for key, value in keys.items() if key in told or value != _said(recipe, key)}


def _said(recipe: Tables | None, key: str) -> Any:
    """Return what a recipe says of a key, or one that leaves it out."""
    table, field = key.split(".")
    if recipe is not None:
        return getattr(getattr(recipe, table), field)
    return OF_TABLES[table].model_fields[field].default


def as_toml(keys: Mapping[str, Any]) -> str:
    """Write recipe keys on one line, dotted as TOML takes them."""

    def value(given: Any) -> str:
        if isinstance(given, bool):
            return str(given).lower()
        return f'"{given}"' if isinstance(given, str) else str(given)

    return ", ".join(f"{key} = {value(given)}" for key, given in keys.items())


def training_role(schedule: Schedule) -> Role:
    """Return the role of the devices that train: a member that generates holds all of the model."""
    return "member" if schedule.members_generate else "trainer"


def too_small(profile: Profile, split: Split, schedule: RunSchedule) -> str | None:
    """Why a device does not hold what it is to hold; None if all do."""
    roles: dict[Role, Devices] = {"rollout": split.rollout, training_role(schedule): split.trainer}
    reasons = (fits(profile, kind, role) for role in roles for kind in present(roles[role]))
    return next(filter(None, reasons), None)
