"""Waits for what operators have asked of a run, and says meanwhile for what."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from digenrl.dead_letters import Desk
from digenrl.letter_book import Book, line_of
from services.scheduler.shell.api_models import RunView

EVERY_S = 0.5
Say = Callable[[str], object]


class HasRun(Protocol):
    def get_run(self) -> RunView: ...


def until_paused(client: HasRun, say: Say) -> RunView:
    """Return once the run does not go on any more, or its pause at a failure was called off."""
    told = -1
    while True:
        run = client.get_run()
        if run.phase != "running" or not run.pause_at_failure:
            return run
        if run.step != told:
            say(f"step {run.step} of {run.steps}; waits for samples that cannot be scored")
            told = run.step
        time.sleep(EVERY_S)


def until_known(desk: Desk, run: str, numbers: Sequence[int], say: Say) -> list[str]:
    """Return a line for each letter once it is known what has become of its work: the batch is
    committed, or it has failed again; or once the run does not go on."""
    while True:
        book = Book.read(desk, run, min(numbers))  # what came before tells nothing of them
        letters = [each for each in book.letters if each["number"] in set(numbers)]
        unknown = [each for each in letters if not book.is_known(each)]
        if not unknown or book.now is None or book.now.phase not in ("running", "waiting"):
            return [line_of(each, book.outcome(each)) for each in letters]
        batches = sorted({each["work"]["batch"] for each in unknown})
        say(f"step {book.now.committed}; waits for the commit of batch {batches[0]}")
        time.sleep(EVERY_S)
