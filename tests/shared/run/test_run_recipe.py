"""A worker that is started before its run, or for a run that nobody starts."""

import asyncio
from pathlib import Path

import pytest
import structlog

from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override
from shared.release import RELEASE
from shared.run.run_recipe import check_recipe, read_recipe, wait_for_recipe
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe


async def test_a_worker_says_once_that_it_waits_for_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.run.run_recipe.RECIPE_POLL_S", 0.01)
    store, recipe = ObjectStore(FolderBackend(tmp_path)), load_recipe(DIGITS)
    with structlog.testing.capture_logs() as logs:
        waiting = asyncio.create_task(wait_for_recipe(store, recipe.run.name))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await store_recipe(store, recipe)
        assert await waiting == recipe
    assert [entry["event"] for entry in logs] == ["waiting_for_recipe", "run_found"]


async def test_a_checked_recipe_is_checked_anew_if_another_was_stored_meanwhile(
    folder_store: ObjectStore,
) -> None:
    """Another scheduler has stored it, which commanded while this one stood by."""
    mine = load_recipe(DIGITS)
    other = override(mine, {"trainer.learning_rate": 2 * mine.trainer.learning_rate})
    checked = await check_recipe(folder_store, mine)
    await store_recipe(folder_store, other)
    with pytest.raises(UserError, match="learning_rate"):
        await checked.put(folder_store)
    assert await read_recipe(folder_store, mine.run.name) == other


async def test_a_run_of_another_release_is_refused_in_a_line_that_names_both(
    folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(DIGITS)
    with monkeypatch.context() as older:
        older.setattr("shared.run.run_recipe.RELEASE", "0.1.0")
        await store_recipe(folder_store, recipe)
    for read in (read_recipe(folder_store, recipe.run.name), store_recipe(folder_store, recipe)):
        with pytest.raises(UserError, match=f"of release 0.1.0, this process of {RELEASE}"):
            await read
