"""The reward's signal is what teaches: with shuffled advantages nothing is gained."""

import random
from collections.abc import Sequence

import pytest
import torch

from digenrl.evaluation.records import Quality
from digenrl.evaluation.samples import Judges, PromptSampler
from examples.one_process import Advantages, Loop
from shared.diffusion.sampling.tensors import unpack
from shared.learning.advantages import group_advantages
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import DIGITS, ROOT
from tests.stored import packed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, EDIT_STEPS = 8, 60


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return override(load_recipe(DIGITS), {"evaluation.samples_per_prompt": 6})


def trained(recipe: Recipe, advantages: Advantages) -> Quality:
    loop = Loop(recipe, advantages=advantages)
    for _ in loop.steps(STEPS):
        pass
    return measured(recipe, loop)


def measured(recipe: Recipe, loop: Loop) -> Quality:
    weights = unpack(packed(loop.trainer.weights().weights))
    return Judges(recipe).quality(PromptSampler(recipe).sample(weights))


def test_held_out_accuracy_rises_and_with_shuffled_advantages_it_does_not(recipe: Recipe) -> None:
    shuffler = random.Random(0)

    def shuffled(rewards: Sequence[float]) -> list[float]:
        advantages = list(group_advantages(rewards))
        shuffler.shuffle(advantages)
        return advantages

    torch.manual_seed(0)
    base = measured(recipe, Loop(recipe))
    taught, control = trained(recipe, group_advantages), trained(recipe, shuffled)
    assert base.gold_accuracy and taught.gold_accuracy and control.gold_accuracy
    assert taught.gold_accuracy > base.gold_accuracy + 0.1
    assert control.gold_accuracy < base.gold_accuracy + 0.03


def test_the_held_out_judge_of_the_editing_demo_rises_by_20_points() -> None:
    recipe = load_recipe(ROOT / "recipes" / "digits-edit.toml")
    loop = Loop(recipe)
    before = measured(recipe, loop).gold["judge"]
    for metrics in loop.steps(EDIT_STEPS):
        assert metrics["onpolicy_ratio_error"] <= 1e-6
    assert measured(recipe, loop).gold["judge"] >= before + 0.2
