"""Dead letters in words: why they are there, what has become of them, and what helps."""

import base64
import time
from collections import Counter
from collections.abc import Sequence

from digenrl.reading.wording import KINDS, step_of
from services.scheduler.shell.api_letters import DeadLetterDetail, DeadLetterView
from services.scheduler.shell.api_models import RunView
from shared.errors import ContractError
from shared.messages.codec import decode

FIRST_LINE = 160


def reasons(letters: Sequence[DeadLetterView]) -> list[tuple[str, int]]:
    """Return each reason, the most frequent first, and how many letters have it."""
    return Counter(each.reason for each in letters).most_common()


def advice(run: RunView) -> str:
    """Return what an operator can do about work that fails, with the commands."""
    retry = f"`digenrl dlq retry {run.run} --all --resume`"
    if run.phase != "running":
        return f"fix the cause, then retry: {retry}"
    if run.pause_at_failure:
        return "the run will be paused as soon as an attempt fails"
    return f"to fix the cause and retry: `digenrl pause {run.run} --at-failure`, then {retry}"


def summary(letters: Sequence[DeadLetterView], run: RunView | None) -> list[str]:
    """Return a line for each reason of open letters, and what an operator can do.

    Args:
        run: None of a run that is not in progress.
    """
    lines = [f"{number:6d}  {_first_line(reason)}" for reason, number in reasons(letters)]
    return [*lines, advice(run)] if letters and run is not None else lines


def line(letter: DeadLetterView) -> str:
    """Return a letter as one line of a table, with what has become of its work."""
    what, why = _work(letter) or letter.subject, _first_line(letter.reason)
    text = f"{letter.number:6d}  {letter.state:8} {KINDS[letter.kind]:14}  {what}: {why}"
    return f"{text} [{letter.outcome}]" if letter.outcome else text


def detail(letter: DeadLetterDetail) -> list[str]:
    """Return a letter with its message, one field per line."""
    data = base64.b64decode(letter.data)
    try:
        message = decode(data).model_dump_json(by_alias=False)
    except ContractError:
        message = data.decode(errors="backslashreplace")
    shown = {
        "number": letter.number, "state": letter.state, "outcome": letter.outcome,
        "kind": KINDS[letter.kind], "work": _work(letter), "reason": letter.reason,
        "found": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.found)),
        "subject": letter.subject, "message": message,
    }  # fmt: skip
    return [f"{name}: {value}" for name, value in shown.items() if value]


def _work(letter: DeadLetterView) -> str:
    work = letter.work
    if work is None:
        return ""
    part = f", from sample {work.first_sample} on" if work.first_sample else ""
    return f"{step_of(work.batch)}, group {work.group}{part}"


def _first_line(text: str) -> str:
    return " ".join(text.split())[:FIRST_LINE]
