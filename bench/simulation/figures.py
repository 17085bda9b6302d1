"""Computes shares of time and help of a simulated run's devices, for benchmarks.

The planner reads only the seconds of a simulated run.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from services.scheduler.costs.profile import Profile, Role
from services.scheduler.sim import profiled
from services.scheduler.sim.cluster import Cluster
from services.scheduler.sim.history import SimUse
from services.scheduler.sim.measured import (
    ClusterWatch,
    SimulationResult,
    Window,
    generated_fragments,
    is_trainer,
    num_helped,
    steady_window,
)
from shared.messages.contracts import TrainGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TagBatch:
    """TAG's decision for a batch, and its effect."""

    batch: int
    groups: int
    """Most groups that the trainer may generate."""
    reason: str
    groups_generated: float
    """Groups that the trainer generated in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailedResult(SimulationResult):
    balanced_seconds: float
    """Per batch, of all measured batches, with what generation has gained or lost on training."""
    busy: Mapping[Role, Mapping[SimUse, float]]
    """Pool -> use -> share of its device-seconds."""
    tag: tuple[TagBatch, ...]
    """TAG's decisions for the measured batches."""
    staleness: Mapping[int, float]
    """Steps -> share of the trained groups."""
    discarded: float
    """Samples that were generated and not trained, over those that were trained."""


def simulate(profile: Profile, **settings: Any) -> DetailedResult:
    """Simulate as `profiled.simulate` does, and return more."""
    details: dict[str, Any] = {}

    def observe(watch: ClusterWatch, warm_up: int, generation_seconds: float) -> None:
        details.update(_details(watch, warm_up, generation_seconds))

    found = profiled.simulate(profile, observe=observe, **settings)
    return DetailedResult(
        **{each.name: getattr(found, each.name) for each in fields(found)}, **details
    )


def _details(watch: ClusterWatch, warm_up: int, generation_seconds: float) -> dict[str, Any]:
    cluster, marks = watch.cluster, watch.marks
    batch_samples = cluster.plan.num_groups * cluster.plan.group_size
    window = steady_window(marks, warm_up, batch_samples)
    whole = Window(warm_up, len(marks) - 1, marks[warm_up], marks[-1])
    stock = whole.from_stock(batch_samples) if cluster.plan.schedule.staleness_limit else 0.0
    all_busy = sum(_busy_rollout(whole, len(cluster.rollout)).values())
    commits = cluster.commits[window.first + 1 : window.last + 1]
    return {
        "balanced_seconds": balanced(
            whole.seconds / (whole.last - whole.first), stock, generation_seconds,
            busy=all_busy if cluster.rollout else 1.0,
        ),
        "busy": {
            "rollout": _busy_rollout(window, len(cluster.rollout)),
            "trainer": _busy_trainer(window, len(cluster.members)),
        },
        "tag": _tag_batches(cluster, window),
        "staleness": _staleness([group for commit in commits for group in commit.trained]),
        "discarded": _discarded(cluster, batch_samples),
    }  # fmt: skip


def balanced(seconds: float, from_stock: float, generation_seconds: float, *, busy: float) -> float:
    """Per batch, of some batches in which generation was ahead by more or less in the end.

    A batch that was taken from stock has to be generated some time, by all devices at best. One
    that was added to it will not have to be: it is worth what devices would not have idled anyway.

    Args:
        from_stock: batches taken from stock, per batch; negative if they were added.
        generation_seconds: of a batch, by all devices that may generate.
        busy: share of their time that rollout devices worked.
    """
    worth = generation_seconds if from_stock > 0 else generation_seconds * min(1.0, busy)
    return seconds + from_stock * worth


def _busy(window: Window) -> dict[tuple[str, SimUse], float]:
    begin, end = window.begin.busy, window.end.busy
    return {key: seconds - begin.get(key, 0.0) for key, seconds in end.items()}


def _busy_rollout(window: Window, num_devices: int) -> dict[SimUse, float]:
    """A fragment counts wholly from its beginning, so a window may hold a little too much."""
    shares: defaultdict[SimUse, float] = defaultdict(float)
    for (name, use), seconds in _busy(window).items():
        if not is_trainer(name):
            shares[use] += seconds / window.seconds / num_devices
    shares["generate"] = min(shares["generate"], 1 - shares["load"])
    return dict(shares)


def _busy_trainer(window: Window, num_devices: int) -> dict[SimUse, float]:
    shares: defaultdict[SimUse, float] = defaultdict(float)
    for (name, use), seconds in _busy(window).items():
        if is_trainer(name):
            shares[use] += seconds / window.seconds / num_devices
    return dict(shares)


def _tag_batches(cluster: Cluster, window: Window) -> tuple[TagBatch, ...]:
    decisions = {each.batch: each.decision for each in cluster.scheduler.state.tag.history}
    batches = []
    for commit in cluster.commits[window.first + 1 : window.last + 1]:
        decision = decisions.get(commit.policy.version - 1)
        if decision is not None:
            helped = num_helped(commit.trained) / cluster.plan.group_size
            batches.append(
                TagBatch(
                    batch=commit.policy.version - 1,
                    groups=decision.groups,
                    reason=decision.reason,
                    groups_generated=helped,
                )
            )
    return tuple(batches)


def _staleness(groups: Sequence[TrainGroup]) -> dict[int, float]:
    counts = Counter(group.batch - group.policy.version for group in groups)
    return {value: counts[value] / len(groups) for value in sorted(counts)}


def _discarded(cluster: Cluster, batch_samples: int) -> float:
    """Return samples that were generated and not trained, over the samples of all committed
    batches."""
    committed = len(cluster.commits) - 1
    fragments = [message.fragment for message in generated_fragments(cluster)]
    generated = sum(f.num_samples for f in fragments if f.batch < committed)
    return generated / (committed * batch_samples) - 1
