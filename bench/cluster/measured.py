"""What the runs of one schedule show: seconds per batch, and what devices did meanwhile.

As in `services.scheduler.sim.measured`: with one-step asynchrony generation is ahead by something
that changes from batch to batch, so that what was taken from stock, or added to it, counts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from bench.cluster.hold import Interval
from bench.cluster.session import RunRecord
from services.scheduler.core.usage import BUSY
from services.scheduler.costs.profile import Role, fragment_seconds
from services.scheduler.sim.measured import balanced

Share = Literal["generate", "train", "commit", "adopt", "idle"]
ROLES: tuple[Role, ...] = ("rollout", "trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From the announcement of one version to that of another."""

    first: int
    last: int
    begin: float
    end: float
    generated: float
    """Samples."""

    @property
    def batches(self) -> int:
        return self.last - self.first

    def from_stock(self, batch_samples: int) -> float:
        """Batches that were trained and not generated in it, per batch."""
        return 1 - self.generated / batch_samples / self.batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one run. Seconds are those of the emulation: multiply by the scale."""

    seed: int
    """Of the service times."""
    warm_up: int
    """Batches."""
    step_seconds: float
    batch_seconds: list[float]
    """Of each measured batch, from commit to commit."""
    from_stock: float
    shares: dict[Role, dict[Share, float]]
    """Pool -> use -> share of its device-seconds."""
    waits: dict[Role, dict[str, float]]
    """Pool -> cause, as the scheduler sees it -> share of its device-seconds."""
    messages: dict[str, float]
    """Stream -> messages stored per batch."""
    cpu: dict[str, float]
    """Process -> cores that it kept busy."""
    overshoot_ms: float
    """Median over the sleeps of all emulated devices' processes, at most."""


def measure(run: RunRecord, warm_up: int, last: int) -> Measured:
    """Of the batches from the version ``warm_up`` to the version ``last``."""
    setting, profile = run.setting, run.setting.load_profile()
    begin, end = run.commits[warm_up], run.commits[last]
    made = generated(run.intervals, begin, end)
    window = Window(first=warm_up, last=last, begin=begin, end=end, generated=made)
    stock = window.from_stock(profile.shape.samples) if setting.schedule.staleness_limit else 0.0
    shares: dict[Role, dict[Share, float]] = {role: _shares(run, role, window) for role in ROLES}
    seconds = (end - begin) / window.batches
    gaps = [after - before for before, after in pairwise(run.commits[warm_up : last + 1])]
    return Measured(
        seed=setting.seed,
        warm_up=warm_up,
        step_seconds=balanced(
            seconds,
            stock,
            _generation_seconds(run) / setting.scale,
            busy=1 - shares["rollout"].get("idle", 0.0),
        ),
        batch_seconds=gaps,
        from_stock=stock,
        shares=shares,
        waits={role: _waits(run, role, warm_up, last) for role in ROLES},
        messages={
            stream: (number - run.begin.stored[stream]) / (run.end.version - run.begin.version)
            for stream, number in run.end.stored.items()
        },
        cpu={
            name: (used - run.begin.cpu[name]) / (run.end.at - run.begin.at)
            for name, used in run.end.cpu.items()
        },
        overshoot_ms=max(one["median_ms"] for one in run.overshoot.values()),
    )


def generated(intervals: Sequence[Interval], begin: float, end: float) -> float:
    """Samples between two times, those under way in proportion."""
    return sum(
        each.samples * _overlap(each, begin, end) / (each.end - each.begin)
        for each in intervals
        if each.samples
    )


def _overlap(interval: Interval, begin: float, end: float) -> float:
    return max(0.0, min(interval.end, end) - max(interval.begin, begin))


def _shares(run: RunRecord, role: Role, window: Window) -> dict[Share, float]:
    intervals = [each for each in run.intervals if each.device.startswith(role)]
    devices = {each.device for each in intervals}
    number = run.setting.num_rollout if role == "rollout" else run.setting.num_trainer
    if role == "trainer" and not run.setting.schedule.tsp:
        number = len(devices)  # the pool is one lane
    if not number:
        return {}
    shares: defaultdict[Share, float] = defaultdict(float)
    for each in intervals:
        spent = _overlap(each, window.begin, window.end)
        shares[each.use] += spent / (window.end - window.begin) / number
    return {**shares, "idle": 1 - sum(shares.values())}


def _waits(run: RunRecord, role: Role, warm_up: int, last: int) -> dict[str, float]:
    usage = [each for each in run.usage if warm_up <= each.batch < last]
    devices = [d for each in usage for name, d in each.devices.items() if name.startswith(role)]
    total = sum(sum(spent.values()) for spent in devices)
    causes: defaultdict[str, float] = defaultdict(float)
    for spent in devices:
        for use, seconds in spent.items():
            if use not in BUSY:
                causes[use] += seconds / total
    return dict(causes)


def _generation_seconds(run: RunRecord) -> float:
    """Of a batch at full scale, by all devices that may generate."""
    setting, profile = run.setting, run.setting.load_profile()
    size = setting.schedule.fixed_fragment or profile.shape.group_size
    pools: list[Mapping[str, int]] = [
        setting.rollout,
        *([setting.trainer] if setting.schedule.lends_trainer else []),
    ]
    rate = sum(
        n / fragment_seconds(profile, kind, size) for pool in pools for kind, n in pool.items()
    )
    return profile.shape.samples / size / rate
