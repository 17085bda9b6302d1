"""Finds in the log of a process that has died why it did."""

import json
import re
from pathlib import Path

TRACEBACK = "Traceback (most recent call last):"
FATAL = "Fatal Python error: "
READ_BYTES = 1 << 16
"""Bytes at the end of a log that are read."""
MAX_LETTERS = 500
_MARGIN = re.compile(r"^\s*[|+] ")
"""What precedes the lines of an exception in a group."""
_RULE = re.compile(r"^[\s|]*\+-[-+\s\d.]*$")
"""A line between the exceptions of a group."""


def reason_in(log: Path) -> str:
    """Return the last event, exception or message of a log, in one line."""
    try:
        text = log.read_bytes()[-READ_BYTES:].decode(errors="replace")
    except OSError:
        text = ""
    reason, is_within, is_known = "", False, False
    for line in text.splitlines():
        inner = _MARGIN.sub("", line)
        if inner.startswith((TRACEBACK, f"Exception Group {TRACEBACK}")):
            is_within = True
        elif not inner.strip() or _RULE.match(line) or (is_within and inner.startswith(" ")):
            continue
        elif is_within or inner.startswith(FATAL):  # the lines after it are more of the same
            reason, is_within, is_known = inner, False, True
        elif (event := _event(line)) or not is_known:
            reason, is_known = event or inner, False
    return reason.strip()[:MAX_LETTERS] or f"see {log}"


def _event(line: str) -> str:
    """Return the event of a line of JSON with what belongs to it; nothing if the line has none."""
    try:
        fields = json.loads(line)
        event = str(fields.pop("event"))
    except (ValueError, LookupError, AttributeError, TypeError):
        return ""
    told = {name: each for name, each in fields.items() if name not in IDENTITY}
    return ", ".join([event, *(f"{name}={each}" for name, each in told.items())])


IDENTITY = {"svc", "worker", "run", "ts", "level"}
"""Fields of every event."""
