"""The recipe of a run: stored when the run begins, read by every service, and compared when the run
is resumed."""

import asyncio
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from shared.errors import Unavailable, UserError
from shared.learning.prompt_rows import Row
from shared.learning.prompts import PromptOrder, num_different, read_rows, repeated, split_rows
from shared.limits import RECIPE_POLL_S, RECIPE_WAIT_LOG_S
from shared.models.hub import models_root
from shared.recipe.adapter import recipe_adapter
from shared.recipe.files import key_paths, on_this_host, portable_names, put_paths
from shared.recipe.recipe import Recipe, override, stored_recipe
from shared.release import RELEASE, refusal
from shared.run.files import check_files, same_files
from shared.run.layout import recipe_key
from shared.run.record_backups import damaged, read_kept, write_kept
from shared.run.sources import store_sources
from shared.store import ObjectStore

MAY_CHANGE = {
    "run.steps", "run.keep_last", "run.keep_every", "run.keep_best", "run.stop_at",
    "run.shard_bytes", "run.preview_mb",
    "model.device", "model.vae_tiling",
    "rollout.workers", "rollout.threads", "rollout.memory", "rollout.media",
    "trainer.devices", "trainer.memory",
    "encoder.workers", "encoder.threads", "encoder.ahead", "encoder.device",
    "trainer.shard_devices", "trainer.exchange",
    "reward.workers", "reward.threads",
    "schedule.mode", "schedule.tag", "schedule.slot_deadline_s",
    "evaluation.every", "evaluation.seed", "evaluation.samples_per_prompt", "evaluation.digits",
    "evaluation.prompts", "evaluation.dataset", "evaluation.scorers", "evaluation.steps",
    "evaluation.sigmas",
    "evaluation.height", "evaluation.width", "evaluation.threads",
}  # fmt: skip
"""Keys that a resumed run may change: no batch depends on them."""

KEYS_FROM_START = ("evaluation.held_out",)
"""Keys that a resumed run has as it began with them, where its recipe leaves them out."""

FILES = ("model.folder", "model.adapter", "data.prompts", "reward.scorers.")
"""Keys, or their beginnings, of files that must be the same on every host that has them."""
PORTABLE = "portable"
"""Key of a stored recipe, next to its tables, that names its paths for other hosts."""
RELEASE_KEY = "release"
"""Key of a stored recipe, next to its tables, with the release that began the run."""


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CheckedRecipe:
    """A recipe that may be stored with its run, as long as that still has what was seen."""

    asked: Recipe
    recipe_folder: Path | None
    recipe: Recipe
    """With the sigmas that the run began with."""
    data: bytes
    seen: bytes | None
    """Stored recipe of the run when this one was checked."""

    async def put(self, store: ObjectStore) -> Recipe:
        """Store it, and return it; it is checked again if the run has another one by then.

        Raises:
            UserError: as `check_recipe` does.
        """
        run, checked = self.recipe.run.name, self
        if await store.read(recipe_key(run)) != self.seen:
            checked = await check_recipe(store, self.asked, self.recipe_folder)
        await write_kept(store, run, "recipe", checked.data)
        return checked.recipe


async def check_recipe(
    store: ObjectStore, recipe: Recipe, recipe_folder: Path | None = None
) -> CheckedRecipe:
    """Check whether a run may continue with a recipe, and add the sigmas from its start.

    Args:
        recipe_folder: folder of the recipe's file.

    Raises:
        UserError: if the run was started with a recipe of another meaning, or with other files,
            or if a model's own sigmas are requested and unknown.
    """
    given, stored_recipe = recipe, await store.read(recipe_key(recipe.run.name))
    stored = await _read_stored(store, recipe.run.name)
    if stored is not None:
        recipe = keep_adapter(stored.recipe, keep_sigmas(stored.recipe, recipe))
    elif recipe.model.adapter is not None and recipe_adapter(recipe) is None:
        raise UserError(
            f"model.adapter: {recipe.model.adapter} and model.folder have to be on this host when "
            "a run begins: the adapter decides which layers are trained"
        )
    if "model" in (recipe.sampling.sigmas, recipe.evaluation.sigmas):
        raise UserError(
            f'sampling.sigmas, evaluation.sigmas: "model" needs {recipe.model.folder} on this '
            "host when a run begins, or numbers"
        )
    tables = recipe.model_dump(mode="json")
    portable = portable_names(tables, [models_root(), recipe_folder])
    if stored is not None:
        same = await same_files(store, recipe, FILES)
        same |= {key for key, name in stored.portable.items() if portable.get(key) == name}
        check_same_run(stored.recipe, recipe, same=same)
        recipe = keep_held_out(stored.recipe, recipe)
        tables = recipe.model_dump(mode="json")
    await check_files(store, recipe, FILES, needed=False)
    stored_tables = {**tables, PORTABLE: portable, RELEASE_KEY: RELEASE}
    data = json.dumps(stored_tables, indent=1).encode()
    return CheckedRecipe(given, recipe_folder, recipe, data, stored_recipe)


