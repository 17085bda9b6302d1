"""Waits for what operators have asked of a run, and says meanwhile for what."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from digenrl.dead_letters import Desk
from digenrl.letter_book import Book, line_of
from services.scheduler.shell.api_models import RunView, WorkerView

EVERY_S = 0.5
HEARD_S = 5.0
"""Seconds in which a request is carried out that was accepted."""
Say = Callable[[str], object]


class HasRun(Protocol):
    def get_run(self) -> RunView: ...


class HasWorkers(Protocol):
    def list_workers(self) -> Sequence[WorkerView]: ...


def until_drained(client: HasWorkers, names: Sequence[str], say: Say) -> list[str]:
    """Return a line for each of these workers once it has no work, is gone, or was given work
    again."""
    told: list[str] = []
    asked = time.monotonic()
    while True:
        drain = {each.worker: each.drain for each in client.list_workers() if each.worker in names}
        is_heard = time.monotonic() > asked + HEARD_S
        under_way = {"draining"} if is_heard else {"draining", "no"}
        left = [name for name in names if drain.get(name) in under_way]
        if not left:
            became = {"drained": "drained, has no work", "no": "was given work again meanwhile"}
            return [f"{name}: {became.get(drain.get(name, ''), 'is gone')}" for name in names]
        if left != told:
            say(f"waits until {', '.join(left)} {'has' if len(left) == 1 else 'have'} finished")
            told = left
        time.sleep(EVERY_S)


def until_paused(client: HasRun, say: Say) -> RunView:
    """Return once the run does not go on any more, or its pause at a failure was called off."""
    told = -1
    while True:
        run = client.get_run()
        if run.phase != "running" or not run.pause_at_failure:
            return run
        if run.step != told:
            say(f"step {run.step} of {run.steps}; waits until something fails")
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
