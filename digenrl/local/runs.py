"""Finds a run by its name, its folder, or its prefix in a store.

A folder of `digenrl up` may be renamed or moved: its recipe.json names the prefix of its objects.
"""

import fcntl
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from shared.errors import UserError

RECIPE_JSON = "recipe.json"
DEFAULT = Path("runs")
STORE_NOTE = Path("keys", "store.json")
"""File in a run's folder: which process has started its store, whether that is `digenrl up`, and
the variables by which others find it."""


class RunInProgress(UserError):
    """Raised when another process holds the lock of a run."""


def lock_run(runs: Path, name: str) -> TextIO:
    """Lock a run until the file is closed; raises RunInProgress if the lock is taken."""
    runs.mkdir(parents=True, exist_ok=True)
    lock = (runs / f".{name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RunInProgress(
            f"run.name: the run {name!r} is in progress in another process, which starts, ends or "
            "reads it; wait for its end, or stop it"
        ) from error
    return lock


def in_progress(folder: Path) -> bool:
    """Whether a `digenrl up` of this host runs what is in ``folder``, and not only reads it."""
    try:
        process, is_live, _ = json.loads((folder / STORE_NOTE).read_text())
        os.kill(process, 0)
        lock_run(folder.parent, folder.name).close()
    except RunInProgress:
        return bool(is_live)
    except (OSError, ValueError):
        pass
    return False


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    """The run as a command line names it."""
    id: str
    """Prefix of its objects in the store."""
    folder: Path
    """Folder of its results; of a run of `digenrl up`, of everything."""
    is_local: bool = False
    """Whether the folder holds its store."""
    store_url: str = ""
    """Store that a prefix names."""

    def command(self, verb: str, *words: str) -> str:
        """Return a command of this run that works from this working folder, ready to be pasted."""
        is_default = (runs_folder() / self.folder.name).resolve() == self.folder.resolve()
        place = self.folder.name if is_default else str(self.folder)
        return shlex.join(["digenrl", verb, place if self.is_local else self.name, *words])


def runs_folder() -> Path:
    """Return the folder with the runs of `digenrl up`, unless an option names another."""
    return Path(os.environ.get("DIGENRL_RUNS") or DEFAULT)


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs, the one that was started last first."""
    found = [path for path in folder.glob(f"*/{RECIPE_JSON}") if path.is_file()]
    return [path.parent for path in sorted(found, key=lambda each: -each.stat().st_mtime)]


def find_run(given: str, runs: Path, *, reads: bool = False) -> Run:
    """Return the run that a command names; for one that only reads, by default the newest.

    Raises:
        UserError: if there is no such run, or none is named and several could be meant.
    """
    given = given or os.environ.get("DIGENRL_RUN", "") or _default(runs, reads=reads)
    store, _, last = given.rstrip("/").rpartition("/")
    if "://" in store:
        return Run(given, _prefix(last, given), runs / last, store_url=store)
    found = run_in_folder(given, runs) if "/" in given or not _names_store() else None
    return found or Run(given, _prefix(given, given), runs / given)


def run_in_folder(given: str, runs: Path) -> Run | None:
    """Return a run by its folder, or by the name of its folder in ``runs``; None if it has none."""
    for path in (*([] if "/" in given else [runs / given]), Path(given).resolve()):
        if not given or not (path / RECIPE_JSON).is_file():
            continue
        if (path / "commits").is_dir():  # a prefix in a store that is a folder
            url = path.resolve().parent.as_uri()
            return Run(given, _prefix(path.name, given), runs / path.name, store_url=url)
        return Run(given, _id_in(path), path, is_local=True)
    return None


def _default(runs: Path, *, reads: bool) -> str:
    known = [] if _names_store() else [each.name for each in runs_in(runs)]
    if known and (reads or len(known) == 1):
        return known[0]
    which = f"one of {', '.join(sorted(known))}" if known else f"{runs}/ holds none"
    raise UserError(f"RUN: name the run ({which}), its folder, or its prefix in a store")


def _names_store() -> bool:
    """Whether the environment names the store of all runs that are named without a folder."""
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
