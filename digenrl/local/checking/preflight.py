"""Checks a local run, and makes its folder, before anything is started."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from digenrl.follow.steps import MetricTargets
from digenrl.follow.steps import check_installed as check_targets
from digenrl.hub.dataset import make_own_prompts
from digenrl.local.checking.inputs import check_inputs, skipped_rows
from digenrl.local.limits import MAX_GARBAGE, MAX_STORED_PER_S, MIN_FREE_BYTES, VACUUM_S
from digenrl.local.processes.assignment import Assignment, assign_gpus
from digenrl.local.processes.gpus import visible_cards
from digenrl.local.processes.ports import free_ports, hold_port
from digenrl.local.runs import lock_run, run_in_folder
from digenrl.local.secrets.keys import Keys, load_keys
from digenrl.local.secrets.tokens import Tokens, load_tokens
from digenrl.local.start import FILES_JSON, RECORDS, command_with, decide_start, write_started
from digenrl.planning.entries import Processes
from shared.errors import Faults, UserError
from shared.models.catalogue import find_family, latent_shape
from shared.models.memory import ITEM_BYTES, adapter_bytes, num_weights
from shared.recipe.networks import frozen_layers
from shared.recipe.recipe import Recipe, implied_values, load_recipe
from shared.run.files import file_records
from shared.run.retention import batch_bytes, stored_bytes, trajectory_bytes, version_bytes
from shared.run.run_recipe import FILES


def ignore(_: str) -> None:
    """Ignores lines."""


@dataclass(frozen=True, slots=True)
class UpRequest:
    """Holds what the user asked of `digenrl up`."""

    recipe: Path
    options: Mapping[str, Any]
    """Values of keys, by their dotted names, over the recipe's."""
    resume: bool
    port: int
    runs: Path
    run: str = ""
    """Name of the run, over the recipe's; or an earlier run, by its name or folder."""
    fresh: bool = False
    """True starts a new run even if an earlier run is unfinished."""
    targets: MetricTargets = field(default_factory=MetricTargets)
    """Targets for the metrics of its steps."""
    typed: Sequence[str] = ("digenrl", "up", "RECIPE")
    """The command line."""
    say: Callable[[str], None] = ignore
    """Receives lines about preparations, such as prompts of the user's own files."""


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Describes a run that is ready to start: its folder exists and is locked."""

    recipe: Recipe
    folder: Path
    api_port: int
    keys: Keys
    tokens: Tokens
    resumed: bool
    targets: MetricTargets
    again: str
    gpus: Assignment
    lock: TextIO
    """Lock that is held as long as this process lives."""

    @property
    def output(self) -> Path:
        """File of what is printed, where there is no terminal."""
        return self.folder / "logs" / "up.log"


def prepare(request: UpRequest) -> LocalRun:
    """Check everything, then make the run's folder.

    An earlier run in its folder continues or is renamed; it is never deleted.

    Raises:
        UserError: for the first problem, with its remedy.
    """
    run = run_in_folder(request.run, request.runs)
    named = {"run.name": run.id if run else request.run} if request.run else {}
    recipe, notes = load_recipe(request.recipe, {**request.options, **named}), list[str]()
    if make_own_prompts(recipe, notes.append):
        recipe = load_recipe(request.recipe, {**request.options, **named})
    folder = run.folder if run else request.runs / recipe.run.name
    if folder.exists():
        lock_run(folder.parent, folder.name).close()  # one that goes on is left alone
    start = decide_start(folder, recipe, request.typed, resume=request.resume, fresh=request.fresh)
    recipe = start.recipe
    notes += [each.line for each in implied_values(recipe) if each.is_overridden]
    for line in filter(None, (start.line, *notes)):
        request.say(line)
    check_inputs(recipe, begun=start.resumes)
    for line in skipped_rows(recipe):
        request.say(line)
    check_targets(request.targets)
    gpus = check_machine(recipe, request.runs, 0 if start.resumes else disk_bytes(recipe))
    if request.port and not hold_port(request.port):
        raise UserError(f"--port: {request.port} is occupied; choose another, or 0 for a free one")
    lock = lock_run(folder.parent, folder.name)
    if start.kept_as is not None:
        folder.rename(start.kept_as)
    _write_folder(folder, recipe, request)
    return LocalRun(
        recipe=recipe, folder=folder, api_port=request.port or free_ports(1)[0],
        keys=load_keys(folder), tokens=load_tokens(folder), resumed=start.resumes,
        targets=request.targets, again=command_with("--resume", request.typed),
        gpus=gpus, lock=lock,
    )  # fmt: skip


def _write_folder(folder: Path, recipe: Recipe, request: UpRequest) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "recipe.json").write_text(recipe.model_dump_json(indent=1))
    write_started(folder, request.recipe, request.options)
    (folder / FILES_JSON).write_bytes(RECORDS.dump_json(file_records(recipe, FILES), indent=1))


def check_machine(recipe: Recipe, runs: Path, versions: int) -> Assignment:
    """Return the GPUs of this machine that the run's processes use.

    Args:
        versions: bytes on the disk of weights, checkpoints and trajectories.

    Raises:
        UserError: if the machine has too few GPUs, or too little space for a run.
    """
    faults, assignment = Faults(), Assignment({})
    with faults.collected():
        cards = () if recipe.model.device == "cpu" else visible_cards()
        assignment = assign_gpus(recipe, cards, Processes.of_run(recipe))
    with faults.collected():
        _check_space(runs, versions)
    faults.raise_any()
    return assignment


def _check_space(runs: Path, versions: int) -> None:
    needed = MIN_FREE_BYTES + versions
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


def versions_bytes(recipe: Recipe) -> int:
    """Return the bytes of all weights, checkpoints and trajectories that are kept at the same time,
    without media and conditions.

    Raises:
        UserError: if the model's folder is invalid.
    """
    trained, shape = _sizes(recipe)
    return stored_bytes(recipe, trained) + trajectory_bytes(recipe, shape)


def disk_bytes(recipe: Recipe) -> int:
    """Return the maximum size of the kept objects on the disk of SeaweedFS.

    A vacuum leaves a fraction of deleted bytes, and all bytes written after it stay until the next
    vacuum."""
    trained, shape = _sizes(recipe)
    step = version_bytes(recipe, trained) + batch_bytes(recipe, shape)
    written = max(step, VACUUM_S * min(step, MAX_STORED_PER_S))
    vacuumed = versions_bytes(recipe) / (1 - MAX_GARBAGE)
    return round(vacuumed) + min(written, recipe.run.steps * step)


def _sizes(recipe: Recipe) -> tuple[int, Sequence[int]]:
    """Return the bytes of the trained weights in float32, and the shape of a sample's latents."""
    folder, lora = recipe.model.folder, recipe.model.lora
    if recipe.model.trained == "full":
        trained = num_weights(folder, "transformer") * ITEM_BYTES["float32"]
    else:
        targets = lora.targets or find_family(folder).lora_targets
        trained = adapter_bytes(folder, lora.rank, targets, frozen_layers(recipe))
    model = recipe.model
    shape = latent_shape(folder, height=model.height, width=model.width, frames=model.frames)
    return trained, shape
