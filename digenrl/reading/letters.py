"""Dead letters in words: why they are there, what has become of them, and what helps."""

import base64
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from digenrl.reading.wording import KINDS, cause, step_of
from shared.errors import ContractError
from shared.messages.codec import decode

Letter = Mapping[str, Any]
"""A letter as `/v1/dead-letters` has it."""
FIRST_LINE = 160
MAX_COUNTED_REASONS = 5
"""Reasons that are counted on the page."""
PER_PAGE = 50
"""Letters of a page."""
MIN_QUIET_S = 60.0
"""Seconds after the newest letter from which what failed seems to be fixed."""
RAISED_AT = re.compile(r"\(([^()]+\.py), line (\d+)\)\Z")
"""The line of a scorer's own file at the end of a reason."""


def is_useful(letter: Letter) -> bool:
    """Return whether a retry may help."""
    return letter["state"] == "open" and not letter["outcome"]


def shown_letters(letters: Sequence[Letter], *, every: bool) -> dict[str, Any]:
    """Return what the page shows of letters, the newest first; ``every``: of all of them."""
    wanted = [each for each in letters if every or _matters(each)]
    opened = [each for each in letters if each["state"] == "open"]
    return {
        "letters": [{**each, "reason": cause(each["reason"])} for each in wanted[:PER_PAGE]],
        "older": wanted[PER_PAGE - 1]["number"] if len(wanted) > PER_PAGE else None,
        "reasons": _causes(opened).most_common(MAX_COUNTED_REASONS), "fixes": fixes(letters),
        "useful": [each["number"] for each in letters if is_useful(each)], "every": every,
    }  # fmt: skip


def _matters(letter: Letter) -> bool:
    return letter["state"] == "open" or (
        letter["state"] == "retried" and not letter["outcome"].startswith("failed again")
    )


def reasons(letters: Sequence[Letter]) -> list[str]:
    """Return a line for each reason, the most frequent first: how many letters have it, and the
    newest of them."""
    newest = {cause(each["reason"]): each["number"] for each in reversed(letters)}
    return [
        f"{number:6d}  newest {newest[why]}: {_first_line(why)}"
        for why, number in _causes(letters).most_common()
    ]


def _causes(letters: Sequence[Letter]) -> Counter[str]:
    return Counter(cause(each["reason"]) for each in letters)


def fixes(letters: Sequence[Letter]) -> list[str]:
    """Return which lines of scorers' own files are to be fixed before a retry of open letters."""
    opened = (each["reason"].strip() for each in letters if each["state"] == "open")
    found = map(RAISED_AT.search, opened)
    return [
        f"first fix what makes {file} line {line} fail. A change of the file itself takes effect "
        "in a new run, or, behind serve-scorer, when that is started again"
        for file, line in dict.fromkeys(each.groups() for each in found if each)
    ]


def advice(run: Mapping[str, Any], letters: Sequence[Letter]) -> list[str]:
    """Return what an operator can do about what fails, with the commands; ``run``: `/v1/run`."""
    name, phase = run["run"], run["phase"]
    retry, pause = f"`digenrl dlq retry {name} --all", f"`digenrl pause {name} --at-failure`"
    opened = [each for each in letters if each["state"] == "open"]
    if any(map(is_useful, opened)) and phase != "running":
        resume = " --resume" if phase in ("paused", "stopped") else ""
        return [*fixes(letters), f"once it is fixed: {retry}{resume}`"]
    if phase == "paused":
        return [f"nothing of the open batch has failed: {pause}, then `digenrl resume {name}`"]
    if opened and all(each["outcome"] and each["kind"] != "failed" for each in opened):
        return [f"a retry helps none of the open letters: `digenrl dlq drop {name} --all`"]
    newest = max((each["found"] for each in letters), default=0.0)
    if phase != "running" or (not opened and newest < time.time() - MIN_QUIET_S):
        return []
    return [f"to fix what fails, and retry it: {pause}, then {retry} --resume`", *fixes(letters)]


def line(letter: Letter) -> str:
    """Return a letter as one line of a table, with what has become of its work.

    >>> line({"number": 3, "state": "open", "kind": "failed", "subject": "dg.x.evt.y",
    ...     "work": {"batch": 1, "group": 2, "first_sample": None}, "reason": "no", "outcome": ""})
    '     3  open     attempt failed  step 2 (batch 1), group 2: no'
    """
    what, why = _work(letter) or letter["subject"], _first_line(cause(letter["reason"]))
    text = f"{letter['number']:6d}  {letter['state']:8} {KINDS[letter['kind']]:14}  {what}: {why}"
    return f"{text} [{letter['outcome']}]" if letter["outcome"] else text


def detail(letter: Letter) -> list[str]:
    """Return a letter with its message, one field per line."""
    data = base64.b64decode(letter["data"])
    try:
        message = decode(data).model_dump_json(by_alias=False)
    except ContractError:
        message = data.decode(errors="backslashreplace")
    found = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter["found"]))
    shown = {
        "number": letter["number"], "state": letter["state"], "outcome": letter["outcome"],
        "kind": KINDS[letter["kind"]], "work": _work(letter), "reason": letter["reason"],
        "found": found, "subject": letter["subject"], "message": message,
    }  # fmt: skip
    return [f"{name}: {value}" for name, value in shown.items() if value]


def _work(letter: Letter) -> str:
    work = letter["work"]
    if work is None:
        return ""
    part = f", from sample {work['first_sample']} on" if work["first_sample"] else ""
    return f"{step_of(work['batch'])}, group {work['group']}{part}"


def _first_line(text: str) -> str:
    return " ".join(text.split())[:FIRST_LINE]
