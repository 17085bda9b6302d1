"""Reads devices from the command line, and finds their fastest split for ``digenrl plan``."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from digenrl.planning.work import work_line
from services.scheduler.costs.memory import Use, usual, with_memory
from services.scheduler.costs.profile import PROFILES, Profile, VariantName, load_profile
from services.scheduler.planning.recipes import (
    profile_of,
    use_of,
    with_shape_of,
    with_staleness,
)
from services.scheduler.planning.staleness import decide_by_seconds
from services.scheduler.planning.staleness import line as staleness_line
from services.scheduler.planning.ways import Advice, advise
from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe
from shared.recipe.schedule import RunSchedule

MAX_DEVICES = 256


def parse_devices(option: str, text: str, profile: Profile) -> dict[str, int]:
    """Parse ``h100=16,a100=16`` into {"H100": 16, "A100": 16}.

    Raises:
        UserError: names the option, the problem and the remedy.
    """
    known = {kind.lower(): kind for kind in profile.devices}
    devices: dict[str, int] = {}
    for part in text.split(","):
        kind, equals, count = (piece.strip() for piece in part.partition("="))
        if not equals or not kind:
            raise UserError(f"{option}: {part!r} is not kind=count, e.g. h100=16,a100=16")
        if not count.isdecimal() or int(count) == 0:
            raise UserError(f"{option}: {part!r}: the count is a whole number, 1 or more")
        name = known.get(kind.lower())
        if name is None:
            kinds = ", ".join(profile.devices)
            raise UserError(f"{option}: {profile.name} knows no {kind}; known are {kinds}")
        if name in devices:
            raise UserError(f"{option}: {name} is given twice; add the counts")
        devices[name] = int(count)
    if sum(devices.values()) > MAX_DEVICES:
        raise UserError(f"{option}: more than {MAX_DEVICES} devices; plan for a part of them")
    return devices


def parse_kinds(option: str, text: str, devices: Mapping[str, int]) -> tuple[str, ...]:
    """Parse ``4090,l40s`` into the names of those of the devices.

    Raises:
        UserError: if one is not among them.
    """
    known = {kind.lower(): kind for kind in devices}
    names = [part.strip().lower() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"{option}: {name!r} is not among {', '.join(devices)}")
    return tuple(known[name] for name in names)


def known_profiles() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def plan(
    recipe: Path | None,
    devices: str,
    *,
    profile: str | None,
    variant: VariantName,
    staleness: Literal[0, 1] | None,
    host_gpus: int,
) -> Advice:
    """Plan for hosts with ``host_gpus`` GPUs each; only plans that a recipe can express count, with
    what small devices need to take part.

    Raises:
        UserError: names the option and the remedy.
    """
    if variant == "full":
        raise UserError(
            "--variant: what all weights take of a device depends on the ranks that share them, "
            "which no plan chooses; leave it out, or simulate one split with digenrl sim"
        )
    loaded = None
    if recipe is None:
        if profile is None:
            raise UserError("give a recipe, or --profile; known are " + ", ".join(known_profiles()))
        costs = load_profile(profile, variant)
        use = None if costs.memory is None else usual(costs.memory)
        schedule = RunSchedule()
    else:
        loaded = load_recipe(recipe)
        costs, use = _shaped(loaded, profile or profile_of(loaded, known_profiles()), fragment=1)
        schedule = loaded.run_schedule
    kinds = parse_devices("--devices", devices, costs)
    advised = partial(advise, costs, use, kinds, host_gpus=host_gpus)
    if loaded is None:
        return advised(with_staleness(schedule, staleness))
    if staleness is None and loaded.schedule.max_staleness == "auto":
        found = _with_decision(advised, schedule)
    else:
        found = advised(with_staleness(schedule, staleness))
    return replace(found, reasons=(work_line(costs, loaded), *found.reasons))


def _with_decision(advised: Callable[[RunSchedule], Advice], schedule: RunSchedule) -> Advice:
    """Return the better of the two advices for "auto", and say why."""
    if schedule.mode != "pipelined":
        return advised(schedule)
    strict, ahead = (advised(schedule.changed(max_staleness=each)) for each in (0, 1))
    found = decide_by_seconds(
        strict.planned.best.step_seconds,
        ahead.planned.best.step_seconds,
        by="the best plans with it and without",
    )
    chosen = ahead if found.max_staleness else strict
    return replace(chosen, reasons=(*chosen.reasons, staleness_line(found)))


def costs_of(recipe: Recipe, profile: str, *, fragment: int = 1) -> Profile:
    """Return the profile's costs for this recipe's batch, model and shape.

    ``fragment``: samples per fragment, which decide the memory.

    Raises:
        UserError: if there is no such profile, or it has no costs for this recipe.
    """
    costs, use = _shaped(recipe, profile, fragment=fragment)
    return with_memory(costs, use)


def _shaped(recipe: Recipe, profile: str, *, fragment: int) -> tuple[Profile, Use]:
    if recipe.model.trained == "full":
        raise UserError(
            'model.trained: only "lora" can be planned; what all weights take of a device depends '
            "on the ranks that share them, which no plan chooses"
        )
    if recipe.trainer.sharded:
        raise UserError(
            "trainer.sharded: what gathering shared weights takes is in no profile, so such steps "
            "are not planned; digenrl check says what the recipe's own split needs"
        )
    costs = with_shape_of(load_profile(profile), recipe)
    return costs, use_of(recipe, costs, fragment=fragment)
