from pathlib import Path

import pytest
import torch

from shared.recipe import Recipe, load_recipe, override

DIGITS = Path(__file__).parents[2] / "recipes" / "digits.toml"


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
    }
    return override(load_recipe(DIGITS), changes)