async def read_recipe(store: ObjectStore, run: str) -> Recipe | None:
    """Return the run's recipe with the paths of this host, None if it is not stored."""
    stored = await _read_stored(store, run)
    if stored is None:
        return None
    tables = stored.recipe.model_dump(mode="json")
    on_this_host(tables, stored.portable)
    return with_datasets_here(Recipe.model_validate(tables))


def with_datasets_here(recipe: Recipe) -> Recipe:
    """Return the recipe with this host's place of prompts that data sets of the hub have."""
    changes = {
        f"{name}.prompts": str(table.dataset.prompts)
        for name, table in (("data", recipe.data), ("evaluation", recipe.evaluation))
        if table.dataset is not None and table.dataset.commit is not None
    }
    return override(recipe, changes) if changes else recipe


async def needed_recipe(store: ObjectStore, run: str) -> Recipe:
    """Return the run's recipe with the paths of this host.

    Raises:
        UserError: if the store holds no such run.
    """
    recipe = await read_recipe(store, run)
    if recipe is None:
        raise UserError(
            f"--run: the store holds no run {run!r}; --runs names the folder of local runs, "
            "DIGENRL_STORE_URL any other store"
        )
    return recipe


@dataclass(frozen=True, slots=True)
class _StoredRecipe:
    recipe: Recipe
    """Has the paths of the host that stored it."""
    portable: Mapping[str, str]
    """Maps a key to its name below DIGENRL_MODELS."""


async def _read_stored(store: ObjectStore, run: str) -> _StoredRecipe | None:
    data = await read_kept(store, run, "recipe")
    try:
        return None if data is None else parsed_recipe(data)
    except ValueError as error:
        raise damaged(run, recipe_key(run)) from error


def parsed_recipe(data: bytes) -> _StoredRecipe:
    """Return a stored recipe.

    Raises:
        ValueError: if it is invalid.
        UserError: if another release began the run.
    """
    tables = json.loads(data)
    if not isinstance(tables, dict):
        raise ValueError("no tables")
    if why := refusal("the run", tables.pop(RELEASE_KEY, None)):
        raise UserError(f"--run: {why}")
    portable = tables.pop(PORTABLE, {})
    recipe = stored_recipe(json.dumps(tables).encode())
    return _StoredRecipe(recipe, portable)


async def wait_for_recipe(store: ObjectStore, run: str, *, place: str = "") -> Recipe:
    """Return the recipe as soon as the scheduler has stored it.

    Until then the log reports every `RECIPE_WAIT_LOG_S` seconds what it waits for: the run's name,
    the ``place`` of the store, and the settings that decide both.
    """
    logged = -RECIPE_WAIT_LOG_S
    while True:
        try:
            recipe, error = await read_recipe(store, run), ""
        except Unavailable as unavailable:
            recipe, error = None, str(unavailable)
        if recipe is not None:
            log.info("run_found", store=place, steps=recipe.run.steps)
            return recipe
        if time.monotonic() - logged >= RECIPE_WAIT_LOG_S:
            logged = time.monotonic()
            _log_waiting(run, place, error)
        await asyncio.sleep(RECIPE_POLL_S)


def _log_waiting(run: str, place: str, error: str) -> None:
    if error:
        log.warning("store_unavailable", store=place, setting="DIGENRL_STORE_URL", error=error)
    else:
        log.info(
            "waiting_for_recipe",
            run=run,
            store=place,
            hint="no scheduler has stored a recipe of this run there; if one has, look at --run "
            "(DIGENRL_RUN) and DIGENRL_STORE_URL",
        )


def keep_held_out(stored: Recipe, given: Recipe) -> Recipe:
    """Return ``given`` with the run's number of held-out prompts, independent of its evaluation."""
    began, now = stored.evaluation, given.evaluation
    if now.held_out is not None or (began.held_out is None and began.prompts == now.prompts):
        return given
    as_began = given.model_copy(update={"evaluation": began})
    number = num_different(trained_and_held_out(as_began)[1])
    return override(given, {"evaluation.held_out": number})


def keep_sigmas(stored: Recipe, given: Recipe) -> Recipe:
    """Return ``given`` with the sigmas of the run where it asks for the model's own and the model
    is not on this host. Where the run's sigmas were made otherwise, ``given`` keeps its own."""
    trained, evaluated = given.sampling.sigmas, given.evaluation.sigmas
    sigmas, measured = stored.sampling.sigmas, stored.evaluation.sigmas or stored.sampling.sigmas
    changes: dict[str, Any] = {}
    if (evaluated or trained) == "model":
        same = not isinstance(measured, str) and _sigma_inputs(stored) == _sigma_inputs(given)
        changes["evaluation.sigmas"] = measured if same else "model"
    same_steps = stored.sampling.steps == given.sampling.steps
    if trained == "model" and same_steps and not isinstance(sigmas, str):
        changes["sampling.sigmas"] = sigmas
    return override(given, changes)


