"""Runs cases in as many processes as there are cores for; goes on where it was, since a case that
has its result is done."""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from bench.learning.case import Case, learn, settings
from bench.learning.choices import CHOICES, Choice
from bench.learning.task import TASKS, Task
from bench.stored import write_result
from shared.errors import UserError

RESULTS = Path(__file__).parent / "results"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of the processes that run cases."""


def cases(task: Task, choices: Iterable[Choice], most_seeds: int | None = None) -> list[Case]:
    """Lists cases, every choice's first seed before any second one."""
    chosen = [choice for choice in choices if task.name in choice.tasks]
    rounds = max(len(choice.seeds) for choice in chosen) if chosen else 0
    return [
        Case(task, choice, choice.seeds[number])
        for number in range(min(rounds, most_seeds or rounds))
        for choice in chosen
        if number < len(choice.seeds)
    ]


def wanted(
    *, everything: bool, names: Sequence[str], task: str | None, most_seeds: int | None
) -> list[Case]:
    """Lists the cases that a command asks for: the main table's, or all, or those of some names."""
    chosen = [
        choice
        for choice in CHOICES
        if (choice.name in names if names else everything or choice.is_main)
    ]
    unknown = set(names) - {choice.name for choice in chosen}
    if unknown:
        raise UserError(
            f"--choice: none is called {min(unknown)!r}; bench/learning/choices.py has all"
        )
    tasks = [each for each in TASKS.values() if task in (None, each.name)]
    return [case for each in tasks for case in cases(each, chosen, most_seeds)]


def is_done(case: Case, folder: Path) -> bool:
    """Whether a result is there, and of this choice as it stands."""
    try:
        found = json.loads((folder / case.file).read_text())
    except FileNotFoundError:
        return False
    wanted = json.loads(json.dumps(settings(case)))
    return all(found[key] == value for key, value in wanted.items())


def run_here(task: str, choice: str, seed: int, folder: Path) -> None:
    """Runs one case in this process, and writes its result."""
    case = Case(TASKS[task], next(each for each in CHOICES if each.name == choice), seed)
    began = time.monotonic()
    result = learn(case)
    write_result(folder / case.file, {**result, "wall_seconds": round(time.monotonic() - began, 1)})


def run_all(
    wanted: Sequence[Case], folder: Path, log: Path, *, at_once: int = 2, until: float | None = None
) -> bool:
    """Runs what has no result yet; returns whether all of it went well.

    Args:
        log: gets a line as each case begins and ends.
        until: time (`time.time`) after which no case is begun.
    """
    left = [case for case in wanted if not is_done(case, folder)]
    failed = 0
    _say(log, f"{len(wanted)} cases, {len(left)} to run, {at_once} at a time")
    os.environ.update(ONE_THREAD)
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
        running: dict[Future[None], tuple[Case, float]] = {}
        while left or running:
            while left and len(running) < at_once and not _is_over(until):
                case = left.pop(0)
                _say(log, f"begin {case.name}")
                one = pool.submit(run_here, case.task.name, case.choice.name, case.seed, folder)
                running[one] = case, time.monotonic()
            if not running:
                break
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                case, began = running.pop(each)
                error = each.exception()
                failed += error is not None
                words = "end" if error is None else f"FAILED ({error!r})"
                _say(log, f"{words} {case.name} {time.monotonic() - began:.0f} s")
    _say(log, f"{len(left)} left, {failed} failed")
    return not (left or failed)


def _is_over(until: float | None) -> bool:
    return until is not None and time.time() > until


def _say(log: Path, words: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    line = f"{time.strftime('%H:%M:%S')} {words}\n"
    with log.open("a") as file:
        file.write(line)
    sys.stdout.write(line)
    sys.stdout.flush()
