"""Prompts of a run: in turn, or by a curriculum that follows from its commit records."""

from shared.learning.curriculum import Saturated, saturated
from shared.learning.prompts import PromptOrder, read_prompts
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord


def prompt_order(recipe: Recipe) -> PromptOrder:
    """Read the prompts of a recipe; raises UserError if there are none."""
    return PromptOrder(read_prompts(recipe.data.prompts), recipe.run.seed, recipe.data.curriculum)


def saturated_groups(record: CommitRecord) -> Saturated:
    """Return which groups of the batch that made a version were saturated; none that was dropped
    for want of rewards."""
    return saturated([() if group.dropped else group.rewards for group in record.trained])
