"""Members with real engines, on a real bus and store, while a test plays the scheduler."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from shared.recipe.recipe import Recipe, override
from tests.trainer.fluid.director import FLUID, Director, Start, directing


@pytest.fixture
def direct(nats_url: str, tmp_path: Path, recipe: Recipe) -> Start:
    def start(folder: str = "objects", **changes: Any) -> AbstractAsyncContextManager[Director]:
        given = {key.replace("__", "."): value for key, value in changes.items()}
        return directing(nats_url, tmp_path / folder, override(recipe, FLUID | given))

    return start


@pytest.fixture
async def director(direct: Start) -> AsyncIterator[Director]:
    async with direct() as director:
        yield director
