"""Plots of the bench: a mode's batch as a bar, and what the two devices did as a timeline."""

from collections.abc import Sequence
from pathlib import Path

from bench.plots import Bar, bars, timeline
from bench.two_devices.compare import DEVICES, PartResult, RunFigures
from bench.two_devices.output import title_of


def draw(results: Sequence[PartResult], folder: Path) -> list[Path]:
    """One picture of bars per part, one timeline per mode."""
    drawn: list[Path] = []
    for result in results:
        path = folder / f"two-devices-{result.part}.png"
        given = [Bar(row.mode.name, row.seconds, *row.spread) for row in result.rows]
        bars(path, title_of(result), given, bounds={"bound of both devices": result.bound})
        drawn.append(path)
        for row in result.rows:
            path = folder / f"two-devices-{result.part}-{row.mode.slug}.png"
            _timeline(path, f"{title_of(result)}: {row.mode.name}", _typical(row.runs))
            drawn.append(path)
    return drawn


def _typical(runs: Sequence[RunFigures]) -> RunFigures:
    """The run of the median."""
    return sorted(runs, key=lambda run: run.step)[len(runs) // 2]


def _timeline(path: Path, title: str, run: RunFigures) -> None:
    spans = [interval for interval in run.intervals if interval.device in DEVICES]
    timeline(path, title, spans, begin=0.0, end=sum(run.batches))
