"""Prints the report of a run: its table, and how far its evaluation is."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from digenrl.report.summary import Summary, schedule_rows
from shared.recipe.recipe import Recipe
from shared.recipe.rewards import PYTHON, ScorerTable
from shared.run.run_recipe import evaluated_on

CLASSIFIER = "digit-probability"
"""Reward whose classifier also gives an accuracy."""
FIELDS = (
    "reward", "proxy_accuracy", "gold_accuracy", "gold_svm_accuracy", "gold_worst_digit",
    "gold_nn", "gold_div",
)  # fmt: skip
"""Fields of `Quality` that the report shows."""

NUMBER_WIDTH = 7
"""Letters of a number that are on one line, however narrow the terminal is."""


def figure_fields(recipe: Recipe) -> dict[str, str]:
    """Return label -> field of `Quality`; labels name the rewards that were trained on."""
    scorers = recipe.reward.scorers
    trained_on = {scorer.type for scorer in scorers}
    classifier = "training classifier" if CLASSIFIER in trained_on else "classifier, not trained on"
    labels = (
        f"training reward: {' + '.join(_scorer(each) for each in scorers)}",
        f"proxy accuracy ({classifier})",
        "gold accuracy (held-out MLP)",
        "gold accuracy (held-out SVM)",
        "gold accuracy, worst digit",
        "nn: distance to real images",
        "div: distance within a digit",
    )
    return dict(zip(labels, FIELDS, strict=True))


def _scorer(scorer: ScorerTable) -> str:
    weight = "" if scorer.weight == 1 else f"{scorer.weight:g} x "
    return f"{weight}{scorer.name if scorer.type == PYTHON else scorer.type}"


def make_table(summary: Summary, rows: Mapping[str, str]) -> Table:
    table = Table(title=f"{summary.run}: {summary.steps} optimizer steps, {summary.wall_s:.0f} s")
    if summary.after is not None:
        evaluated = f"{summary.after.num_samples} samples of {evaluated_on(summary.num_held_out)}"
        table.caption = f"before and after: {evaluated}"
    table.add_column("", overflow="fold")
    raw = summary.after_not_averaged
    for column in ("before", "after", "change", *(["not averaged"] if raw else [])):
        table.add_column(column, justify="right", overflow="fold", min_width=NUMBER_WIDTH)
    versions = [each for each in (summary.before, summary.after, raw or summary.after) if each]
    figures = [
        (label, [getattr(quality, name) for quality in versions])
        for label, name in rows.items() if versions
    ] + [
        (f"gold: {name} (never trained on)", [quality.gold[name] for quality in versions])
        for name in (versions[-1].gold if versions else ())
    ]  # fmt: skip
    for label, (before, after, itself) in figures:
        if before is not None:
            last = [f"{itself:.3f}"] if raw else []
            table.add_row(label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", *last)
    error, share = summary.onpolicy_ratio_error_max, summary.effective_sample_share_min
    table.add_row("largest on-policy |ratio - 1|", "", f"{error:.1e}", "")
    if share is not None:
        table.add_row("smallest effective sample share", "", f"{share:.0%}", "")
    for label, value in [] if summary.schedule is None else schedule_rows(summary.schedule):
        table.add_row(label, "", value, "")
    return table


class EvaluationBar:
    def __init__(self, console: Console, samples_per_prompt: int) -> None:
        self._console, self._samples_per_prompt = console, samples_per_prompt
        self._bars = Progress(
            TextColumn("evaluating {task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("prompts"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def version(self, number: int) -> None:
        """Show that the evaluation of a version begins."""
        name = f"version {number}"
        self._bars.add_task(name, total=None)
        if not self._console.is_terminal:
            self._console.print(f"evaluating {name}", highlight=False)

    def progress(self, done: int, total: int) -> None:
        """Show how many prompts of that version are done. May be called in any thread."""
        self._bars.update(self._bars.task_ids[-1], completed=done, total=total)
        if done == total:
            each = self._samples_per_prompt
            line = f"scoring {total * each} samples (evaluation.samples_per_prompt = {each})"
            self._console.print(line, highlight=False)
