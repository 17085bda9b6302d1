"""What a recipe says of a cost profile's shape, and of how the devices are to be kept busy."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from services.scheduler.costs.profile import Profile, Shape
from services.scheduler.sim.profiled import ScheduleChoice
from shared.errors import UserError
from shared.recipe import Recipe


def profile_of(recipe: Recipe, known: Iterable[str]) -> str:
    """The profile that the model's folder is named after.

    Raises:
        UserError: if there is none.
    """
    folder = recipe.model.folder.name
    for name in sorted(known, key=len, reverse=True):
        if _plain(name) in _plain(folder):
            return name
    raise UserError(f"--profile: no cost profile is named like the model {folder}; name one")


def with_shape_of(profile: Profile, recipe: Recipe) -> Profile:
    """The same costs for this recipe's batch. Resolution and frames stay those of the profile."""
    guided = recipe.model.guidance > 1 and not profile.embeds_guidance
    forwards: Literal[1, 2] = 2 if guided else 1
    shape = Shape(
        groups=recipe.batch.groups,
        group_size=recipe.batch.group_size,
        steps=recipe.sampling.steps,
        trained_steps=recipe.sampling.window,
        updates=1,
    )
    variant = profile.variant.model_copy(update={"forwards_per_step": forwards})
    return profile.model_copy(update={"shape": shape, "variant": variant})


def schedule_of(recipe: Recipe) -> ScheduleChoice:
    """What the recipe fixes is fixed; what it leaves open ("auto") is for the planner."""
    schedule, in_order = recipe.schedule, recipe.trainer.order == "index"
    size = None if schedule.fragment_size == "auto" else schedule.fragment_size
    if in_order and size is None:
        size = recipe.batch.group_size  # as the scheduler does
    tag = 0 if schedule.tag == "off" or schedule.mode != "pipelined" else schedule.tag
    return ScheduleChoice(
        mode=schedule.mode,
        fragment_size=size,
        tsp=schedule.tsp_steps != 1 or recipe.sampling.window == 1,
        tag=tag,
        max_staleness=1 if schedule.staleness_limit else 0,
        early_fraction=1.0 if schedule.early_fraction == "auto" else schedule.early_fraction,
        in_order=in_order,
        gradient_help=recipe.rollout.can_train and schedule.mode == "pipelined",
    )


def with_staleness(schedule: ScheduleChoice, staleness: Literal[0, 1] | None) -> ScheduleChoice:
    """In place of the recipe's.

    Raises:
        UserError: if the mode has no asynchrony.
    """
    if staleness is None:
        return schedule
    if staleness and schedule.mode != "pipelined":
        raise UserError(
            f"--staleness: 1 needs schedule.mode pipelined; the mode here is {schedule.mode}"
        )
    return replace(schedule, max_staleness=staleness)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
