"""Reads memory, fragments and staleness from a recipe, for plans and forecasts."""

import math
from typing import Literal

from digenrl.trace.memory import ModelUse
from services.scheduler.core.sizing import chosen_size
from services.scheduler.core.unissued import fragment_sizes, full_size
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast
from services.scheduler.sim.steady import steady_plan
from shared.devices.chunks import make_tuner
from shared.errors import UserError
from shared.learning.algorithms import ALGORITHMS
from shared.models.memory import ITEM_BYTES
from shared.recipe.recipe import Recipe, override
from shared.recipe.schedule import RunSchedule


def model_use(recipe: Recipe, profile: Profile, *, fragment: int) -> ModelUse:
    """Returns what decides memory. A training pass has as few rows as the recipe allows."""
    model, trainer, method = recipe.model, recipe.trainer, ALGORITHMS[recipe.algorithm.name]
    passes = sorted({chunk.rows for chunk in make_tuner(recipe, math.inf).candidates})
    return ModelUse(
        height=model.height,
        width=model.width,
        frames=model.frames,
        forwards=profile.variant.forwards_per_step,
        item_bytes=ITEM_BYTES[model.dtype],
        rank=model.lora.rank if model.trained == "lora" else 0,
        rows=passes[0],
        passes=tuple(passes),
        fragment=fragment,
        ranks=trainer.shard_devices,
        sets=recipe.trained_sets,
        encodes="text" in recipe.generating_parts,
        tiles=model.vae_tiling,
        streams=recipe.holding.memory == "streamed",
        trainer_streams=trainer.memory == "streamed",
        offloads=trainer.gradient_checkpointing == "offloaded",
        base=model.weights,
        weights=recipe.rollout.weights if recipe.largest_weight else None,
        has_importance_weights=method.corrects_staleness or not method.has_ratio,
    )


def ahead_by(recipe: Recipe, staleness: Literal[0, 1] | None) -> Recipe:
    """Return the recipe with this staleness: a member that steps ahead holds more sets of
    weights."""
    if staleness is None:
        return recipe
    return override(recipe, {"schedule.max_staleness": staleness})


def with_staleness(schedule: RunSchedule, staleness: Literal[0, 1] | None) -> RunSchedule:
    """Return the schedule with this staleness in place of the recipe's.

    Raises:
        UserError: if the mode has no asynchrony.
    """
    if staleness is None:
        return schedule
    if staleness and schedule.mode not in ("disaggregated", "fluid"):
        raise UserError(
            "--staleness: 1 needs schedule.mode disaggregated or fluid; the mode here is "
            f"{schedule.mode}"
        )
    return schedule.changed(max_staleness=staleness)


def largest_fragment(profile: Profile, split: Split, schedule: RunSchedule) -> int:
    """Return the most samples that a device generates at a time in a run that is open about it:
    what the scheduler chooses by these costs, or what it begins and probes with before it knows
    them."""
    if schedule.fixed_fragment is not None:
        return schedule.fixed_fragment
    shape = profile.shape
    sizes = fragment_sizes(shape.group_size)
    seconds = {size: forecast(profile, split, size, schedule).seconds for size in sizes}
    plan = steady_plan(shape, batches=1, schedule=schedule)
    both = sum(split.devices.values())
    first = full_size(plan, both if schedule.trainer_generates else sum(split.rollout.values()))
    probed = min(first + 1, shape.group_size) if first == 1 else first
    return max(chosen_size(seconds, shape.group_size) or 1, probed)
