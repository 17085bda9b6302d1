"""The tables of docs/security.md, made of the descriptions that brokers and services follow."""

from shared.messages.rights import RIGHTS, ROLES
from shared.process.http_access import OPERATIONS
from shared.process.http_access import ROLES as API_ROLES
from shared.run.rights import WRITES


def messages_table() -> str:
    """Return who publishes and who reads each kind of message, as Markdown."""
    rows = [
        (right.kind.__name__, f"`{right.subject}`", right.publishers, right.readers)
        for right in RIGHTS
        if not right.subject.startswith("dg.*.live.")
    ]
    lines = [
        "| message | subject | published by | read by, besides the scheduler |",
        "|---|---|---|---|",
    ]
    for kind, subject, publishers, readers in rows:
        lines.append(f"| {kind} | {subject} | {_names(publishers)} | {_names(readers)} |")
    return "\n".join(lines)


def store_table() -> str:
    """Return how the names begin of what each role writes of a run, as Markdown."""
    lines = ["| role | writes and deletes what begins so, below the run's folder |", "|---|---|"]
    return "\n".join([*lines, *(f"| {role} | {_code(WRITES[role])} |" for role in ROLES)])


def api_table() -> str:
    """Return which operations each role of the HTTP API needs, as Markdown."""
    lines = ["| needs | operations |", "|---|---|"]
    for needs in ("nothing", "code", *API_ROLES):
        found = [operation for operation, each in OPERATIONS.items() if each == needs]
        if found:
            lines.append(f"| {needs} | {_code(found)} |")
    return "\n".join(lines)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _code(words: "tuple[str, ...] | list[str]") -> str:
    return ", ".join(f"`{word}`" for word in words)
