"""Derives from the recipe which versions are evaluated, and at which settings."""

import hashlib
import json
from collections.abc import Sequence

from shared.messages.contracts import Prompt
from shared.recipe.recipe import Recipe


def due_versions(every: int, last: int) -> list[int]:
    """List the policy versions to evaluate: every ``every``-th from 0 on, and the last.

    >>> due_versions(2, 5)
    [0, 2, 4, 5]
    """
    return [*range(0, last, every), last]


def as_evaluated(recipe: Recipe) -> Recipe:
    """Return the recipe with the evaluation's steps, sigmas, size and threads.

    It is for sampling with an ODE only: its training window may not fit the steps.
    """
    table, model, sampling = recipe.evaluation, recipe.model, recipe.sampling
    size = {"height": table.height or model.height, "width": table.width or model.width}
    grid = {
        "steps": table.steps or sampling.steps,
        "sigmas": sampling.sigmas if table.sigmas is None else table.sigmas,
    }
    return recipe.model_copy(
        update={
            "model": model.model_copy(update=size),
            "sampling": sampling.model_copy(update=grid),
            "rollout": recipe.rollout.model_copy(update={"threads": table.threads}),
        }
    )


def settings_digest(recipe: Recipe, prompts: Sequence[Prompt]) -> str:
    """Return the sha256 of everything that decides the figures of an evaluation: only figures with
    the same digest are comparable."""
    evaluated, table = as_evaluated(recipe), recipe.evaluation
    scorers = {"reward": recipe.reward.scorers, "gold": table.scorers}
    left_out = {"device"} if evaluated.model.vae_tiling else {"device", "vae_tiling"}
    deciding = {
        "model": evaluated.model.model_dump(mode="json", exclude_none=True, exclude=left_out),
        "sampling": evaluated.sampling.model_dump(
            mode="json", include={"steps", "sigmas", "shift"}
        ),
        "seed": table.seed,
        "samples_per_prompt": table.samples_per_prompt,
        "prompts": [prompt.model_dump() for prompt in prompts],
        "digits": str(table.digits),
        **{
            name: [scorer.model_dump(mode="json", exclude={"patience"}) for scorer in given]
            for name, given in scorers.items()
        },
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
