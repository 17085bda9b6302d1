"""Checks a local run, and makes its folder, before anything is started."""

import fcntl
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter

from digenrl.follow.steps import Targets
from digenrl.follow.steps import check_installed as check_targets
from digenrl.hub.dataset import make_own_prompts
from digenrl.local.gpus import Assignment, assign_gpus, visible_gpus
from digenrl.local.inputs import check_inputs
from digenrl.local.keys import Keys, keys_of
from digenrl.local.ports import free_ports, hold_port
from digenrl.local.record import write_started
from digenrl.local.tokens import Tokens, tokens_of
from digenrl.tail.results import check_tail
from shared.errors import Faults, UserError
from shared.models.catalogue import (
    family_of,
    latent_shape,
)
from shared.models.memory import ITEM_BYTES, adapter_bytes, num_weights
from shared.process.port_numbers import check_port
from shared.recipe.networks import frozen_layers
from shared.recipe.recipe import Recipe, implied_values, load_recipe, stored_recipe
from shared.run.files import FileRecord, matching, records_of
from shared.run.retention import stored_bytes, trajectory_bytes
from shared.run.run_recipe import FILES, check_same_run

FILES_JSON = "files.json"
"""File in a run's folder with the digests of the model and files that its recipe names."""

RECORDS = TypeAdapter(dict[str, FileRecord])

NEEDED_BYTES = 1 << 30
"""Space for everything but weights and checkpoints; JetStream's limit is the largest part."""


