"""What the runs come to: medians, spreads, ratios, the bound, and whether targets are reached."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.two_devices.bound import Speed, fastest, least_seconds
from bench.two_devices.events import (
    Interval,
    Job,
    Use,
    busy_seconds,
    intervals_of,
    jobs_of,
    published_at,
    speeds_of,
)
from bench.two_devices.modes import ONE_STEP, Mode, Part
from bench.two_devices.run import ROLLOUT, TRAINER, RunRecord
from services.scheduler.core.usage import BUSY, BatchUsage

DEVICES = (ROLLOUT, TRAINER)
OF_THE_BOUND = 0.9
OF_COLOCATED = 0.97
OVER_COLOCATED_SLOWED = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Of one run's measured batches."""

    batches: tuple[float, ...]
    """Seconds, each from one announcement to the next."""
    speeds: Mapping[str, Speed]
    busy: Mapping[str, Mapping[Use, float]]
    """Device -> use -> share of the time."""
    bubbles: Mapping[str, Mapping[str, float]]
    """Device -> what it waited for -> share of the time, as the scheduler saw it."""
    cores: Mapping[str, float]
    """That each process used on average."""
    held: float
    """Of the time in which the trainer worked, the share that it had its core. Less than 1: others
    had it; a little more: it also packed, stored and reported."""
    generated_by_trainer: float
    """Samples per batch."""
    trained_by_rollout: float
    decisions: tuple[str, ...]
    """TAG's, of every batch that the scheduler has seen from its beginning."""
    intervals: tuple[Interval, ...]
    """From 0 at the first announcement."""

    @property
    def step(self) -> float:
        """Mean seconds per batch: what one saves at the cost of the next is no gain."""
        return statistics.fmean(self.batches)


def figures_of(record: RunRecord, *, group_size: int) -> RunFigures:
    times = published_at(record.heard)
    begin, end = times[record.first], times[record.last]
    jobs = jobs_of(record.heard, group_size=group_size)
    inside = [job for job in jobs if begin < job.end <= end]
    busy = busy_seconds(inside, DEVICES)
    num_batches = record.last - record.first
    cores = {name: used / (end - begin) for name, used in record.cpu_seconds.items()}
    worked = sum(busy[TRAINER].values()) / (end - begin)
    return RunFigures(
        batches=tuple(
            times[version + 1] - times[version] for version in range(record.first, record.last)
        ),
        speeds=speeds_of(inside, DEVICES, least=group_size),
        busy={
            device: {use: seconds / (end - begin) for use, seconds in uses.items()}
            for device, uses in busy.items()
        },
        bubbles={device: _bubbles(record, device) for device in DEVICES},
        cores=cores,
        held=cores[TRAINER] / worked,
        generated_by_trainer=_samples(inside, TRAINER, "generate") / num_batches,
        trained_by_rollout=_samples(inside, ROLLOUT, "train") / num_batches,
        decisions=tuple(_words(batch) for batch in record.usage if batch.tag),
        intervals=tuple(_within(intervals_of(jobs), begin, end)),
    )


def _bubbles(record: RunRecord, device: str) -> dict[str, float]:
    spent: Counter[str] = Counter()
    for batch in (batch for batch in record.usage if batch.batch >= record.first):
        spent.update(batch.devices.get(device, {}))
    whole = sum(spent.values())
    return {use: seconds / whole for use, seconds in spent.items() if use not in BUSY}


def _words(batch: BatchUsage) -> str:
    tag = batch.tag
    assert tag is not None
    gain = "" if tag.predicted_gain is None else f", predicted to gain {tag.predicted_gain:.1%}"
    return f"batch {batch.batch}: at most {tag.groups} groups ({tag.reason}{gain})"


def _samples(jobs: Sequence[Job], device: str, use: Use) -> int:
    return sum(job.samples for job in jobs if (job.device, job.use) == (device, use))


def _within(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    return [
        Interval(
            device=each.device,
            use=each.use,
            begin=max(each.begin, begin) - begin,
            end=min(each.end, end) - begin,
        )
        for each in intervals
        if each.end > begin and each.begin < end
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A mode, over its runs."""

    mode: Mode
    runs: tuple[RunFigures, ...]
    to_previous: float | None
    """Seconds of the mode before over this one's: more than 1 is faster."""
    to_colocated: float | None
    """Seconds of the best colocated mode over this one's."""
    of_the_bound: float
    """Bound over seconds: the utilisation of both devices."""

    @property
    def seconds(self) -> float:
        return statistics.median(run.step for run in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        steps = [run.step for run in self.runs]
        return min(steps), max(steps)

    def share(self, device: str, use: Use) -> float:
        return statistics.median(run.busy[device][use] for run in self.runs)


@dataclass(frozen=True, slots=True)
class Target:
    words: str
    value: float
    at_least: float

    @property
    def reached(self) -> bool:
        return self.value >= self.at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    part: Part
    slowdown: float
    speeds: Mapping[str, Speed]
    """The best of the modes in which both devices work, each the median of its runs."""
    bound: float
    """Seconds."""
    rows: tuple[Row, ...]
    targets: tuple[Target, ...]


def summarise(
    part: Part,
    measured: Sequence[tuple[Mode, Sequence[RunFigures]]],
    *,
    samples: int,
    slowdown: float,
) -> PartResult:
    """``measured``: each mode with the figures of its runs; ``samples``: of a batch."""
    medians = [statistics.median(run.step for run in runs) for _, runs in measured]
    baselines = [s for (mode, _), s in zip(measured, medians, strict=True) if mode.baseline]
    colocated = min(baselines, default=None)
    both_work = [_median_speeds(runs) for mode, runs in measured if mode.overlaps]
    speeds = fastest(both_work or [_median_speeds(runs) for _, runs in measured])
    bound = least_seconds(list(speeds.values()), samples)
    previous = [None, *medians[:-1]]
    rows = tuple(
        Row(
            mode=mode,
            runs=tuple(runs),
            to_previous=None if before is None else before / seconds,
            to_colocated=None if colocated is None else colocated / seconds,
            of_the_bound=bound / seconds,
        )
        for (mode, runs), seconds, before in zip(measured, medians, previous, strict=True)
    )
    return PartResult(
        part=part,
        slowdown=slowdown,
        speeds=speeds,
        bound=bound,
        rows=rows,
        targets=_targets(part, rows),
    )


def _median_speeds(runs: Sequence[RunFigures]) -> dict[str, Speed]:
    return {
        device: Speed(
            generate=statistics.median(run.speeds[device].generate for run in runs),
            train=statistics.median(run.speeds[device].train for run in runs),
        )
        for device in DEVICES
    }


def _targets(part: Part, rows: Sequence[Row]) -> tuple[Target, ...]:
    ours = next((row for row in rows if row.mode.name == ONE_STEP), None)
    if ours is None or ours.to_colocated is None:
        return ()
    if part == "equal":
        return (
            Target("one step with TAG, of the bound", ours.of_the_bound, OF_THE_BOUND),
            Target("one step with TAG, over colocated", ours.to_colocated, OF_COLOCATED),
        )
    if part == "slowed":
        name = "one step with TAG, over the better colocated"
        return (Target(name, ours.to_colocated, OVER_COLOCATED_SLOWED),)
    return ()
