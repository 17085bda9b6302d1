"""Shows how far an evaluation is: as a bar on a terminal, otherwise as a line."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class EvaluationBar:
    def __init__(self, console: Console) -> None:
        self._console = console
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
