from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.conditions import Encoding
from tests.paths import DIGITS
from tests.trainer.cluster import Cluster, Start, cluster


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing from a second one, and lose much on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    """The demo's model with three groups of four samples and three trained steps."""
    changes = {
        "batch.groups": 3,
        "batch.group_size": 4,
        "schedule.fragment_size": 2,
        "trainer.micro_batch": 2,
        "schedule.tsp_steps": 3,
        "sampling.window": 3,
        "algorithm.kl_beta": 0.02,
        "rollout.media": "raw",  # devices without torch make none
    }
    return override(load_recipe(DIGITS), changes)


@pytest.fixture
def trainer(nats_url: str, tmp_path: Path, recipe: Recipe) -> Start:
    """A trainer, by default of one device, two groups of four samples per batch and no KL term."""

    def start(
        encoding: Encoding | None = None, **changes: Any
    ) -> AbstractAsyncContextManager[Cluster]:
        given = {key.replace("__", "."): value for key, value in changes.items()}
        fixed = {"batch.groups": 2, "algorithm.kl_beta": 0.0, **given}
        changed = override(recipe, fixed)
        return cluster(nats_url, tmp_path / "objects", changed, encoding=encoding)

    return start
