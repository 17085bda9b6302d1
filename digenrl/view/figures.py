"""Picks what the pages show of a run's steps, evaluations and devices."""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from fastapi import HTTPException

from digenrl.api.models import SampleHistory
from digenrl.api.past import rank
from digenrl.api.run_history import RunHistory
from digenrl.api.shown import other_figures
from digenrl.reading.wording import USES

PER_PAGE = 50
"""Rows of a table."""
SHOWN = 60
"""Samples of an evaluation that are shown, as many of each prompt."""
FAR_SLOWER = 2.0
"""Times the mean of equal devices from which a worker's host is worth a look."""
FOR_GENERATION = ("waiting_for_rollout", "tail")
"""Waits that a slow device can bring about by generating."""


def curves_of(history: RunHistory, after: int) -> dict[str, Any]:
    """Return columns of numbers: one row per step, and one per evaluation."""
    steps = [step for step in history.steps[max(0, after + 1) :] if step.batch is not None]
    names = sorted({name for step in steps for name in step.metrics})
    figures = [figures_of(each.quality) for each in history.evaluations]
    return {
        "run": history.run,
        "version": [step.version for step in steps],
        "metrics": {name: [step.metrics.get(name) for step in steps] for name in names},
        "evaluated": [each.version for each in history.evaluations],
        "figures": {
            name: [each.get(name) for each in figures]
            for name in sorted({name for each in figures for name in each})
        },
    }


def figures_of(quality: Any) -> dict[str, float]:
    """Return the figures of an evaluation that are numbers, gold rewards under their own names."""
    gold = {f"gold {name}": value for name, value in quality.gold.items()}
    return {"reward": quality.reward} | other_figures(quality) | gold


def samples_of(history: RunHistory, version: int | None) -> dict[str, Any]:
    """Return the first samples of every prompt, of the first version and of another."""
    if not history.evaluations:
        return {"pairs": [], "chosen": None, "evaluated": []}
    first = history.evaluations[0]
    known = {each.version: each for each in history.evaluations}
    if version is not None and version not in known:
        raise HTTPException(404, f"version {version} was not evaluated")
    chosen = history.evaluations[-1] if version is None else known[version]
    each_prompt = max(1, SHOWN // max(1, len({sample.prompt for sample in chosen.samples})))
    seen: dict[str, int] = {}
    pairs: list[dict[str, Any]] = []
    for before, after in zip(first.samples, chosen.samples, strict=True):
        seen[after.prompt] = seen.get(after.prompt, 0) + 1
        if seen[after.prompt] <= each_prompt and len(pairs) < SHOWN:
            pairs.append({
                "prompt": after.prompt, "right": after.right,
                "source": None if after.source is None else _name(after.source.key),
                "before": _name(before.still.key), "after": _name(after.still.key),
                "video": _name(after.media.key) if after.media != after.still else None,
            })  # fmt: skip
    return {"pairs": pairs, "chosen": chosen.version, "evaluated": sorted(known)}


def sample_of(group: Sequence[SampleHistory], number: int) -> dict[str, Any] | None:
    """Return a sample among the others of its group; None if the group has none of this number."""
    if not 0 <= number < len(group):
        return None
    one, ranked = group[number], sorted(group, key=lambda each: rank(each.reward, worst=True))
    known = [each.reward for each in group if each.reward is not None]
    scores = {name: [each.scores.get(name) for each in group] for name in one.scores}
    means = {
        name: fmean(found) for name, every in scores.items()
        if (found := [score for score in every if score is not None])
    }  # fmt: skip
    return {
        "one": one, "ranked": ranked, "place": ranked.index(one) + 1, "score_means": means,
        "mean": fmean(known) if known else None, "spread": pstdev(known) if known else None,
    }  # fmt: skip


def slowest_of(
    slowest: Mapping[str, Any] | None, workers: Sequence[Mapping[str, Any]], waits: str
) -> dict[str, Any] | None:
    """Return the worker that takes longest for a sample beside the mean of equal devices; None if
    it holds nobody up: generation is not what devices wait for, and its equals are like it.

    Args:
        slowest: what the scheduler says of it.
        waits: for what devices wait most.
    """
    if slowest is None:
        return None
    devices = {each["worker"]: each["device"] for each in workers}
    device = devices.get(slowest["worker"])
    equal = [
        each["seconds_per_sample"] for each in workers
        if each["device"] == device and each["seconds_per_sample"] is not None
    ]  # fmt: skip
    mean = fmean(equal) if len(equal) > 1 else slowest["mean_seconds_per_sample"]
    has_equals = device is None or len(equal) > 1
    is_far_slower = has_equals and slowest["seconds_per_sample"] >= FAR_SLOWER * mean
    if not is_far_slower and waits not in FOR_GENERATION:
        return None
    return dict(slowest) | {"mean_seconds_per_sample": mean, "is_far_slower": is_far_slower}


def _name(key: str) -> str:
    return key.rsplit("/", 1)[1]


def schedule_of(history: RunHistory) -> dict[str, Any]:
    batches = [history.usage[each] for each in sorted(history.usage, reverse=True)]
    devices: dict[str, dict[str, float]] = {}
    for batch in batches:
        for device, uses in batch.devices.items():
            sums = devices.setdefault(device, {})
            for use, seconds in uses.items():
                sums[use] = sums.get(use, 0.0) + seconds
    shares = {
        device: _shares(sums) for device, sums in sorted(devices.items()) if sum(sums.values()) > 0
    }
    exchanged = {
        device: sums["committing"] / len(batches)
        for device, sums in sorted(devices.items()) if sums.get("committing")
    }  # fmt: skip
    return {
        "batches": batches, "shares": shares, "exchanged": exchanged,
        "uses": USES,
    }  # fmt: skip


def _shares(sums: Mapping[str, float]) -> dict[str, float]:
    whole = sum(sums.values())
    return {use: seconds / whole for use, seconds in sums.items()}
