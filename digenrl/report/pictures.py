"""Draws the curves of a run and its evaluations, and its samples in galleries."""

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

from digenrl.evaluation.media import Pixels
from digenrl.evaluation.records import EvaluationRecord
from digenrl.report.stills import SampleSet, Stills
from digenrl.report.summary import Summary
from shared.run.commits import CommitRecord
from shared.run.run_recipe import evaluated_on

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

plt.rcParams["text.parse_math"] = False  # prompts may have dollar signs

BARS = {
    "reward": "reward", "proxy_accuracy": "proxy", "gold_accuracy": "gold MLP",
    "gold_svm_accuracy": "gold SVM", "gold_worst_digit": "worst digit",
}  # fmt: skip
"""Figures of `Quality` that are drawn as bars, with their names there."""
EDITS = 15
"""Rows of a gallery of edited images."""
BEFORE, AFTER, GOLD, WRONG = "#9aa5b1", "#1f6feb", "#bf8700", "#d1242f"
GALLERY_COLUMNS = 10
GALLERY_ROWS = 8
TRAINED = "training reward"
MAX_VERSIONS = 12
"""Largest number of columns in the picture of the progress."""


def draw_curve(path: Path, chain: list[CommitRecord], summary: Summary) -> None:
    """Draw the mean training reward per step with its spread, and the figures before and after."""
    records = [record for record in chain if record.trained]
    steps = np.array([record.policy.version for record in records])
    groups = [
        [np.mean([r for r in group.rewards if r is not None]) for group in record.trained
         if group.dropped is None]
        for record in records
    ]  # fmt: skip
    means = np.array([np.mean(group) for group in groups])
    spread = np.array([np.std(group) for group in groups])

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4), width_ratios=(2, 1), layout="constrained"
    )
    left.fill_between(steps, means - spread, means + spread, color=AFTER, alpha=0.15, lw=0)
    left.plot(steps, means, color=AFTER, lw=2)
    left.set(xlabel="optimizer step", ylabel="training reward")
    if min(means - spread) >= 0 and max(means + spread) <= 1:
        left.set(ylim=(0, 1.02))
    left.set_title(f"{summary.run}: mean reward per step (band: spread over prompts)", fontsize=10)
    left.grid(alpha=0.25)
    _draw_accuracies(right, summary)
    _save(figure, path)


