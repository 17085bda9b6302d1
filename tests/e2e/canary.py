"""Looks for the secrets of a run where nobody may find them."""

import contextlib
from pathlib import Path

import psutil

from digenrl.local.secrets.tokens import KEYS
from tests.e2e.local_run import LocalRun

ASKED = (
    "/livez", "/readyz", "/metrics", "/v1/run", "/v1/workers", "/v1/batches", "/v1/versions",
    "/v1/tag", "/openapi.json", "/docs", "/v1/batches/x", "/nowhere",
)  # fmt: skip


def secrets_of(run: LocalRun) -> set[str]:
    """The secrets of all roles and the tokens of people."""
    keys = run.folder / KEYS
    files = [*keys.glob("*/secret"), *keys.glob("*.token")]
    found = {path.read_text().strip() for path in files}
    assert len(found) >= 10
    return found


def said_by(run: LocalRun) -> dict[str, str]:
    """What the run says to others, by where: answers, logs, command lines, environments."""
    said = {path: run.ask(path).text for path in ASKED}
    said |= {str(path): path.read_text(errors="replace") for path in run.folder.glob("logs/*")}
    main = psutil.Process(run.process.pid)
    for process in [main, *main.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            where = f"/proc/{process.pid}"
            said[f"{where}/cmdline {process.name()}"] = " ".join(process.cmdline())
            said[f"{where}/environ"] = Path(where, "environ").read_text(errors="replace")
    return said


def check_no_secret_is_said(run: LocalRun) -> None:
    secrets, said = secrets_of(run), said_by(run)
    assert len(said) > 2 * 9 + len(ASKED)
    assert [where for where, text in said.items() if any(each in text for each in secrets)] == []
