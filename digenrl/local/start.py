"""Decides how `digenrl up` starts a run where a folder may hold an earlier one; records the start:
the command line, its libraries and its machine."""

import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from digenrl.local.runs import RECIPE_JSON, read_progress, run_in_folder
from shared.errors import UserError
from shared.process.libraries import processor, versions
from shared.recipe.recipe import Recipe, override, stored_recipe
from shared.release import refusal
from shared.run.files import FileRecord, file_records, matching
from shared.run.run_recipe import FILES, check_same_run

STARTED_JSON = "started.json"
"""File in a run's folder with the record of its start."""
FILES_JSON = "files.json"
"""File in a run's folder with the digests of the model and files that its recipe names."""
RECORDS = TypeAdapter(dict[str, FileRecord])
OPTIONS = ("--resume", "--fresh", "--detach")
"""Options of one start, which the next one does not repeat."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """How a run starts: it continues, or another run begins in its folder."""

    recipe: Recipe
    resumes: bool = False
    kept_as: Path | None = None
    """Folder that an earlier run is renamed to."""
    line: str = ""
    """Description of the earlier run, for people."""


def decide_start(
    folder: Path, recipe: Recipe, typed: Sequence[str], *, resume: bool, fresh: bool
) -> RunStart:
    """Decide how a run starts in ``folder``; nothing is changed.

    Args:
        typed: the command line.
        resume, fresh: whether the command line asks for either.

    Raises:
        UserError: if the earlier run is not finished and cannot continue with this command.
    """
    run, kept_as = run_in_folder(str(folder), folder.parent), _aside(folder)
    if run is None:
        if resume:
            raise UserError(f"--resume: {folder} contains no run; start it without --resume")
        return RunStart(recipe, kept_as=kept_as if folder.exists() else None)
    earlier = read_progress(folder)
    line = f"run {folder.name}: the earlier one ({earlier}) is kept as {kept_as.name}"
    another = RunStart(recipe, kept_as=kept_as, line=line)
    if fresh or (earlier.state == "finished" and not resume):
        return another
    recipe = override(recipe, {"run.name": run.id})
    other = f"`{command_with('--fresh', typed)}` begins another, and keeps it as {kept_as.name}"
    if why := refusal(f"the run {folder.name}", release_of(folder)):
        raise UserError(f"--resume: {why}; {other}")
    stored = _read_stored(folder, other)
    try:
        check_same_run(stored, recipe, same=_same_files(folder, recipe))
    except UserError as error:
        if resume:
            raise
        if not earlier.step:  # it has trained nothing: a mistake was repaired
            return another
        raise UserError(
            f"run.name: {folder.name} is not finished ({earlier}), and this is another recipe: "
            f"{error}. {resume_hint(folder, typed[0])}; {other}"
        ) from error
    line = f"run {folder.name} is not finished ({earlier}), and goes on; --fresh begins another"
    return RunStart(recipe, resumes=True, line="" if resume else line)


def _read_stored(folder: Path, other: str) -> Recipe:
    try:
        return stored_recipe((folder / RECIPE_JSON).read_bytes())
    except ValueError as error:
        raise UserError(
            f"--resume: {folder / RECIPE_JSON} is not a recipe of this release, so the run cannot "
            f"continue; {other}"
        ) from error


def resume_hint(folder: Path, program: str = "digenrl") -> str:
    """Return how the run in ``folder`` continues with its own recipe."""
    words = [program, "up", str(folder / RECIPE_JSON), "--run", str(folder)]
    return f"`{command_with('--resume', words)}` goes on with it"


def command_with(option: str, typed: Sequence[str]) -> str:
    """Return a command line with ``option``, ready to be pasted.

    >>> command_with("--resume", [".venv/bin/digenrl", "up", "my recipe.toml", "--fresh"])
    ".venv/bin/digenrl up 'my recipe.toml' --resume"
    """
    program = [typed[0]]
    if Path(typed[0]).name == "__main__.py":
        program = [sys.executable, "-m", "digenrl"]
    arguments = [argument for argument in typed[1:] if argument not in OPTIONS]
    return shlex.join([*program, *arguments, option])


def _aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return aside


def _same_files(folder: Path, recipe: Recipe) -> set[str]:
    """Return the keys of files that are the same as when the run in ``folder`` began, even if they
    have moved.

    Raises:
        UserError: if files have changed.
    """
    recorded = folder / FILES_JSON
    if not recorded.is_file():
        return set()
    return matching(RECORDS.validate_json(recorded.read_bytes()), file_records(recipe, FILES))


def write_started(folder: Path, recipe: Path, options: Mapping[str, Any]) -> None:
    """Record the start of a run in its folder."""
    started = {
        "recipe": str(recipe.resolve()),
        "options": dict(options),
        "versions": dict(versions()),
        "machine": machine(),
    }
    (folder / STARTED_JSON).write_text(json.dumps(started, indent=1))


def release_of(folder: Path) -> str | None:
    """Return the release that the run in a folder records; None if it records none."""
    try:
        versions = json.loads((folder / STARTED_JSON).read_text())["versions"]
        return str(versions["digenrl"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def machine() -> dict[str, str]:
    """Return what arithmetic depends on of this machine."""
    return {"system": platform.system(), "processor": processor() or platform.machine()}
