"""Costs of encoding a recipe's prompts in a process of its own, ahead of the run."""

from digenrl.trace.encoding import encoding_seconds, thread_seconds
from services.scheduler.costs.profile import Profile
from shared.learning.prompts import num_different
from shared.recipe.recipe import Recipe
from shared.run.run_recipe import trained_and_held_out


def encoding_line(recipe: Recipe, profile: Profile) -> str | None:
    """Describe how long encoders work, and what the run waits for; None if devices encode."""
    if not recipe.encoder.workers:
        return None
    prompts, each = _num_prompts(recipe), _prompt_seconds(recipe, profile)
    where = "an idle GPU, or else a CPU"
    if recipe.encoder.device == "cpu":
        where = f"{recipe.encoder.workers * recipe.encoder.threads} threads of a CPU"
    return (
        f"prompts are encoded ahead, once in a run, on {where}: {prompts} take about "
        f"{prompts * each:.0f} s; the first step waits for at most "
        f"{waits_for_prompts(recipe, profile):.0f} s of them"
    )


def waits_for_prompts(recipe: Recipe, profile: Profile) -> float:
    """Return the seconds until the first batch's prompts are encoded; 0 where devices encode."""
    if not recipe.encoder.workers:
        return 0.0
    first = min(_num_prompts(recipe), recipe.batch.groups)
    return first * _prompt_seconds(recipe, profile)


def _prompt_seconds(recipe: Recipe, profile: Profile) -> float:
    encoder = recipe.encoder
    if encoder.device == "cpu":
        return thread_seconds(profile) / encoder.threads / encoder.workers
    return encoding_seconds(profile) / encoder.workers


def _num_prompts(recipe: Recipe) -> int:
    return num_different(trained_and_held_out(recipe)[0])
