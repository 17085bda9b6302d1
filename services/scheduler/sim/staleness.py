"""Decides before a run begins whether a step of staleness pays: `schedule.max_staleness = "auto"`.

One step of staleness lets rollout begin a batch before the trainer has finished the one before, so
that a step takes less time; and it learns less from each step, so that more of them are needed. It
pays only if the first is more than the second.
"""

import math
from typing import Literal

from services.scheduler.costs.counted import COUNTED, DEVICE, counted_profile
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.recipes import (
    batch_shape,
    differentiated,
    num_forward_only_passes,
    recipe_costs,
)
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast, fragment_sizes
from shared.errors import UserError
from shared.messages.records import Record, Text
from shared.recipe.recipe import Recipe
from shared.recipe.schedule import RunSchedule

STALENESS_STEP_FACTOR = 1.25
"""Steps to the same held-out accuracy with one step of staleness, over those without: 1.14 to 1.37
were measured on the digits, more at larger learning rates (docs/scheduling.md); this is between."""


PLACEHOLDER_KIND = "H100"
"""Kind that all devices are taken for while it is not known which will come."""


class StalenessDecision(Record):
    """A decision about staleness, with its reason."""

    max_staleness: Literal[0, 1]
    gain: float | None
    """Seconds of a step on-policy over the seconds of a step with staleness; None without a
    forecast."""
    reason: Text


def decide_at_start(recipe: Recipe) -> StalenessDecision:
    """Decide for as many equal devices as the recipe starts: by the cost profile of the model's
    network, or without one by counting."""
    costs = _profile(recipe)
    if costs is not None:
        trains = recipe.trainer.devices
        decision = decide(
            recipe,
            costs,
            Split({PLACEHOLDER_KIND: recipe.rollout.workers}, {PLACEHOLDER_KIND: trains}),
        )
        if decision is not None:
            return decision
    counted = decide(recipe, *_counted(recipe))
    assert counted is not None, "counted devices hold every model"
    return counted


def decide(recipe: Recipe, profile: Profile, split: Split) -> StalenessDecision | None:
    """Decide by costs of the recipe's shape and devices, ignoring the recipe's staleness; None if
    they do not hold the model."""
    schedule = recipe.run_schedule
    if schedule.mode not in ("disaggregated", "fluid"):
        reason = f"schedule.mode {schedule.mode} has no asynchrony"
        return StalenessDecision(max_staleness=0, gain=None, reason=reason)
    strict, ahead = (_step_seconds(profile, split, schedule, staleness) for staleness in (0, 1))
    if not math.isfinite(strict) or not math.isfinite(ahead):
        return None
    return decide_by_seconds(strict, ahead, by=_named(profile))


def decide_by_seconds(strict: float, ahead: float, *, by: str) -> StalenessDecision:
    """Decide by the seconds of a step on-policy and with staleness; ``by`` names their source."""
    gain = strict / ahead
    return StalenessDecision(
        max_staleness=1 if gain > STALENESS_STEP_FACTOR else 0,
        gain=gain,
        reason=f"a step of staleness makes steps {gain:.2f} times as fast, by {by}, and takes "
        f"{STALENESS_STEP_FACTOR:g} times as many",
    )


def line(decision: StalenessDecision) -> str:
    """Describe a decision in one line."""
    return f'schedule.max_staleness = "auto" is {decision.max_staleness}: {decision.reason}'


def _named(profile: Profile) -> str:
    if profile.name == COUNTED:
        return "counted rows of the network"
    return f"the cost profile {profile.name}"


def _step_seconds(
    profile: Profile, split: Split, schedule: RunSchedule, staleness: Literal[0, 1]
) -> float:
    wanted = schedule.changed(max_staleness=staleness)
    sizes = fragment_sizes(profile, wanted)
    return min(forecast(profile, split, size, wanted).seconds for size in sizes)


def _profile(recipe: Recipe) -> Profile | None:
    """Returns the costs of the profile of the model's network, if there is one."""
    try:
        return recipe_costs(recipe)
    except UserError:
        return None


def _counted(recipe: Recipe) -> tuple[Profile, Split]:
    trainer, share = recipe.trainer, differentiated(recipe)
    profile = counted_profile(
        batch_shape(recipe),
        forward_only_passes=num_forward_only_passes(recipe)
        + bool(trainer.gradient_checkpointing) * share,
        differentiated=share,
        ranks=trainer.shard_devices,
    )
    trains = trainer.devices
    return profile, Split({DEVICE: recipe.rollout.workers}, {DEVICE: trains})
