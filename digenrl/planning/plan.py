"""Finds the fastest split of the devices, for ``digenrl plan``."""

from pathlib import Path
from typing import Literal

from digenrl.planning.devices import known_profiles, parse_devices
from services.scheduler.costs.memory import usual, with_memory
from services.scheduler.costs.profile import Profile, VariantName, load_profile
from services.scheduler.planning.planner import Planned, plan_split
from services.scheduler.planning.recipes import (
    profile_of,
    use_of,
    with_shape_of,
    with_staleness,
)
from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe
from shared.recipe.schedule import RunSchedule


def plan(
    recipe: Path | None,
    devices: str,
    *,
    profile: str | None,
    variant: VariantName,
    staleness: Literal[0, 1] | None,
    host_gpus: int,
) -> Planned:
    """Plan for hosts with ``host_gpus`` GPUs each; only plans that a recipe can express count.

    Raises:
        UserError: names the option and the remedy.
    """
    if variant == "full":
        raise UserError(
            "--variant: the costs of training all weights are those of bfloat16, but a run trains "
            "them in float32; leave it out, or simulate one split with digenrl sim"
        )
    if recipe is None:
        if profile is None:
            raise UserError("give a recipe, or --profile; known are " + ", ".join(known_profiles()))
        costs = load_profile(profile, variant)
        if costs.memory is not None:
            costs = with_memory(costs, usual(costs.memory))
        schedule = RunSchedule()
    else:
        loaded = load_recipe(recipe)
        costs = costs_of(loaded, profile or profile_of(loaded, known_profiles()))
        schedule = loaded.run_schedule
    schedule = with_staleness(schedule, staleness)
    kinds = parse_devices("--devices", devices, costs)
    return plan_split(costs, kinds, schedule, host_gpus=host_gpus)


def costs_of(recipe: Recipe, profile: str, *, fragment: int = 1) -> Profile:
    """Return the profile's costs for this recipe's batch, model and shape.

    ``fragment``: samples per fragment, which decide the memory.

    Raises:
        UserError: if there is no such profile, or it has no costs for this recipe.
    """
    if recipe.model.trained == "full":
        raise UserError(
            "model.trained: the costs of training all weights are those of bfloat16, but a run "
            'trains them in float32; only "lora" can be planned'
        )
    costs = with_shape_of(load_profile(profile), recipe)
    return with_memory(costs, use_of(recipe, costs, fragment=fragment))
