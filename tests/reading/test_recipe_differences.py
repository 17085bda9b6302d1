"""Which keys of two recipes differ, and which values are defaults."""

from digenrl.reading.recipe_differences import recipe_differences
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS


def test_differences_have_the_meaning_of_the_key_and_mark_defaults() -> None:
    one = load_recipe(DIGITS)
    other = override(one, {"run.name": "b", "trainer.learning_rate": 1e-2, "evaluation.every": 4})
    rate, every = recipe_differences([one, other])
    assert (rate.key, rate.values) == ("trainer.learning_rate", [(0.003, False), (0.01, False)])
    assert (every.key, every.values) == ("evaluation.every", [(None, True), (4, False)])
    assert every.meaning.startswith("Optimizer steps between two evaluations")
    assert recipe_differences([one, one]) == []