def keep_adapter(stored: Recipe, given: Recipe) -> Recipe:
    """Return ``given`` with what the run's adapter trains, where the adapter or the model is not on
    this host."""
    if given.model.adapter is None or recipe_adapter(given) is not None:
        return given
    model = given.model.model_copy(update={"lora": stored.model.lora})
    return given.model_copy(update={"model": model})


def _sigma_inputs(recipe: Recipe) -> tuple[int, int, int]:
    """Return what a model's sigmas depend on: steps, height and width."""
    size, model = recipe.evaluation, recipe.model
    return (
        size.steps or recipe.sampling.steps,
        size.height or model.height,
        size.width or model.width,
    )


def check_same_run(stored: Recipe, given: Recipe, *, same: Collection[str] = ()) -> None:
    """Compare the recipe of a resumed run with the one that it was started with.

    Args:
        same: keys whose path may differ, because the files themselves have been compared. Files of
            a data set are compared by its revision.

    Raises:
        UserError: naming the first changed key that a resumed run may not change.
    """
    old, new = stored.model_dump(mode="json"), given.model_dump(mode="json")
    for key in KEYS_FROM_START:
        table, own = key.split(".")
        if new[table][own] is None:
            new[table][own] = old[table][own]
    if "auto" in (stored.schedule.max_staleness, given.schedule.max_staleness):
        # The scheduler decides when the run begins, and compares with what it decided.
        new["schedule"]["max_staleness"] = old["schedule"]["max_staleness"]
    paths = key_paths(new)
    if _is_same_model(stored, given):
        same = {*same, "model.folder"}
    put_paths(
        old,
        {
            key: paths[key]
            for key in key_paths(old)
            if key in paths and (key in same or key.endswith((".key_file", ".dataset.folder")))
        },
    )
    before, after = _flat(old), _flat(new)
    changed = [key for key in before if before[key] != after.get(key) and key not in MAY_CHANGE]
    if changed:
        key = changed[0]
        raise UserError(
            f"{key}: the run {stored.run.name!r} was started with {before[key]!r}, not "
            f"{after.get(key)!r}; resume with that value, or start another run under another name"
        )


def _is_same_model(stored: Recipe, given: Recipe) -> bool:
    """Whether both name the same commit on the hub, which every host may keep elsewhere."""
    old, new = stored.model, given.model
    return old.id is not None and (old.id, old.revision) == (new.id, new.revision)


def _flat(tables: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()
    }


def prompt_order(recipe: Recipe) -> PromptOrder:
    """Read the prompts that a recipe trains; raises UserError without any."""
    data = recipe.data
    prompts = tuple(prompt for prompt, _ in trained_and_held_out(recipe)[0])
    if data.weights is not None:
        prompts = repeated(prompts, data.weights)
    return PromptOrder(prompts, recipe.run.seed)


def trained_and_held_out(recipe: Recipe) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Read the prompts of training, with the files of their source images, and those held out."""
    table = recipe.evaluation
    number = 0 if table.held_out is None and table.prompts is not None else table.held_out
    return split_rows(read_rows(recipe.data.prompts), number)


def held_out_rows(recipe: Recipe) -> tuple[Row, ...]:
    """Read the prompts that are evaluated and not trained; empty if the evaluation uses the prompts
    of training."""
    own = recipe.evaluation.prompts
    if own is None:
        return trained_and_held_out(recipe)[1]
    try:
        return read_rows(own)
    except UserError as error:  # names its own key
        raise UserError(str(error).replace("data.prompts:", "evaluation.prompts:", 1)) from error


def evaluation_rows(recipe: Recipe) -> tuple[Row, ...]:
    """Read the prompts of evaluations, with the files of their source images."""
    return held_out_rows(recipe) or trained_and_held_out(recipe)[0]


def evaluated_on(num_held_out: int) -> str:
    """Return which prompts evaluations measure, in words."""
    plural = "" if num_held_out == 1 else "s"
    return f"{num_held_out} held-out prompt{plural}" if num_held_out else "the prompts of training"


async def store_images(store: ObjectStore, recipe: Recipe) -> None:
    """Store the source images of a recipe's prompts, if they have any, for encoders and judges;
    raises UserError if one cannot be read."""
    rows = await asyncio.to_thread(read_rows, recipe.data.prompts)
    await store_sources(store, recipe.run.name, rows)
