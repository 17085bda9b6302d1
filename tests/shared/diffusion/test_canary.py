"""Every family computes the numbers by which devices are compared, the same in each process."""

from pathlib import Path

import pytest

from shared.diffusion.canary import COUNT, velocity_numbers
from shared.diffusion.policy import load_policy
from tests.report import tiny_recipes
from tests.shared.diffusion import digits


def test_a_device_computes_the_same_numbers_whenever_it_is_asked() -> None:
    found = velocity_numbers(digits.load_digits().model, digits.RECIPE)
    assert found == velocity_numbers(digits.load_digits().model, digits.RECIPE)
    assert len(found) == COUNT and 0 < max(map(abs, found)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_recipes.GUIDANCE)
def test_every_family_has_numbers_without_its_text_encoders(family: str, tmp_path: Path) -> None:
    recipe = tiny_recipes.recipe_of(family, tmp_path)
    found = velocity_numbers(load_policy(recipe, {"transformer", "decoder"}).model, recipe)
    assert len(found) <= COUNT and len(set(found)) > 16
