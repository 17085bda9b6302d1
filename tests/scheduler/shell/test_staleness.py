"""What "auto" staleness is for a run is settled once, and stored with it."""

import json
from pathlib import Path

import pytest
import structlog

from services.scheduler.shell.staleness import settle_staleness
from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.layout import recipe_key, staleness_key
from shared.run.run_recipe import read_recipe
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe


def auto(**changes: object) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_recipe(DIGITS), {"schedule.max_staleness": "auto", **dotted})


async def begin(store: ObjectStore, recipe: Recipe) -> Recipe:
    """Begin a run as the scheduler does."""
    settled, _ = await settle_staleness(store, recipe)
    return await store_recipe(store, settled)


async def test_a_run_keeps_what_was_decided_when_it_began(tmp_path: Path) -> None:
    store = ObjectStore(FolderBackend(tmp_path))
    with structlog.testing.capture_logs() as logs:
        recipe, found = await settle_staleness(store, auto(rollout__workers=1))
    assert recipe.schedule.max_staleness == found.max_staleness == 0
    assert [entry["event"] for entry in logs] == ["staleness_decided"]
    assert logs[0]["reason"] == found.reason
    await store_recipe(store, recipe)
    stored = await read_recipe(store, recipe.run.name)
    assert stored is not None and stored.schedule.max_staleness == 0
    # Whatever would be decided now, with other devices, or by another release.
    key = staleness_key(recipe.run.name)
    planted = {"max_staleness": 0, "gain": 1.01, "reason": "as it was"}
    await store.write(key, json.dumps(planted).encode())
    _, again = await settle_staleness(store, auto(rollout__workers=12))
    assert again.reason == "as it was"
    assert (await begin(store, auto(rollout__workers=12))).schedule.max_staleness == 0


async def test_a_number_is_not_decided_and_another_than_the_run_s_is_refused(
    tmp_path: Path,
) -> None:
    store = ObjectStore(FolderBackend(tmp_path))
    said = override(auto(), {"schedule.max_staleness": 1})
    recipe, found = await settle_staleness(store, said)
    assert recipe == said and found.reason == "the recipe says so"
    assert await store.read(staleness_key(said.run.name)) is None
    await begin(store, auto(rollout__workers=1))
    with pytest.raises(UserError, match=r"schedule\.max_staleness: the run .* was started with 0"):
        await begin(store, said)


async def test_a_run_of_before_goes_on_with_auto_as_it_meant_then(tmp_path: Path) -> None:
    """Its stored recipe says "auto", which was 1."""
    store, recipe = ObjectStore(FolderBackend(tmp_path)), auto(rollout__workers=1)
    await store.write(recipe_key(recipe.run.name), recipe.model_dump_json().encode())
    settled, found = await settle_staleness(store, recipe)
    assert (settled.schedule.max_staleness, found.reason) == (1, "the run has begun with it")
    assert (await store_recipe(store, settled)).schedule.max_staleness == 1
