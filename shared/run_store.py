"""What a run keeps in the object store, and where.

<run>/recipe.json                    the resolved recipe, which every service works from
<run>/commits/<version>.json         the commit records (shared/commits.py)
<run>/weights/<sha256>.safetensors   one adapter per policy version
<run>/checkpoints/<sha256>...        optimizer and random state of each version
<run>/conditions/<sha256>...         what the network is told about each prompt
<run>/usage/<batch>.json             what the devices did in that batch, and what TAG decided
<run>/evaluations/<settings>/...     what was measured, and the pictures (docs/evaluation.md)
<run>/batches/<batch>/<sha256>...    trajectories and media, until no recovery needs them
"""

import asyncio
import time
from typing import Any

import structlog

from shared.errors import ContractError, Unavailable, UserError
from shared.recipe import Recipe, stored_recipe
from shared.store import ObjectStore

MAY_CHANGE = {
    "run.steps", "rollout.workers", "rollout.threads", "rollout.can_train", "trainer.devices",
    "trainer.ranks", "trainer.sharded",
    "reward.workers", "reward.threads",
    "schedule.mode", "schedule.tag", "schedule.early_fraction", "schedule.slot_deadline_s",
    "evaluation.every", "evaluation.seed", "evaluation.samples_per_prompt", "evaluation.digits",
    "evaluation.prompts", "evaluation.scorers", "evaluation.steps", "evaluation.sigmas",
    "evaluation.height", "evaluation.width", "evaluation.threads",
}  # fmt: skip
"""Keys that a resumed run may set anew: they do not change what any batch is."""

POLL_S = 0.5
REPEAT_S = 30.0

log = structlog.get_logger()


def weights_folder(run: str) -> str:
    return f"{run}/weights"


def checkpoints_folder(run: str) -> str:
    return f"{run}/checkpoints"


def conditions_folder(run: str) -> str:
    return f"{run}/conditions"


def batch_folder(run: str, batch: int) -> str:
    return f"{_batches_folder(run)}/{batch:08d}"


async def stored_batches(store: ObjectStore, run: str) -> list[int]:
    """Batches of which there are trajectories or media."""
    folder = _batches_folder(run)
    keys = await store.keys(folder)
    return sorted({int(key.removeprefix(f"{folder}/").split("/")[0]) for key in keys})


def _batches_folder(run: str) -> str:
    return f"{run}/batches"


def usage_folder(run: str) -> str:
    return f"{run}/usage"


def evaluations_folder(run: str) -> str:
    return f"{run}/evaluations"


def usage_key(run: str, batch: int) -> str:
    return f"{usage_folder(run)}/{batch:08d}.json"


async def store_recipe(store: ObjectStore, recipe: Recipe) -> None:
    """Keep the recipe with its run.

    Raises:
        UserError: if the run was started with a recipe that means something else.
    """
    stored = await read_recipe(store, recipe.run.name)
    if stored is not None:
        check_same_run(stored, recipe)
    await store.write(f"{recipe.run.name}/recipe.json", recipe.model_dump_json(indent=1).encode())


async def read_recipe(store: ObjectStore, run: str) -> Recipe | None:
    data = await store.read(f"{run}/recipe.json")
    if data is None:
        return None
    try:
        return stored_recipe(data)
    except ValueError as error:
        raise ContractError(f"{run}/recipe.json is not a recipe of this release") from error


async def wait_for_recipe(store: ObjectStore, run: str, *, place: str = "") -> Recipe:
    """The recipe, as soon as the scheduler has stored it.

    While it is not there, the log says so every `REPEAT_S` seconds, with the run's name, the
    ``place`` of the store, and what decides both.
    """
    told = -REPEAT_S
    while True:
        try:
            recipe, error = await read_recipe(store, run), ""
        except Unavailable as unavailable:
            recipe, error = None, str(unavailable)
        if recipe is not None:
            log.info("run_found", store=place, steps=recipe.run.steps)
            return recipe
        if time.monotonic() - told >= REPEAT_S:
            told = time.monotonic()
            _say_what_is_waited_for(run, place, error)
        await asyncio.sleep(POLL_S)


def _say_what_is_waited_for(run: str, place: str, error: str) -> None:
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


def check_same_run(stored: Recipe, given: Recipe) -> None:
    """Raises UserError naming the first key that a resumed run may not change."""
    old, new = _flat(stored.model_dump(mode="json")), _flat(given.model_dump(mode="json"))
    changed = [key for key in old if old[key] != new.get(key) and key not in MAY_CHANGE]
    if changed:
        key = changed[0]
        raise UserError(
            f"{key}: the run {stored.run.name!r} was started with {old[key]!r}, not "
            f"{new.get(key)!r}; resume with that value, or start anew under another name"
        )


def _flat(tables: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()
    }
