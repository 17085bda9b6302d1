"""What a batch says about itself, from its trained groups: metrics that need no network."""

from collections.abc import Sequence

from shared.advantages import population_std
from shared.commits import TrainedGroup
from shared.metrics import of_scorer


def batch_metrics(
    batch: int, groups: Sequence[TrainedGroup], advantages: Sequence[float]
) -> dict[str, float]:
    """``advantages``: of all samples, as they count in the gradient."""
    rewards = [reward for group in groups for reward in group.rewards]
    stale = sum((batch - group.policy_version) * len(group.rewards) for group in groups)
    found = {
        "reward_mean": _mean(rewards),
        "reward_std": population_std(rewards),
        "advantage_mean": _mean(advantages),
        "advantage_std": population_std(advantages),
        "advantage_min": min(advantages),
        "advantage_max": max(advantages),
        "staleness_mean": stale / len(rewards),
    }
    for scorer in groups[0].parts:
        scores = [score for group in groups for score in group.parts[scorer]]
        found[of_scorer("reward_mean", scorer)] = _mean(scores)
        found[of_scorer("reward_std", scorer)] = population_std(scores)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
