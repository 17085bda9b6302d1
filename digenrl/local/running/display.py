"""Shows the progress of a run: a live table on a terminal, otherwise a line per step."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from digenrl.reading.facts import RunFacts
from digenrl.reading.reading import RunReading, read
from digenrl.reading.sentences import awaited
from digenrl.reading.wording import clock, describe_shortage, describe_work, figure
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, WorkerView

PIPE_WIDTH = 100_000
SPARKS = "▁▂▃▄▅▆▇█"
COLUMNS = ("worker", "host", "device", "gpu", "does", "version", "done", "busy", "s/sample")


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that prints a path's brackets as they are, and breaks lines on a terminal
    alone: a pipe has no width."""
    console = Console(stderr=stderr, markup=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


@dataclass(slots=True)
class Display:
    """Renders what the scheduler's API reports."""

    console: Console
    url: str
    logs: str
    weighted: bool = False
    """True if samples have weights, because `rollout.weights` differ from the trainer's."""
    lines: bool = False
    """True if stdout carries only the responses of /v1/run, as lines of JSON; the console
    is not stdout then."""
    note: str = "starting"
    rewards: list[float] = field(default_factory=list)
    _shortages: dict[str, str] = field(default_factory=dict)
    """Newest shortage of memory of each worker, as it was shown."""
    _declined: dict[str, str] = field(default_factory=dict)
    """Work that each worker declines, as it was shown."""
    _last_step: int = -1
    _written: RunView | None = None
    _live: Live | None = None
    _load: LoadView | None = None
    """Newest answer about throughput and queues, if it was requested."""
    _progress: Progress = field(
        default_factory=lambda: Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=40), TaskProgressColumn()
        )
    )

    @contextmanager
    def shown(self) -> Iterator[None]:
        self._progress.add_task("step", total=None)
        if self.lines or not self.console.is_terminal:
            yield
            return
        note = Group(Text(self.note))
        with Live(note, console=self.console, refresh_per_second=4) as live:
            self._live = live
            yield
            self._live = None

    @property
    def shows(self) -> bool:
        """True if a table is drawn; otherwise a line per step is printed."""
        return self._live is not None

    def say(self, note: str) -> None:
        self.note = note
        if self._live is None:
            self.console.print(note, highlight=False)
        else:
            self._live.update(Group(Text(note)))

    def tell(self, line: str) -> None:
        """Print a line that stays on the screen."""
        self.console.print(line, highlight=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """Print a warning that stays on the screen."""
        self.console.print(line, style="bold red", highlight=False)

    def update(
        self, run: RunView, workers: Sequence[WorkerView], load: LoadView | None = None
    ) -> None:
        self._load = load or self._load
        self._warn_of_shortages(workers)
        if self.lines and run != self._written:
            self._written = run
            print(run.model_dump_json(), flush=True)  # noqa: T201 -- what was asked for
        stepped = run.step != self._last_step
        if stepped and run.reward_mean is not None and run.step > 0:
            self.rewards.append(run.reward_mean)
        if self._live is not None:
            facts = RunFacts(
                run=run, is_live=True, at=time.time(), workers=workers, load=self._load
            )
            self._live.update(self._render(read(facts), self._share(run)))
        elif stepped and run.step > 0:
            self.console.print(
                f"step {run.step}/{run.steps}  reward {run.reward_mean:.3f}  "
                f"{self._share(run)}{_outlook(run)}",
                highlight=False,
            )
        self._last_step = run.step

    def _share(self, run: RunView) -> str:
        share = run.effective_sample_share if self.weighted else None
        return "" if share is None else f"samples count {share:.0%}  "

    def _warn_of_shortages(self, workers: Sequence[WorkerView]) -> None:
        for worker in workers:
            line = describe_shortage(worker)
            if line and self._shortages.get(worker.worker) != line:
                self._shortages[worker.worker] = line
                self.warn(f"{worker.worker} was out of memory: {line}")
            declined = worker.declines.partition(":")[0]
            if declined != self._declined.get(worker.worker, ""):
                self._declined[worker.worker] = declined
                self.warn(f"{worker.worker} {worker.declines or 'is given all work again'}")

    def _render(self, reading: RunReading, share: str) -> Group:
        [task] = self._progress.task_ids
        self._progress.update(task, completed=reading.step, total=reading.steps)
        reward = reading.reward_mean
        heading = Text.assemble(
            (f"{reading.run}  ", "bold"),
            f"{reading.phase}  reward ",
            (f"{reward:.3f} " if reward is not None else "- ", "green"),
            (sparkline(self.rewards[-40:]), "green"),
            f"  {share}{_eta(reading.eta_seconds)}",
        )
        table = Table(*COLUMNS, box=None, padding=(0, 2))
        for worker in reading.workers:
            table.add_row(*_row(worker))
        alarms = [Text(each, "bold red") for each in reading.alarms]
        footer = Text(f"API {self.url}/docs   logs {self.logs}   Ctrl-C drains and stops", "dim")
        load = [Text(line) for line in (reading.throughput, reading.queues) if line]
        return Group(heading, self._progress, *load, *alarms, table, footer)


def _row(worker: WorkerView) -> tuple[str, ...]:
    pace = worker.seconds_per_sample if worker.service == "rollout" else None
    return (
        worker.worker, worker.host, worker.device, worker.gpu or "-", describe_work(worker),
        "-" if worker.policy_version is None else str(worker.policy_version),
        str(worker.num_done), f"{worker.busy_seconds:.0f} s", "" if pace is None else figure(pace),
    )  # fmt: skip


def sparkline(values: list[float]) -> str:
    """Draw values as a row of bars, scaled to their range."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in values)


def _outlook(run: RunView) -> str:
    """Describe the state of a run after a step; a next batch that waits for generation then is not
    the cause of a delay."""
    if run.phase == "running" and run.waiting_for == "rollout":
        return _eta(run.eta_seconds)
    if run.waiting_for in ("nothing", "operator"):
        return run.phase
    return f"waiting for {awaited(run)}  {_eta(run.eta_seconds)}"


def _eta(seconds: float | None) -> str:
    if seconds is None:
        return "ETA -"
    return f"ETA {clock(seconds)}"
