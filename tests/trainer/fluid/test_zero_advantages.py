"""Fluid members drop samples without advantage as one trainer does, however the batch is cut."""

from dataclasses import replace

import pytest
import torch

from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.fluid.engine import FluidEngine
from services.trainer.fluid.sums import Term, added
from shared.devices.slices import GroupSlice
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.recipe.recipe import Recipe, override
from tests.shared.diffusion.shared_noise import move
from tests.trainer.batches import fresh_groups

FLUID = {"schedule.mode": "fluid", "rollout.workers": 0, "trainer.max_grad_norm": 1e-4}
ADVANTAGES = ((1.5, 0.0, -0.5, 0.0), (0.0, 0.0, 0.0, 0.0), (1.0, -1.0, 0.5, -0.5))
SATURATED = ((0.0,) * 4,) * 3


def moved(recipe: Recipe) -> LoadedPolicy:
    """Return a policy that is not its reference, so that a KL pulls."""
    loaded = load_policy(recipe, {"transformer", "text", "decoder"}, trains=True)
    move(loaded, 0.1)
    return loaded


@pytest.mark.parametrize("advantages", [ADVANTAGES, SATURATED], ids=["some", "all"])
@pytest.mark.parametrize("zero_advantages", ["kept", "dropped"])
def test_the_step_is_that_of_one_trainer(
    recipe: Recipe, zero_advantages: str, advantages: tuple[tuple[float, ...], ...]
) -> None:
    recipe = override(recipe, {**FLUID, "algorithm.zero_advantages": zero_advantages})
    made = moved(recipe)
    groups = [
        replace(group, advantages=each)
        for group, each in zip(fresh_groups(recipe, made), advantages, strict=True)
    ]
    alone = TrainerEngine(recipe, moved(recipe))
    alone.begin()
    for group in groups:
        alone.train(alone.read(group))
    wanted = alone.step(0)

    member = FluidEngine(recipe, moved(recipe))
    terms: list[Term] = []
    for samples in (range(1), range(1, 4)):  # of every group, by two members
        member.begin()
        for group in groups:
            if recipe.trains_zeros or any(group.advantages):
                part = member.read(group).sliced(GroupSlice(samples, first=0, end=3))
                member.train(part)
            else:
                member.skip_rows(len(samples) * recipe.sampling.window)
        terms.append(member.term())
    total = added(terms, member.layout)
    given = member.measured(total)
    found = member.take(0, total, given)
    assert given.norm == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert found["grad_norm"] == given.norm
    assert (given.norm > 0) == (advantages is ADVANTAGES or recipe.trains_zeros)
    for name, each in alone._parameters.items():
        assert torch.allclose(member._parameters[name], each, rtol=0, atol=1e-6)
