"""What the bench shows: a table per part for people, JSON for programs, plots for both."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.runner.figures import Use
from bench.two_devices.bound import Speed
from bench.two_devices.compare import PartResult, Row, RunFigures
from bench.two_devices.run import DEVICES, ROLLOUT, TRAINER

LEGEND = """\
x before, x alone: how many times as fast as the mode before, as the fast device alone
g/t/c/idle: per cent of the time that the device generates, trains, commits, does none of these
helped: samples per batch that the trainer generated
services: cores that scheduler, reward, brokers and this bench used
held: share of its work for which the trainer had its core; much less than 100%: a busy machine"""

BUSY_MACHINE = 0.93
"""Least usual `held`: brokers and services take some per cent, more is somebody else's."""


def title_of(result: PartResult) -> str:
    if result.part == "slowed":
        return f"Two devices, the one that generates slowed {result.slowdown:g} times"
    return "Two equal devices"


def show_part(result: PartResult, console: Console, *, group_size: int) -> None:
    table = Table(title=title_of(result), title_justify="left")
    table.add_column("mode")
    for heading in (
        "s/batch", "min..max", "x before", "x alone", "of bound", "rollout g/idle",
        "trainer g/t/c/idle", "helped", "services", "held",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in result.rows:
        table.add_row(
            row.mode.name,
            f"{row.seconds:.3f}",
            "{:.2f}..{:.2f}".format(*row.spread),
            _times(row.to_previous),
            _times(row.to_alone),
            f"{row.of_the_bound:.0%}",
            _shares(row, ROLLOUT, ("generate",)),
            _shares(row, TRAINER, ("generate", "train", "commit")),
            f"{statistics.fmean(run.generated_by_trainer for run in row.runs):.0f}",
            f"{services_cores(row):.2f}",
            f"{statistics.median(run.held for run in row.runs):.0%}",
        )
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False)
    if any(run.held < BUSY_MACHINE for row in result.rows for run in row.runs):
        console.print("other programs had the devices' cores: measure again when it is quiet")
    for device, speed in result.speeds.items():
        console.print(
            f"{device}: {_seconds(speed.generate, group_size)} to generate a group, "
            f"{_seconds(speed.train, group_size)} to train it",
            highlight=False,
        )
    console.print(f"bound of both together: {result.bound:.3f} s per batch", highlight=False)
    for target in result.targets:
        said = "reached" if target.reached else "MISSED"
        console.print(
            f"target {said}: {target.words} {target.value:.3f}, at least {target.at_least}",
            highlight=False,
        )


def services_cores(row: Row) -> float:
    """Returns the cores that everything but the two devices used."""
    return statistics.median(
        sum(used for name, used in run.cores.items() if name not in DEVICES) for run in row.runs
    )


def _shares(row: Row, device: str, uses: Sequence[Use]) -> str:
    """Returns per cent of the time; the last is when it did none of these."""
    shares = [row.share(device, use) for use in uses]
    return "/".join(f"{100 * share:.0f}" for share in (*shares, max(0.0, 1 - sum(shares))))


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _seconds(per_sample: float, group_size: int) -> str:
    return (
        "nothing known of what it takes"
        if math.isinf(per_sample)
        else (f"{per_sample * group_size:.3f} s")
    )


def as_plain(results: Sequence[PartResult], about: dict[str, Any]) -> dict[str, Any]:
    """Returns figures for JSON; ``about``: the machine, the recipe and what was changed in it."""
    return {**about, "parts": {result.part: _part(result) for result in results}}


def _part(result: PartResult) -> dict[str, Any]:
    return {
        "bound_s": result.bound,
        "seconds_per_sample": {name: _speed(speed) for name, speed in result.speeds.items()},
        "modes": [_row(row) for row in result.rows],
        "targets": [dataclasses.asdict(t) | {"reached": t.reached} for t in result.targets],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "mode": row.mode.name,
        "changes": {key: str(value) for key, value in row.mode.changes.items()},
        "median_s": row.seconds,
        "spread_s": list(row.spread),
        "over_previous": row.to_previous,
        "over_alone": row.to_alone,
        "of_the_bound": row.of_the_bound,
        "services_cores": services_cores(row),
        "runs": [
            {
                "step_s": run.step,
                "batches_s": run.batches,
                "seconds_per_sample": {d: _speed(speed) for d, speed in run.speeds.items()},
                "busy": run.busy,
                "bubbles": run.bubbles,
                "cores": run.cores,
                "held": run.held,
                "samples_generated_by_trainer": run.generated_by_trainer,
                "tag": run.decisions,
            }
            for run in row.runs
        ],
    }


def _speed(speed: Speed) -> dict[str, float | None]:
    known = {"generate": speed.generate, "train": speed.train}
    return {task: None if math.isinf(seconds) else seconds for task, seconds in known.items()}


def draw(results: Sequence[PartResult], folder: Path) -> list[Path]:
    """Draws the bars of each part, and a timeline per mode."""
    from bench.runner.plots import Bar, bars, timeline

    drawn: list[Path] = []
    for result in results:
        path = folder / f"two-devices-{result.part}.png"
        given = [Bar(row.mode.name, row.seconds, *row.spread) for row in result.rows]
        bars(path, title_of(result), given, bounds={"bound of both devices": result.bound})
        drawn.append(path)
        for row in result.rows:
            path = folder / f"two-devices-{result.part}-{row.mode.slug}.png"
            run = _typical(row.runs)
            spans = [interval for interval in run.intervals if interval.device in DEVICES]
            title = f"{title_of(result)}: {row.mode.name}"
            timeline(path, title, spans, begin=run.begin, end=run.begin + sum(run.batches))
            drawn.append(path)
    return drawn


def _typical(runs: Sequence[RunFigures]) -> RunFigures:
    """Returns the run of the median."""
    return sorted(runs, key=lambda run: run.step)[len(runs) // 2]
