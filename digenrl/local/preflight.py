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
from digenrl.local.keys import Keys, keys_of
from digenrl.local.ports import free_ports, hold_port
from digenrl.local.record import write_started
from digenrl.local.tokens import Tokens, tokens_of
from digenrl.tail.results import check_tail
from services.reward.scorer import check_digits, check_packages, check_prompts, kind_of
from shared.errors import UserError
from shared.learning.prompts import read_prompts, repeated
from shared.messages.contracts import Prompt
from shared.models.catalogue import (
    check_parts,
    check_size,
    check_weights,
    checked_family_of,
    family_of,
    latent_shape,
    text_tokens,
)
from shared.models.memory import ITEM_BYTES, adapter_bytes, num_weights
from shared.models.quantised import check_installed
from shared.models.source_tokens import check_source_tokens
from shared.process.port_numbers import check_port
from shared.recipe.adapter import check_adapter_here
from shared.recipe.networks import check_networks, frozen_layers
from shared.recipe.recipe import Recipe, load_recipe, stored_recipe
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
    check_inputs(recipe, begun=request.resume)
    check_targets(request.targets)
    if not request.resume:
        check_tail(recipe, request.recipe, request.runs)
    gpus = assign_gpus(recipe, () if recipe.model.device == "cpu" else visible_gpus())
    if request.port and not hold_port(request.port):
        raise UserError(f"--port: {request.port} is occupied; choose another, or 0 for a free one")
    _check_space(request.runs, 0 if request.resume else versions_bytes(recipe))
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


def check_inputs(
    recipe: Recipe, *, weights: bool = True, elsewhere: bool = False, begun: bool = False
) -> None:
    """Check that every file and name in the recipe exists.

    Args:
        weights: the network's weights have to be there, not only configurations.
        elsewhere: as in `check_rest`.
        begun: as in `check_rest`.

    Raises:
        UserError: if something is missing.
    """
    family = checked_family_of(recipe.model.folder)
    makes_videos = family.makes_videos
    if recipe.model.frames > 1 and not makes_videos:
        raise UserError(
            f"model.frames: {recipe.model.folder} makes images, not videos; remove frames"
        )
    if weights:
        check_weights(recipe.model.folder)
        check_parts(recipe.model.folder)
    _check_sizes(recipe)
    check_networks(recipe)
    text_tokens(recipe.model.folder, recipe.model.text_tokens)
    if not elsewhere:
        check_adapter_here(recipe)
        _check_source_tokens(recipe)
    check_rest(recipe, elsewhere=elsewhere, begun=begun)
    for key, path in (("data", recipe.data.prompts), ("evaluation", recipe.evaluation.prompts)):
        if path is not None:
            _check_images(f"{key}.prompts", path, recipe.model.folder, family.takes_image)
    for scorer in (*recipe.reward.scorers, *recipe.evaluation.scorers):
        if kind_of(scorer, here=not elsewhere).takes == "videos" and not makes_videos:
            raise UserError(
                f"reward.scorers.{scorer.name}.type: {scorer.type} scores videos, and "
                f"{recipe.model.folder} makes images"
            )


def _check_images(key: str, prompts: Path, folder: Path, takes_image: bool) -> None:
    """Raises UserError unless prompts have source images just where the model takes one."""
    has_image = read_prompts(prompts)[0].image is not None
    if has_image and not takes_image:
        raise UserError(
            f"{key}: {prompts} has images, and {folder} makes samples of text alone; leave the "
            "images out, or choose a model that edits images"
        )
    if takes_image and not has_image:
        raise UserError(
            f'{key}: {folder} edits images, and {prompts} names none; give each prompt an "image", '
            "a path relative to that file"
        )


def _check_sizes(recipe: Recipe) -> None:
    folder, trained, evaluated = recipe.model.folder, recipe.model, recipe.evaluation
    check_size(folder, "model", height=trained.height, width=trained.width)
    check_size(
        folder,
        "evaluation",
        height=evaluated.height or trained.height,
        width=evaluated.width or trained.width,
    )


def _check_source_tokens(recipe: Recipe) -> None:
    model, evaluated = recipe.model, recipe.evaluation
    for table, height, width in (
        ("model", model.height, model.width),
        ("evaluation", evaluated.height or model.height, evaluated.width or model.width),
    ):
        check_source_tokens(
            model.folder, model.text_tokens, table=table, height=height, width=width
        )


def check_rest(recipe: Recipe, *, elsewhere: bool = False, begun: bool = False) -> None:
    """Check everything that `check_inputs` does, except the model.

    Args:
        elsewhere: the rewards and rollout, with their packages and folders, are on other hosts.
        begun: it is the recipe of a run that goes on, whatever its prompts lack.

    Raises:
        UserError: if something is missing."""
    prompts = read_prompts(recipe.data.prompts)
    if recipe.data.weights is not None:
        repeated(prompts, recipe.data.weights)
    held_out = prompts
    if recipe.evaluation.prompts is not None:
        held_out = _held_out(recipe.evaluation.prompts)
    for scorer in (*recipe.reward.scorers, *recipe.evaluation.scorers):
        kind_of(scorer, here=not elsewhere)
        if not elsewhere:
            check_packages(scorer)
    if not (elsewhere or begun):
        _check_asked_of_prompts(recipe, prompts, held_out)
    if not elsewhere:
        check_installed(recipe.holding.weights)
    judges = None if elsewhere else recipe.evaluation.digits
    if judges is not None and not judges.is_dir():
        raise UserError(f"evaluation.digits: no folder {judges}")


def _held_out(path: Path) -> tuple[Prompt, ...]:
    """Read the prompts of the evaluation; an error names their own key."""
    try:
        return read_prompts(path)
    except UserError as error:
        raise UserError(str(error).replace("data.prompts:", "evaluation.prompts:", 1)) from error


def _check_asked_of_prompts(
    recipe: Recipe, prompts: Sequence[Prompt], held_out: Sequence[Prompt]
) -> None:
    """Raises UserError if a prompt does not have what a scorer, or the judges of digits, asks
    for."""
    trained = recipe.reward.scorers
    for table in trained:
        check_prompts(table, prompts)
    for table in (*trained, *recipe.evaluation.scorers):
        check_prompts(table, held_out)
    if recipe.evaluation.digits is not None:
        check_digits(held_out)


def _check_space(runs: Path, versions: int) -> None:
    """Raises UserError if a run has too little space.

    Args:
        versions: bytes of the weights and checkpoints that are kept at the same time.
    """
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
