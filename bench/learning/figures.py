"""From results of cases to what a table says: costs of reaching a goal, and guards on the way."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Result = Mapping[str, Any]
Evaluation = Mapping[str, Any]
Quantity = Callable[[Evaluation], float]

MIN_DIV = 2.5
MIN_WORST = 0.7


def units(evaluation: Evaluation) -> float:
    """Forward-equivalents of rollout and training until an evaluation."""
    return float(sum(evaluation["units"].values()))


def seconds(evaluation: Evaluation) -> float:
    """CPU seconds of rollout, with decoding, and of training until an evaluation; of a run through
    the services, device seconds."""
    return float(sum(evaluation["seconds"].values()))


def steps(evaluation: Evaluation) -> float:
    return float(evaluation["version"])


def samples(evaluation: Evaluation) -> float:
    return float(evaluation["samples"])


def read_results(folder: Path, task: str) -> dict[str, list[Result]]:
    """Reads the results of a task: by choice, in the order of their seeds."""
    found: dict[str, list[Result]] = {}
    for path in sorted(folder.glob(f"{task}.*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["choice"], []).append(result)
    return {name: sorted(each, key=lambda one: int(one["seed"])) for name, each in found.items()}


def cost_of(result: Result, goal: float, quantity: Quantity) -> float | None:
    """Returns what it had cost when the curve first crossed ``goal``, linear between evaluations;
    None if it never did."""
    for before, after in pairwise(result["evaluations"]):
        low, high = float(before["height"]), float(after["height"])
        if low < goal <= high:
            share = (goal - low) / (high - low)
            return quantity(before) + share * (quantity(after) - quantity(before))
    return None


def costs(results: Iterable[Result], goal: float, quantity: Quantity) -> list[float | None]:
    """Returns that of each seed."""
    return [cost_of(each, goal, quantity) for each in results]


def middle(values: Sequence[float | None]) -> float | None:
    """Returns the median, where a seed without a value counts as the dearest; None if the median
    seed has none."""
    found = median(float("inf") if each is None else each for each in values)
    return None if found == float("inf") else found


def area(result: Result, until: float) -> float:
    """Returns the mean height of the curve over the first so many samples, linear between
    evaluations: the area under it, per sample."""
    total = 0.0
    for before, after in pairwise(result["evaluations"]):
        begin, end = samples(before), min(until, samples(after))
        if end > begin:
            slope = (after["height"] - before["height"]) / (samples(after) - begin)
            total += (end - begin) * (before["height"] + slope * (end - begin) / 2)
    return total / until


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """Extremes over the evaluations of a run, and of its end."""

    base_nn: float
    """nn before training."""
    largest_nn: float
    """Largest nn after it began."""
    smallest_div: float
    worst_at_end: float
    """Accuracy of the worst digit at the end: before training it is below any limit."""
    lost_accuracy: float
    """Most that the judges' mean was ever below the base's."""

    def hold(self, *, keeps_accuracy: bool = False) -> bool:
        """Whether all of them hold; of a task that is not about accuracy, accuracy itself in place
        of the worst digit's."""
        right = self.lost_accuracy <= 0 if keeps_accuracy else self.worst_at_end >= MIN_WORST
        return right and self.largest_nn <= self.base_nn and self.smallest_div >= MIN_DIV


def accuracy(evaluation: Evaluation) -> float:
    """The mean of both judges."""
    return float(evaluation["gold"] + evaluation["svm"]) / 2


def guards(result: Result) -> Guards:
    first, *later = result["evaluations"]
    return Guards(
        base_nn=first["nn"],
        largest_nn=max(each["nn"] for each in later),
        smallest_div=min(each["div"] for each in later),
        worst_at_end=later[-1]["worst"],
        lost_accuracy=max(accuracy(first) - accuracy(each) for each in later),
    )


def at_end(results: Iterable[Result], name: str) -> list[float]:
    return [float(each["evaluations"][-1][name]) for each in results]