def ignore(_: str) -> None:
    """Hears what nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Request:
    """Holds what the user asked of `digenrl up`."""

    recipe: Path
    options: Mapping[str, Any]
    """Values of keys, by their dotted names, over those of the recipe."""
    resume: bool
    port: int
    runs: Path
    targets: Targets = field(default_factory=Targets)
    """Targets for the metrics of its steps."""
    again: str = "digenrl up RECIPE --resume"
    """Command that continues the run."""
    say: Callable[[str], None] = ignore
    """Hears what is prepared, such as prompts of the user's own files."""


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Describes a run that is ready to start: its folder exists and is locked."""

    recipe: Recipe
    folder: Path
    api_port: int
    keys: Keys
    tokens: Tokens
    resumed: bool
    targets: Targets
    again: str
    gpus: Assignment
    lock: TextIO
    """Lock that is held as long as this process lives."""


def prepare(request: Request) -> LocalRun:
    """Check everything, then make the run's folder.

    An earlier run of the same name is renamed unless it is resumed; it is never deleted.

    Raises:
        UserError: for the first problem, with its remedy.
    """
    check_port(request.port)
    recipe = load_recipe(request.recipe, request.options)
    if make_own_prompts(recipe, request.say):
        recipe = load_recipe(request.recipe, request.options)
    for each in implied_values(recipe):
        if each.is_overridden:
            request.say(each.line)
    check_inputs(recipe, begun=request.resume)
    check_targets(request.targets)
    if not request.resume:
        check_tail(recipe, request.recipe, request.runs)
    gpus = check_machine(recipe, request.runs, 0 if request.resume else versions_bytes(recipe))
    if request.port and not hold_port(request.port):
        raise UserError(f"--port: {request.port} is occupied; choose another, or 0 for a free one")
    folder = request.runs / recipe.run.name
    if request.resume:
        _check_resumable(folder, recipe)
    lock = lock_run(request.runs, recipe.run.name)
    if not request.resume and folder.exists():
        _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "recipe.json").write_text(recipe.model_dump_json(indent=1))
    write_started(folder, request.recipe, request.options)
    (folder / FILES_JSON).write_bytes(RECORDS.dump_json(records_of(recipe, FILES), indent=1))
    return LocalRun(
        recipe=recipe,
        folder=folder,
        api_port=request.port or free_ports(1)[0],
        keys=keys_of(folder),
        tokens=tokens_of(folder),
        resumed=request.resume,
        targets=request.targets,
        again=request.again,
        gpus=gpus,
        lock=lock,
    )


def resume_command(typed: Sequence[str]) -> str:
    """Return the command line that continues the run of this one, ready to be pasted.

    >>> resume_command([".venv/bin/digenrl", "up", "my recipe.toml", "--seed", "1"])
    ".venv/bin/digenrl up 'my recipe.toml' --seed 1 --resume"
    """
    program = [typed[0]]
    if Path(typed[0]).name == "__main__.py":
        program = [sys.executable, "-m", "digenrl"]
    arguments = [argument for argument in typed[1:] if argument != "--resume"]
    return shlex.join([*program, *arguments, "--resume"])


def check_machine(recipe: Recipe, runs: Path, versions: int) -> Assignment:
    """Return the GPUs of this machine that the run's processes use.

    Args:
        versions: bytes of the weights and checkpoints that are kept at the same time.

    Raises:
        UserError: if the machine has too few GPUs, or too little space for a run.
    """
    faults, found = Faults(), Assignment({})
    with faults.collected():
        found = assign_gpus(recipe, () if recipe.model.device == "cpu" else visible_gpus())
    with faults.collected():
        _check_space(runs, versions)
    faults.raise_any()
    return found


def _check_space(runs: Path, versions: int) -> None:
    needed = NEEDED_BYTES + versions
    existing = next(path for path in (runs, *runs.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"--runs: {existing} is not writable")
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"--runs: {existing} has {free >> 20} MiB of free space, but a run needs "
            f"{needed >> 20}, of which {versions >> 20} are for weights, checkpoints and "
            "trajectories; free some space, choose another folder, or keep fewer versions "
            "(run.keep_last, run.keep_every)"
        )


def _check_resumable(folder: Path, recipe: Recipe) -> None:
    stored = folder / "recipe.json"
    if not stored.is_file():
        raise UserError(f"--resume: {folder} contains no run; start it without --resume")
    check_same_run(_stored(stored), recipe, same=_same_files(folder, recipe))


def _same_files(folder: Path, recipe: Recipe) -> set[str]:
    """Return the keys of files that are the same as when the run in ``folder`` began, even if they
    have moved.

    Raises:
        UserError: if files have changed.
    """
    recorded = folder / FILES_JSON
    if not recorded.is_file():
        return set()
    return matching(RECORDS.validate_json(recorded.read_bytes()), records_of(recipe, FILES))


def _stored(path: Path) -> Recipe:
    try:
        return stored_recipe(path.read_bytes())
    except ValueError as error:
        raise UserError(f"--resume: {path} is not a recipe of this release") from error


class InProgress(UserError):
    """Raised when another process holds the lock of a run."""


def lock_run(runs: Path, name: str) -> TextIO:
    """Lock a run until the file is closed; raises InProgress if another process holds the lock."""
    runs.mkdir(parents=True, exist_ok=True)
    lock = (runs / f".{name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InProgress(
            f"run.name: the run {name!r} is in progress in another process; wait for its end, or "
            "stop it"
        ) from error
    return lock


def _set_aside(folder: Path) -> None:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)


def versions_bytes(recipe: Recipe) -> int:
    """Return the bytes of all weights, checkpoints and trajectories that are kept at the same time,
    without media and conditions.

    Raises:
        UserError: if the model's folder is invalid.
    """
    folder, lora = recipe.model.folder, recipe.model.lora
    if recipe.model.trained == "full":
        trained = num_weights(folder, "transformer") * ITEM_BYTES["float32"]
    else:
        targets = lora.targets or family_of(folder).lora_targets
        trained = adapter_bytes(folder, lora.rank, targets, frozen_layers(recipe))
    model = recipe.model
    shape = latent_shape(folder, height=model.height, width=model.width, frames=model.frames)
    return stored_bytes(recipe, trained) + trajectory_bytes(recipe, shape)
