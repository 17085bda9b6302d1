"""Pictures of measurements: step times by mode, and what each device did when.

Colours are Okabe and Ito's, which people with any kind of colour vision tell apart; in the timeline
uses differ in lightness as well.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.runner.figures import Interval

COLOURS = {
    "generate": "#56B4E9",
    "train": "#E69F00",
    "commit": "#000000",
    "adopt": "#CC79A7",
    "exchange": "#009E73",
    "snapshot": "#999999",
    "switch": "#D55E00",
    "score": "#F0E442",
    "idle": "#F2F2F2",
}
MEASURED, BOUND, SIMULATED = "#0072B2", "#D55E00", "#000000"
ROW_INCHES, MIN_INCHES = 0.16, 2.4


class Bar(NamedTuple):
    """A mode's step time."""

    name: str
    seconds: float
    low: float
    high: float
    """Fastest and slowest of its rounds."""
    simulated: float | None = None


def bars(
    path: Path, title: str, given: Sequence[Bar], *, bounds: Mapping[str, float] | None = None
) -> None:
    """Draws step times with their spread, and a line for each bound (name -> seconds).

    ``path``: its suffix says in which format.
    """
    figure = Figure(figsize=(1.8 + 1.1 * len(given), 4.0), layout="constrained")
    axes = figure.subplots()
    heights = [bar.seconds for bar in given]
    spread = [[bar.seconds - bar.low for bar in given], [bar.high - bar.seconds for bar in given]]
    places = range(len(given))
    axes.bar(places, heights, yerr=spread, color=MEASURED, width=0.6, capsize=3, label="measured")
    for place, bar in enumerate(given):
        axes.annotate(
            f"{bar.seconds:.3g}", (place, bar.seconds), ha="center", va="bottom",
            xytext=(0, 4), textcoords="offset points", fontsize=9,
        )  # fmt: skip
    known = [(place, bar.simulated) for place, bar in enumerate(given) if bar.simulated is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "D", color=SIMULATED, markersize=5, label="simulated")
    _lines(axes, bounds or {})
    axes.set_xticks(list(places), [bar.name for bar in given], fontsize=9)
    axes.set_ylabel("seconds per batch")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    _save(figure, path)


def timeline(
    path: Path,
    title: str,
    spans: Sequence[Interval],
    *,
    begin: float,
    end: float,
    marks: Mapping[str, float] | None = None,
    seconds_per_second: float = 1.0,
) -> None:
    """Draws one row per device between two times; ``marks``: name -> time of a vertical line.

    ``seconds_per_second``: of the axis, for each second of the spans (the scale of an emulation).
    ``path``: its suffix says in which format.
    """
    shown = [span for span in spans if span.end > begin and span.begin < end]
    devices = sorted({span.device for span in spans})
    figure = Figure(
        figsize=(10.0, max(MIN_INCHES, 1.4 + ROW_INCHES * len(devices))), layout="constrained"
    )
    axes = figure.subplots()
    axes.set_facecolor(COLOURS["idle"])
    for row, device in enumerate(devices):
        for use in sorted({span.use for span in shown if span.device == device}):
            pieces = [
                (
                    (max(span.begin, begin) - begin) * seconds_per_second,
                    (min(span.end, end) - max(span.begin, begin)) * seconds_per_second,
                )
                for span in shown
                if span.device == device and span.use == use
            ]
            axes.broken_barh(
                pieces, (row - 0.42, 0.84), color=COLOURS[use], edgecolor="white", linewidth=0.2
            )
    for name, time in (marks or {}).items():
        place = (time - begin) * seconds_per_second
        axes.axvline(place, color=BOUND, linewidth=1.0)
        axes.annotate(name, (place, -0.8), color=BOUND, fontsize=8, annotation_clip=False)
    axes.set_yticks(range(len(devices)), devices, fontsize=7)
    axes.set_xlim(0, (end - begin) * seconds_per_second)
    axes.set_ylim(len(devices) - 0.4, -0.6)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10, pad=18)
    used = [use for use in COLOURS if use == "idle" or any(span.use == use for span in shown)]
    handles = [Patch(facecolor=COLOURS[use], edgecolor="grey", label=use) for use in used]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(used), fontsize=8, frameon=False
    )
    _save(figure, path)


def _lines(axes: Axes, bounds: Mapping[str, float]) -> None:
    styles = ("-", "--", ":", "-.")
    for number, (name, seconds) in enumerate(bounds.items()):
        axes.axhline(
            seconds, color=BOUND, linestyle=styles[number % len(styles)], linewidth=1.2,
            label=f"{name} ({seconds:.3g} s)",
        )  # fmt: skip


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
