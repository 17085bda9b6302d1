"""What the runs come to: medians, spreads, ratios, the bound, and whether targets are reached."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.runner.figures import Interval, RunRecord, Use, Window
from bench.two_devices.bound import Speed, fastest
from bench.two_devices.modes import ONE_STEP, Mode, Part
from bench.two_devices.run import DEVICES, TRAINER
from services.scheduler.costs.floor import least_seconds
from shared.run.usage import BatchUsage

OF_THE_BOUND = 0.9
OVER_ALONE = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of one run's measured batches."""

    batches: Sequence[float]
    """Seconds of each, from one announcement to the next."""
    speeds: Mapping[str, Speed]
    busy: Mapping[str, Mapping[str, float]]
    """Device -> use -> share of the time."""
    bubbles: Mapping[str, Mapping[str, float]]
    """Device -> what it waited for -> share of the time, as the scheduler saw it."""
    cores: Mapping[str, float]
    """Process -> cores that it used on average."""
    held: float
    """Share of its work for which the trainer had its core. Less than 1: others had it; a little
    more: it also packed, stored and reported."""
    generated_by_trainer: float
    """Samples per batch."""
    decisions: tuple[str, ...]
    """TAG's, of every batch that the scheduler has seen from its beginning."""
    intervals: Sequence[Interval]
    begin: float
    """When the first announcement was heard, on the clock of the intervals."""

    @property
    def step(self) -> float:
        """Mean seconds per batch: what one saves at the cost of the next is no gain."""
        return statistics.fmean(self.batches)


def figures_of(record: RunRecord, first: int, last: int, *, group_size: int) -> RunFigures:
    """Returns the figures of the batches from the version ``first`` to the version ``last``."""
    window = Window(record, first, last)
    busy = {device: window.shares(device) for device in DEVICES}
    return RunFigures(
        batches=window.batch_seconds,
        speeds={
            device: Speed(
                generate=_pace(window, device, "generate", group_size),
                train=_pace(window, device, "train", group_size),
            )
            for device in DEVICES
        },
        busy=busy,
        bubbles={device: window.waits(device) for device in DEVICES},
        cores=record.cores,
        held=record.cores[TRAINER] / sum(busy[TRAINER].values()),
        generated_by_trainer=window.samples(TRAINER, "generate") / window.num_batches,
        decisions=tuple(_words(batch) for batch in record.usage if batch.tag),
        intervals=record.intervals,
        begin=window.begin,
    )


def _pace(window: Window, device: str, use: Use, least: int) -> float:
    """Returns seconds per sample; fewer than ``least`` samples say nothing of it."""
    samples, share = window.samples(device, use), window.shares(device).get(use, 0.0)
    if round(samples) < least:
        return math.inf
    return share * (window.end - window.begin) / samples


def _words(batch: BatchUsage) -> str:
    tag = batch.tag
    assert tag is not None
    gain = "" if tag.predicted_gain is None else f", predicted to gain {tag.predicted_gain:.1%}"
    return f"batch {batch.batch}: at most {tag.groups} groups ({tag.reason}{gain})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A mode, over its runs."""

    mode: Mode
    runs: tuple[RunFigures, ...]
    to_previous: float | None
    """Seconds of the mode before over this one's: more than 1 is faster."""
    to_alone: float | None
    """Seconds of the fast device alone over this one's, where that was measured."""
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
        return statistics.median(run.busy[device].get(use, 0.0) for run in self.runs)


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
    """Compares the modes, each with the figures of its runs, in batches of so many ``samples``."""
    medians = [statistics.median(run.step for run in runs) for _, runs in measured]
    baselines = (s for (mode, _), s in zip(measured, medians, strict=True) if mode.baseline)
    alone = next(baselines, None)
    both_work = [_median_speeds(runs) for mode, runs in measured if mode.overlaps]
    speeds = fastest(both_work or [_median_speeds(runs) for _, runs in measured])
    bound = least_seconds([speed.rates for speed in speeds.values()], samples, samples)
    previous = [None, *medians[:-1]]
    rows = tuple(
        Row(
            mode=mode,
            runs=tuple(runs),
            to_previous=None if before is None else before / seconds,
            to_alone=None if alone is None else alone / seconds,
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
    if ours is None:
        return ()
    if part == "equal":
        return (Target("one step with TAG, of the bound", ours.of_the_bound, OF_THE_BOUND),)
    if ours.to_alone is None:
        return ()
    return (Target("one step with TAG, over the fast device alone", ours.to_alone, OVER_ALONE),)
