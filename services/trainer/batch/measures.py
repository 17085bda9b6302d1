"""Content of a commit record about trained groups, and the metrics of a batch that need no
network."""

import math
from collections.abc import Iterable, Sequence

from shared.learning.advantages import population_std
from shared.learning.metrics import scorer_metric
from shared.messages.contracts import TrainGroup
from shared.run.commits import TrainedGroup


def trained_group(command: TrainGroup) -> TrainedGroup:
    """Return a group's entry of a commit record."""
    names = command.fragments[0].parts
    return TrainedGroup(
        group=command.group,
        attempt=command.attempt,
        policy_version=command.policy.version,
        fragments=tuple(
            (f.fragment.first_sample, f.fragment.num_samples, f.fragment.attempt)
            for f in command.fragments
        ),
        workers=tuple(f.generated_by for f in command.fragments),
        rewards=tuple(reward for f in command.fragments for reward in f.rewards),
        parts={name: tuple(s for f in command.fragments for s in f.parts[name]) for name in names},
        dropped=command.dropped,
    )


def merge_step_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the last step's metrics, which count all rows of the batch; but the loss and the
    metrics of a gradient, which each step has its own, over all of them."""
    num = len(steps)
    if num == 1:
        return steps[0]
    norms = [step["grad_norm"] for step in steps]
    return {
        **steps[-1],
        "loss": steps[-1]["loss"] / num,
        "grad_norm": math.fsum(norms) / num,
        "skipped_not_finite": sum(step["skipped_not_finite"] for step in steps),
    }


def batch_metrics(
    batch: int, groups: Sequence[TrainedGroup], advantages: Sequence[float]
) -> dict[str, float]:
    """Return the metrics of rewards, advantages and staleness.

    ``advantages``: advantages of all samples, as they count in the gradient. Means of rewards and
    scores are over the samples that could be scored; 0 if none could.
    """
    num_samples = len(advantages)
    rewards = _known(reward for group in groups for reward in group.rewards)
    stale = sum((batch - group.policy_version) * len(group.rewards) for group in groups)
    metrics = {
        "reward_mean": _mean(rewards),
        "reward_std": _deviation(rewards),
        "failed_fraction": 1 - len(rewards) / num_samples,
        "dropped_groups": float(sum(group.dropped is not None for group in groups)),
        "advantage_mean": _mean(advantages),
        "advantage_std": population_std(advantages),
        "advantage_min": min(advantages),
        "advantage_max": max(advantages),
        "staleness_mean": stale / num_samples,
    }
    for scorer in groups[0].parts:
        scores = _known(score for group in groups for score in group.parts[scorer])
        metrics[scorer_metric("reward_mean", scorer)] = _mean(scores)
        metrics[scorer_metric("reward_std", scorer)] = _deviation(scores)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(1, len(values))


def _deviation(values: Sequence[float]) -> float:
    return population_std(values) if values else 0.0


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