def _draw_accuracies(axes: Any, summary: Summary) -> None:
    measured = [quality for quality in (summary.before, summary.after) if quality is not None]
    pairs = {name: [getattr(each, field) for each in measured] for field, name in BARS.items()}
    complete = {name: pair for name, pair in pairs.items() if pair and None not in pair}
    places = np.arange(len(complete))
    for offset, colour, label in ((-0.2, BEFORE, "before"), (0.2, AFTER, "after")):
        heights = [pair[label == "after"] or 0.0 for pair in complete.values()]
        bars = axes.bar(places + offset, heights, 0.38, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(places, list(complete), fontsize=8, rotation=20)
    if all(0 <= (value or 0.0) <= 1 for pair in complete.values() for value in pair):
        axes.set_ylim(0, 1.15)
    axes.set_title(f"{evaluated_on(summary.num_held_out)}, same seeds", fontsize=10)
    axes.legend(fontsize=8, loc="upper left", ncols=2)


def draw_gallery(path: Path, before: SampleSet, after: SampleSet) -> None:
    """Draw samples of the same prompts and noise, before and after, with one column per prompt.
    Frames mark what the held-out classifier takes for something else."""
    if after.sources is not None:
        _draw_edits(path, before, after, after.sources)
        return
    chosen = _columns(before.prompts)
    figure, pair = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
    for axes, side_of, title in zip(pair, (before, after), ("before", "after"), strict=True):
        labels = [caption(side_of.prompts[rows[0]], 12, lines=3) for rows in chosen]
        _show_mosaic(axes, side_of.stills, chosen, labels)
        axes.tick_params(labelsize=7)
        _frame_wrong(axes, side_of, chosen)
        axes.set_title(title, fontsize=12)
    _save(figure, path)


def caption(prompt: str, width: int, lines: int = 1) -> str:
    """Return a prompt as a picture shows it: shortened to ``lines`` lines of ``width`` letters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in prompt)
    return "\n".join(textwrap.wrap(plain, width, max_lines=lines, placeholder="…")) or "(empty)"


def _save(figure: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a letter that no font has is shown as a box
        figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _draw_edits(path: Path, before: SampleSet, after: SampleSet, sources: Pixels) -> None:
    """Draw a row for each of the first samples of several prompts and images: what is edited, and
    what becomes of it before and after."""
    chosen = _edits(before.prompts, sources)
    sides = {"source": sources, "before": before.stills, "after": after.stills}
    height, width = sources.shape[-2:]
    figure, axes = plt.subplots(figsize=(9, max(2.5, 0.55 * len(chosen))), layout="constrained")
    blocks = [mosaic(images, [chosen]) for images in sides.values()]
    axes.imshow(np.concatenate(blocks, axis=1), cmap="gray_r", vmin=0, vmax=255)
    places = [(number + 0.5) * (width + 1) for number in range(len(sides))]
    axes.set_xticks(places, list(sides), fontsize=11)
    axes.xaxis.tick_top()
    rows = [(number + 0.5) * (height + 1) for number in range(len(chosen))]
    axes.set_yticks(rows, [caption(before.prompts[index], 60) for index in chosen], fontsize=9)
    axes.tick_params(length=0)
    _save(figure, path)


def _edits(prompts: list[str], sources: Pixels) -> list[int]:
    """List the samples that are shown: of each prompt the first of unlike images, prompts in
    turn."""
    of_prompt: dict[str, list[int]] = {}
    pairs: set[tuple[str, bytes]] = set()
    for index, prompt in enumerate(prompts):
        which = (prompt, sources[index].tobytes())
        if which not in pairs:
            pairs.add(which)
            of_prompt.setdefault(prompt, []).append(index)
    each = max(1, EDITS // max(1, len(of_prompt)))
    return [index for indices in of_prompt.values() for index in indices[:each]][:EDITS]


def _frame_wrong(axes: Any, side_of: SampleSet, columns: list[list[int]]) -> None:
    if side_of.right is None:
        return
    height, width = side_of.stills.shape[-2:]
    for x, column in enumerate(columns):
        for y, index in enumerate(column):
            if not side_of.right[index]:
                corner = (x * (width + 1) - 0.5, y * (height + 1) - 0.5)
                frame = Rectangle(corner, width, height, fill=False, edgecolor=WRONG, lw=2)
                axes.add_patch(frame)


def _columns(prompts: list[str]) -> list[list[int]]:
    """List the samples of each column: a column per prompt, for the first prompts."""
    first_of: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        first_of.setdefault(prompt, []).append(index)
    return [rows[:GALLERY_ROWS] for rows in list(first_of.values())[:GALLERY_COLUMNS]]


def _show_mosaic(
    axes: Any, images: Pixels, columns: list[list[int]], labels: Sequence[str]
) -> None:
    """Show the mosaic of these columns, with a label below each."""
    axes.imshow(mosaic(images, columns), cmap="gray_r", vmin=0, vmax=255)
    places = [(column + 0.5) * (images.shape[-1] + 1) for column in range(len(columns))]
    axes.set_xticks(places, labels, fontsize=9)
    axes.set_yticks([])
    axes.tick_params(length=0)


def mosaic(images: Pixels, columns: list[list[int]]) -> npt.NDArray[np.uint8]:
    """Arrange images (n, C, H, W) in columns with white lines between; digits are dark on light."""
    channels, height, width = images.shape[1:]
    rows = max(len(column) for column in columns)
    blank = 0 if channels == 1 else 255
    sheet = np.full(
        (rows * (height + 1), len(columns) * (width + 1), channels), blank, dtype=np.uint8
    )
    for x, column in enumerate(columns):
        for y, index in enumerate(column):
            top, left = y * (height + 1), x * (width + 1)
            sheet[top : top + height, left : left + width] = images[index].transpose(1, 2, 0)
    return sheet[..., 0] if channels == 1 else sheet


def draw_evaluations(path: Path, records: Sequence[EvaluationRecord]) -> None:
    """Draw the training reward and, below it, each gold reward; mark versions with an alarm."""
    curves = make_curves(records)
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
    _save(figure, path)


def make_curves(records: Sequence[EvaluationRecord]) -> dict[str, list[float]]:
    """Return the curves to draw, for the figures that every record has."""
    curves = {TRAINED: [record.quality.reward for record in records]}
    for name in records[0].quality.gold:
        if all(name in record.quality.gold for record in records):
            curves[f"gold: {name}"] = [record.quality.gold[name] for record in records]
    judged = [record.quality.gold_accuracy for record in records]
    shares = [share for share in judged if share is not None]
    if len(shares) == len(records):
        curves["gold accuracy"] = shares
    return curves


def draw_progress(path: Path, versions: Sequence[Stills]) -> None:
    """Draw a column per version and a row per prompt, each row from the same noise."""
    picked = np.linspace(0, len(versions) - 1, min(MAX_VERSIONS, len(versions))).round()
    shown = [versions[int(index)] for index in picked]
    rows = len(shown[0].images)
    images = np.concatenate([stills.images for stills in shown])
    columns = [list(range(first * rows, (first + 1) * rows)) for first in range(len(shown))]
    figure, axes = plt.subplots(
        figsize=(max(4.0, 1.0 * len(shown)), max(3.0, 1.0 * rows)), layout="constrained"
    )
    _show_mosaic(axes, images, columns, [str(stills.version) for stills in shown])
    axes.set_xlabel("optimizer steps", fontsize=9)
    _save(figure, path)
