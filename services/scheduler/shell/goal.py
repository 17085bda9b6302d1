"""Ends a run early: looks whether its evaluations have reached `run.stop_at`.

Records of evaluations never change, so a scheduler that is started again finds the same. The batch
that is in training when the goal is seen is still committed; nothing is begun after it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.scheduler import limits
from services.scheduler.core.inputs import GoalReached
from services.scheduler.shell.housekeeping import retry
from shared.recipe.recipe import Recipe
from shared.run.evaluations import GoldFigures, reached
from shared.run.retention import retention_from
from shared.store import ObjectStore

log = structlog.get_logger()


def make_goal(recipe: Recipe, store: ObjectStore) -> "Goal | None":
    """Return the recipe's goal, if it has one."""
    if recipe.run.stop_at is None:
        return None
    weights = retention_from(recipe).gold_weights
    return Goal(GoldFigures(store, recipe.run.name, weights), recipe.run.stop_at)


@dataclass(frozen=True, slots=True)
class Goal:
    gold: GoldFigures
    figure: float
    """Gold figure that ends the run."""

    async def look(self) -> GoalReached | None:
        """Return the input for the state machine, if the goal is reached."""
        version = reached(await retry(self.gold.read), self.figure)
        if version is None:
            return None
        log.info("goal_reached", version=version, stop_at=self.figure)
        return GoalReached(version)

    async def watch(self, tell: Callable[[GoalReached], None]) -> None:
        """Poll until the goal is reached, and report it once."""
        while True:
            await asyncio.sleep(limits.VERSION_CHECK_S)
            reason = await self.look()
            if reason is not None:
                tell(reason)
                return
