"""Finds a run by its name, its folder, or its prefix in a store; notes its progress, and where its
services and its store answer, in its folder.

The folder of a local run may be renamed or moved: its recipe.json holds the prefix of its objects.
"""

import contextlib
import fcntl
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from shared.errors import DigenRLError, UserError

RECIPE_JSON = "recipe.json"
DEFAULT = Path("runs")
STORE_NOTE = Path("keys", "store.json")
"""File in a run's folder: the process that started the run's store, whether this process is
`digenrl up`, and the environment variables for connecting to the store."""
STATE_JSON = "state.json"
"""File in a run's folder."""
ACTIVE_STATES, FINAL_STATES = ("waiting", "running", "paused"), ("finished", "stopped", "failed")
Service = Literal["scheduler", "page"]


class RunInProgress(UserError):
    """Another process holds the lock of the run."""


class StoreNote(NamedTuple):
    """Contents of STORE_NOTE."""

    process: int
    is_live: bool
    named: dict[str, str]


def lock_run(runs: Path, name: str) -> TextIO:
    """Lock a run until the returned file is closed.

    Raises:
        RunInProgress: if another process holds the lock.
    """
    runs.mkdir(parents=True, exist_ok=True)
    lock = (runs / f".{name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        note = read_store_note(runs / name)
        cause = "is in progress in another process; wait for its end, or stop it"
        if note is not None and not note.is_live:
            cause = f"is open in `digenrl view` or another command; end its process {note.process}"
        raise RunInProgress(f"run.name: the run {name!r} {cause}") from error
    return lock


def in_progress(folder: Path) -> bool:
    """Whether `digenrl up` on this host is running the run in ``folder``."""
    note = read_store_note(folder)
    if note is None or not note.is_live:
        return False
    try:
        lock_run(folder.parent, folder.name).close()
    except RunInProgress:
        return True
    except OSError:
        pass
    return False


def read_store_note(folder: Path) -> StoreNote | None:
    """Return the note of the process that has started the run's store; None if it has ended."""
    try:
        note = StoreNote(*json.loads((folder / STORE_NOTE).read_text()))
        os.kill(note.process, 0)  # a killed process has left its note
    except (OSError, ValueError, TypeError):
        return None
    return note


@contextlib.contextmanager
def noted_store(folder: Path, named: Mapping[str, str], *, is_live: bool = True) -> Iterator[None]:
    """Note where the store of a run is, for other commands; ``is_live``: the run is in progress."""
    from digenrl.local.secrets.tokens import write_secret  # pydantic takes longer, as below

    write_secret(folder / STORE_NOTE, json.dumps([os.getpid(), is_live, dict(named)]))
    try:
        yield
    finally:
        (folder / STORE_NOTE).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    """The run as the user named it on the command line."""
    id: str
    """Prefix of the run's objects in the store."""
    folder: Path
    """Folder of the run's results; for a local run, also of its store and its logs."""
    is_local: bool = False
    """Whether the folder holds the run's store."""
    store_url: str = ""
    """URL of the store if the user named the run by a URL; otherwise empty."""

    def command(self, verb: str, *words: str) -> str:
        """Return a command about this run that works in the current folder when pasted."""
        is_default = (runs_folder() / self.folder.name).resolve() == self.folder.resolve()
        local_name = self.folder.name if is_default else str(self.folder)
        return shlex.join(["digenrl", verb, local_name if self.is_local else self.name, *words])


def runs_folder() -> Path:
    """Return the default folder of local runs; options can name another folder."""
    return Path(os.environ.get("DIGENRL_RUNS") or DEFAULT)


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of the runs in ``folder``, newest first."""
    recipes = [path for path in folder.glob(f"*/{RECIPE_JSON}") if path.is_file()]
    return [path.parent for path in sorted(recipes, key=lambda each: -each.stat().st_mtime)]


def find_run(given: str, runs: Path, *, reads: bool = False) -> Run:
    """Return the run that a command is about.

    Args:
        given: name, folder or prefix of the run; empty: ``DIGENRL_RUN`` or the default run.
        runs: folder of local runs.
        reads: the command only reads, so that the newest run is the default. Otherwise the
            default is the only run in ``runs``.

    Raises:
        UserError: if there is no such run, or the default is ambiguous.
    """
    given = given or os.environ.get("DIGENRL_RUN", "") or _default(runs, reads=reads)
    store, _, prefix = given.rstrip("/").rpartition("/")
    if "://" in store:
        return Run(given, _prefix(prefix, given), runs / prefix, store_url=store)
    run = run_in_folder(given, runs) if "/" in given or not names_store() else None
    return run or Run(given, _prefix(given, given), runs / given)


def run_in_folder(given: str, runs: Path) -> Run | None:
    """Return the run in the folder ``given`` or in ``runs / given``; None if there is no run."""
    for path in (*([] if "/" in given else [runs / given]), Path(given).resolve()):
        if not given or not (path / RECIPE_JSON).is_file():
            continue
        if (path / "commits").is_dir():  # a prefix in a store that is a folder
            url = path.resolve().parent.as_uri()
            return Run(given, _prefix(path.name, given), runs / path.name, store_url=url)
        return Run(given, _id_in(path), path, is_local=True)
    return None


def _default(runs: Path, *, reads: bool) -> str:
    names = [] if names_store() else [each.name for each in runs_in(runs)]
    if names and (reads or len(names) == 1):
        return names[0]
    choices = f"one of {', '.join(sorted(names))}" if names else f"{runs}/ has no runs"
    raise UserError(f"RUN: name the run ({choices}), its folder, or its prefix in a store")


def names_store() -> bool:
    """Whether the environment names the store of runs that are given by a bare name."""
    secrets = os.environ.get("DIGENRL_SECRETS_DIR")
    is_secret = secrets is not None and (Path(secrets) / "digenrl_store_url").is_file()
    return is_secret or "DIGENRL_STORE_URL" in os.environ


def _prefix(text: str, given: str) -> str:
    from shared.messages.records import token  # pydantic takes longer than a small command

    try:
        return token(text, field="RUN")
    except UserError as error:
        raise UserError(f"RUN: there is no run {given!r}; `digenrl runs` lists them") from error


def _id_in(folder: Path) -> str:
    try:
        return str(json.loads((folder / RECIPE_JSON).read_text())["run"]["name"])
    except (OSError, ValueError, LookupError, TypeError):
        return folder.name


@dataclass(frozen=True, slots=True)
class RunProgress:
    state: str = "interrupted"
    """Phase of the run, or "reporting" from the last step until its report is made."""
    step: int = 0
    """Optimizer steps committed."""
    steps: int | None = None
    """Optimizer steps that the recipe asks for."""
    reward: float | None = None
    """Mean reward of the newest committed batch."""
    failure: str | None = None
    """Reason why the run has failed."""

    @classmethod
    def from_view(cls, run: dict[str, Any]) -> "RunProgress":
        """Return the progress of a run as the scheduler's API shows it."""
        state = "reporting" if run["phase"] == "finished" else run["phase"]
        return cls(state, run["step"], run["steps"], run["reward_mean"], run["failure"])

    def __str__(self) -> str:
        return f"{self.state} at step {self.step}{f' of {self.steps}' if self.steps else ''}"

    def write(self, folder: Path) -> None:
        """Note it at once and whole, as this process may be killed; not on a full disk."""
        fresh = folder / f"{STATE_JSON}.new"
        with contextlib.suppress(OSError):
            fresh.write_text(json.dumps(asdict(self)))
            fresh.replace(folder / STATE_JSON)


def read_progress(folder: Path) -> RunProgress:
    """Return the progress of a run; "interrupted" if it has neither ended nor is in progress."""
    try:
        progress = RunProgress(**json.loads((folder / STATE_JSON).read_text()))
    except (OSError, ValueError, TypeError):
        progress = RunProgress()
    if progress.state in FINAL_STATES or in_progress(folder):
        return progress
    return RunProgress("interrupted", progress.step, progress.steps, progress.reward)


@contextlib.contextmanager
def noted_failure(folder: Path) -> Iterator[None]:
    """Note why the run in ``folder`` fails, if it does."""
    try:
        yield
    except DigenRLError as error:
        replace(read_progress(folder), state="failed", failure=str(error)).write(folder)
        raise


def write_address(folder: Path, url: str, service: Service = "scheduler") -> None:
    """Note the address of a service of the run of `digenrl up` in ``folder``."""
    (folder / f"{service}.url").write_text(url + "\n")


def last_address(folder: Path, service: Service = "scheduler") -> str:
    """Return the address that it had when the run was started last; empty if it had none."""
    try:
        return (folder / f"{service}.url").read_text().strip()
    except OSError:
        return ""
