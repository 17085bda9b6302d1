"""Finds in the log of a process that has died why it did."""

import json
import re
from pathlib import Path

from digenrl.local.limits import MAX_LOG_TAIL_BYTES

_TRACEBACK = re.compile(r"(Exception Group )?Traceback \(most recent call last\):")
_MARGIN = re.compile(r"^\s*[|+] |^[\s|]*\+-[-+\s\d.]*$")
"""Frame around the lines of an exception in a group."""
_IDENTITY = {"svc", "worker", "run", "ts", "level"}
"""Fields of every event."""


def reason_in(log: Path) -> str:
    """Return the last event, exception or message of a log, in one line."""
    text = log.read_bytes()[-MAX_LOG_TAIL_BYTES:].decode(errors="replace") if log.is_file() else ""
    reason, is_within, is_known = "", False, False
    for line in text.splitlines():
        inner = _MARGIN.sub("", line)
        if _TRACEBACK.match(inner):
            is_within = True
        elif not inner.strip() or (is_within and inner.startswith(" ")):
            continue
        elif is_within or inner.startswith("Fatal Python error: "):
            reason, is_within, is_known = inner, False, True  # what follows is more of the same
        elif (event := _event(line)) or not is_known:
            reason, is_known = event or inner, False
    return reason.strip()[:500] or f"see {log}"


def _event(line: str) -> str:
    """Return the event of a line of JSON with its fields; nothing if the line has none."""
    try:
        fields = json.loads(line)
        event = str(fields.pop("event"))
    except (ValueError, LookupError, AttributeError, TypeError):
        return ""
    details = (f"{name}={each}" for name, each in fields.items() if name not in _IDENTITY)
    return ", ".join([event, *details])
