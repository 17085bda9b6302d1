"""Tables and curves of what was learned, for docs/learning.md."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from bench.learning import figures
from bench.learning.choices import CHOICES, Choice
from bench.learning.figures import Result
from bench.learning.task import TASKS, Task

BEGIN = "<!-- written by `python -m bench learning-tables` from bench/learning/results -->"
END = "<!-- end of the tables -->"
BESIDES = ("steps", "gold / svm", "largest nn", "div", "worst", "guards")
CURVES = {
    "base": "#9aa5b1", "lr-6e-3": "#bf8700", "not-shared": "#8250df", "nft": "#d1242f",
    "best": "#1f6feb", "best-20x12": "#54aeff", "best-one-step": "#1a7f37",
}  # fmt: skip
"""Choices whose curves are drawn, and their colours."""


def with_tables(text: str, folder: Path) -> str:
    """Returns a page with its tables written anew from the results of a folder.

    Raises:
        ValueError: if the page does not say where they stand.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    found = "\n\n".join(table(task, folder) for task in TASKS.values() if any_of(task, folder))
    return f"{before}{BEGIN}\n\n{found}\n\n{END}{after}"


def any_of(task: Task, folder: Path) -> bool:
    return bool(figures.read_results(folder, task.name))


def table(task: Task, folder: Path) -> str:
    """Returns the table of a task: a row per choice that has results, as Markdown."""
    found = figures.read_results(folder, task.name)
    goals = task.goal_words
    head = [
        "choice", "seeds", *(f"kFE to {goal}" for goal in goals),
        *(f"CPU s to {goal}" for goal in goals[-1:]), *BESIDES,
    ]  # fmt: skip
    rows = [
        _row(task, choice, found[choice.name])
        for choice in CHOICES
        if choice.name in found and task.name in choice.tasks
    ]
    return "\n".join(
        [f"**{task.title}**", "", _line(head), "|---" * len(head) + "|", *map(_line, rows)]
    )


def _row(task: Task, choice: Choice, results: Sequence[Result]) -> list[str]:
    kept = [figures.guards(each) for each in results]
    name = f"{choice.title} (s)" if any(each["stops"] for each in results) else choice.title
    goal = task.goals[-1]
    return [
        name,
        str(len(results)),
        *(_spread(figures.costs(results, each, figures.units), 1e-3) for each in task.goals),
        _spread(figures.costs(results, goal, figures.seconds)),
        _spread(figures.costs(results, goal, figures.steps)),
        " / ".join(_middle(figures.at_end(results, judge), 3) for judge in ("gold", "svm")),
        _range([each.largest_nn for each in kept]),
        _range([each.smallest_div for each in kept]),
        _range([each.worst_at_end for each in kept]),
        _kept([each.hold(keeps_accuracy=task.keeps_accuracy) for each in kept]),
    ]


def _kept(holds: Sequence[bool]) -> str:
    return "hold" if all(holds) else f"broken in {holds.count(False)}"


def _spread(values: Sequence[float | None], scale: float = 1.0) -> str:
    """Writes the median, and the least and the most; "never" stands for seeds without a value."""
    middle = figures.middle(values)
    said = "never" if middle is None else f"{middle * scale:.1f}"
    known = [each * scale for each in values if each is not None]
    if len(values) == 1 or not known:
        return said
    most = "never" if len(known) < len(values) else f"{max(known):.1f}"
    return f"{said} ({min(known):.1f}–{most})"


def _range(values: Sequence[float]) -> str:
    low, high = (f"{each:.2f}" for each in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def _middle(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def draw(path: Path, folder: Path, task: Task) -> None:
    """Draws held-out accuracy and nn over forward-equivalents: a line per seed of some choices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = figures.read_results(folder, task.name)
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for choice, colour in _drawn(found):
        for number, result in enumerate(found[choice.name]):
            work = [figures.units(each) / 1e3 for each in result["evaluations"]]
            label = choice.title.strip("*") if number == 0 else None
            height = [each["height"] for each in result["evaluations"]]
            distance = [each["nn"] for each in result["evaluations"]]
            panels[0].plot(work, height, color=colour, lw=1.2, alpha=0.8, label=label)
            panels[1].plot(work, distance, color=colour, lw=1.2, alpha=0.8)
    for axes in panels:
        axes.set_xscale("symlog", linthresh=2, linscale=0.4)
        axes.set_xlim(left=0)
        axes.set_xticks(
            [1, 2, 5, 10, 20, 50, 100, 150], ["1", "2", "5", "10", "20", "50", "100", ""]
        )
        axes.set_xlabel("thousands of forward-equivalents")
        axes.grid(alpha=0.25)
    for goal in task.goals:
        panels[0].axhline(goal, color="#57606a", lw=0.8, ls=":")
    panels[0].set_title("held-out accuracy, mean of both judges; a line per seed", fontsize=10)
    panels[0].legend(fontsize=8, loc="lower right")
    panels[1].set_title(
        "distance to real images; it must not pass the base's (dotted)", fontsize=10
    )
    base = next((each[0]["evaluations"][0]["nn"] for each in found.values() if each), None)
    if base is not None:
        panels[1].axhline(base, color="#57606a", lw=0.8, ls=":")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _drawn(found: Mapping[str, Sequence[Result]]) -> Iterator[tuple[Choice, str]]:
    for choice in CHOICES:
        if choice.name in CURVES and choice.name in found:
            yield choice, CURVES[choice.name]
