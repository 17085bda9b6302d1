"""The recipe decides which versions are evaluated, and at which settings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.evaluation.settings import as_evaluated, due_versions, settings_digest
from shared.messages.contracts import Prompt
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import DIGITS

PROMPTS = (Prompt(text="a handwritten one"), Prompt(text="a handwritten two"))


def changed(**evaluation: Any) -> Recipe:
    changes = {f"evaluation.{key}": value for key, value in evaluation.items()}
    return override(load_recipe(DIGITS), changes)


@pytest.mark.parametrize(
    ("every", "last", "due"),
    [(2, 5, [0, 2, 4, 5]), (2, 4, [0, 2, 4]), (1, 2, [0, 1, 2]), (100, 3, [0, 3])],
)
def test_the_first_every_nth_and_the_last_version_are_due(
    every: int, last: int, due: list[int]
) -> None:
    assert due_versions(every, last) == due


@given(every=st.integers(1, 50), last=st.integers(1, 200))
def test_no_version_is_due_twice(every: int, last: int) -> None:
    due = due_versions(every, last)
    assert due == sorted(set(due))
    assert due[0] == 0 and due[-1] == last
    assert all(version % every == 0 for version in due[:-1])
    assert len(due) == -(-last // every) + 1


def test_an_evaluation_is_as_training_where_the_recipe_says_nothing() -> None:
    recipe = changed()
    evaluated = as_evaluated(recipe)
    assert evaluated.sampling == recipe.sampling
    assert evaluated.model == recipe.model


def test_an_evaluation_has_steps_sigmas_size_and_threads_of_its_own() -> None:
    recipe = changed(steps=3, sigmas=(1.0, 0.5, 0.2, 0.0), height=4, threads=2)
    evaluated = as_evaluated(recipe)
    assert evaluated.sampling.steps == 3
    assert evaluated.sampling.sigmas == (1.0, 0.5, 0.2, 0.0)
    assert (evaluated.model.height, evaluated.model.width) == (4, recipe.model.width)
    assert evaluated.rollout.threads == 2
    assert recipe.sampling.steps == 10, "training keeps its own"


@pytest.mark.parametrize(
    "evaluation",
    [
        {"steps": 30},
        {"sigmas": "shifted"},
        {"height": 4},
        {"seed": 1},
        {"samples_per_prompt": 3},
        {"scorers": [{"name": "size", "type": "jpeg-compressibility"}]},
    ],
)
def test_what_changes_the_figures_changes_the_settings(evaluation: dict[str, Any]) -> None:
    assert settings_digest(changed(**evaluation), PROMPTS) != settings_digest(changed(), PROMPTS)


def test_other_prompts_are_other_settings() -> None:
    assert settings_digest(changed(), PROMPTS) != settings_digest(changed(), PROMPTS[:1])


def test_what_does_not_change_them_does_not() -> None:
    recipe = override(
        changed(every=3, threads=2),
        {"run.steps": 99, "rollout.workers": 5, "trainer.learning_rate": 1e-5},
    )
    assert settings_digest(recipe, PROMPTS) == settings_digest(changed(), PROMPTS)
    assert settings_digest(changed(steps=10, height=8), PROMPTS) == settings_digest(
        changed(), PROMPTS
    ), "said, and the same"
