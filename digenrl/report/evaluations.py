"""Draws the evaluations of a run: figures over steps, and samples over steps."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from digenrl.evaluation.records import EvaluationRecord
from digenrl.report.pictures import AFTER, GOLD, WRONG, mosaic
from digenrl.report.stills import Stills

matplotlib.use("Agg")

from matplotlib import pyplot as plt

TRAINED = "training reward"
MAX_VERSIONS = 12
"""Largest number of columns in the picture."""


def draw_evaluations(path: Path, records: Sequence[EvaluationRecord]) -> None:
    """Draw the training reward and, below it, each gold reward; mark versions with an alarm."""
    curves = curves_of(records)
    steps = [record.version for record in records]
    figure, panels = plt.subplots(
        len(curves), 1, figsize=(7, 1 + 1.9 * len(curves)), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, (name, values) in zip(panels[:, 0], curves.items(), strict=True):
        axes.plot(steps, values, color=AFTER if name == TRAINED else GOLD, lw=2, marker="o", ms=4)
        for record in records:
            if record.alarms:
                axes.axvline(record.version, color=WRONG, lw=1, ls=":")
        axes.set_ylabel(name, fontsize=9)
        axes.grid(alpha=0.25)
    panels[0, 0].set_title(
        f"{records[0].run}: evaluations at the same prompts and noise (dotted: alarm)", fontsize=10
    )
    panels[-1, 0].set_xlabel("optimizer step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def curves_of(records: Sequence[EvaluationRecord]) -> dict[str, list[float]]:
    """Return the curves to draw, for the figures that every record has."""
    curves = {TRAINED: [record.quality.reward for record in records]}
    for name in records[0].quality.gold:
        if all(name in record.quality.gold for record in records):
            curves[f"gold: {name}"] = [record.quality.gold[name] for record in records]
    judged = [record.quality.gold_accuracy for record in records]
    known = [share for share in judged if share is not None]
    if len(known) == len(records):
        curves["gold accuracy"] = known
    return curves


def draw_progress(path: Path, versions: Sequence[Stills]) -> None:
    """Draw a column per version and a row per prompt, each row from the same noise."""
    picked = np.linspace(0, len(versions) - 1, min(MAX_VERSIONS, len(versions))).round()
    shown = [versions[int(index)] for index in picked]
    rows = len(shown[0].images)
    images = np.concatenate([stills.images for stills in shown])
    columns = [list(range(first * rows, (first + 1) * rows)) for first in range(len(shown))]
    sheet = mosaic(images, columns)
    figure, axes = plt.subplots(
        figsize=(max(4.0, 1.0 * len(shown)), max(3.0, 1.0 * rows)), layout="constrained"
    )
    axes.imshow(sheet, cmap="gray_r", vmin=0, vmax=255)
    width = images.shape[-1] + 1
    places = [(column + 0.5) * width for column in range(len(shown))]
    axes.set_xticks(places, [str(stills.version) for stills in shown], fontsize=9)
    axes.set_yticks([])
    axes.set_xlabel("optimizer steps", fontsize=9)
    axes.tick_params(length=0)
    figure.savefig(path, dpi=150)
    plt.close(figure)
