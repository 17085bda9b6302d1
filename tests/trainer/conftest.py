from pathlib import Path

import pytest

from shared.recipe import Recipe, load_recipe, override

DIGITS = Path(__file__).parents[2] / "recipes" / "digits.toml"


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    """The demo's model with three groups of four samples and two trained steps."""
    changes = {
        "batch.groups": 3,
        "batch.group_size": 4,
        "schedule.fragment_size": 2,
        "trainer.micro_batch": 2,
        "sampling.window": 2,
        "algorithm.kl_beta": 0.02,
    }
    return override(load_recipe(DIGITS), changes)
