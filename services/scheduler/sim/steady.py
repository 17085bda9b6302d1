"""A run's plan with nothing in it but its shape, for simulations by a cost profile."""

import math
from collections.abc import Mapping

from services.scheduler.core.state import Plan
from services.scheduler.core.tag.estimates import Overhead
from services.scheduler.core.unissued import full_size
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.recipes import batch_shape
from services.scheduler.costs.seconds import fragment_seconds
from services.scheduler.costs.shape import Shape
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.messages.contracts import Prompt
from shared.recipe.recipe import Recipe
from shared.recipe.schedule import RunSchedule

NO_EXPIRY_S = 1e12
"""Seconds: longer than any simulation. A loan that expires is a fault, and simulations have no
faults."""


def steady_plan(shape: Shape, *, batches: int, schedule: RunSchedule) -> Plan:
    """A run's plan with nothing in it but its shape."""
    return Plan(
        prompts=PromptOrder((Prompt(text="simulated"),), 0),
        num_batches=batches,
        num_groups=shape.groups,
        group_size=shape.group_size,
        shared_share=shape.shared_share,
        trained_steps=shape.trained_steps,
        merged_steps=shape.merged_steps,
        updates=shape.updates,
        trained_samples=shape.trained_samples,
        most_pieces=shape.most_pieces,
        windows=Windows(first=0, last=0),
        seed=0,
        schedule=schedule,
        loan_seconds=NO_EXPIRY_S,
    )


def learned_overhead(profile: Profile, devices: Mapping[str, int]) -> Overhead:
    """Return the overhead that a run would learn, of the kind of which most devices are."""
    size = profile.shape.group_size
    if size == 1:
        return Overhead()
    kind = max(devices, key=lambda kind: devices[kind])
    one, all_ = (fragment_seconds(profile, kind, n) for n in (1, size))
    if not math.isfinite(one):
        return Overhead()
    return Overhead.known_after(max(0.0, one * (size - 1) / (all_ - one) - 1))


def steady_fragment_size(recipe: Recipe) -> int:
    """Samples per fragment while there is plenty, on as many devices as the recipe starts."""
    plan = steady_plan(batch_shape(recipe), batches=1, schedule=recipe.run_schedule)
    lent = recipe.trainer.devices if recipe.run_schedule.trainer_generates else 0
    return full_size(plan, recipe.rollout.workers + lent)
