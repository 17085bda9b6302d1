"""Decides how weights and sums are rounded on their way: as little as the lines allow."""

from collections.abc import Iterable
from typing import Literal

from services.scheduler.core.state import Plan, State
from shared.messages.records import ChosenLevel, Level

BYTES_SHARE: dict[Level, float] = {"exact": 1.0, "int8": 0.254, "int4": 0.129}
"""Bytes of rounded numbers with their scales, over those in float32; least rounding first."""
HIDDEN_SHARE = 0.02
"""Share of an on-policy batch's seconds that a transfer may add, while nothing else is done."""
RETURN_MARGIN = 0.7
"""Share of the hidden seconds that a transfer with less rounding than now may take: rates vary."""


def min_share(asked: ChosenLevel) -> float:
    """Return the smallest share of a sum's bytes that a recipe lets cross."""
    return min(BYTES_SHARE.values()) if asked == "auto" else BYTES_SHARE[asked]


def least_rounding(current: Level, exact_seconds: float, hidden_seconds: float) -> Level:
    """Return the least rounding whose transfer is hidden; without any, the most.

    Args:
        current: the level of the batch before.
        exact_seconds: what the transfer takes without rounding.
        hidden_seconds: how long it may take without a longer batch.
    """
    levels = list(BYTES_SHARE)
    for level in levels:
        is_less = levels.index(level) < levels.index(current)
        limit = hidden_seconds * (RETURN_MARGIN if is_less else 1.0)
        if exact_seconds * BYTES_SHARE[level] <= limit:
            return level
    return levels[-1]


def chosen_level(
    plan: Plan, state: State, now: float, key: Literal["down", "up"], addresses: Iterable[str]
) -> Level:
    """Return the level of the recipe; for `auto`, by the slowest measured line of these devices."""
    asked: ChosenLevel = getattr(plan.schedule, key)
    if asked != "auto":
        return asked
    current: Level = getattr(state.levels, key)
    lines = getattr(state.costs, key)
    measured = [lines[address].seconds for address in addresses if address in lines]
    if not measured or state.fluid is None or state.batch is None:
        return current
    elapsed = max(0.0, now - state.batch.opened_at)
    hidden = elapsed if plan.schedule.staleness_limit else HIDDEN_SHARE * elapsed
    return least_rounding(current, max(measured) * state.fluid.sum_bytes, hidden)
