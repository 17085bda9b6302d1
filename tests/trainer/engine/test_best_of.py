"""Only the best and the worst samples of each group are trained (`algorithm.best_of`)."""

from dataclasses import replace

import pytest

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk
from shared.devices.slices import GroupSlice
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.rows import read_group
from shared.errors import UserError
from shared.learning.advantages import best_and_worst
from tests.trainer.engine.test_algorithms import (
    SIZE,
    WINDOW,
    error,
    gradient,
    group,
    policy,
    recipe_of,
)

__all__ = ["policy"]
ADVANTAGES = (1.5, -0.5, 0.25, -1.25)
TRAINED = (0, 3)


def test_half_are_the_best_and_half_the_worst() -> None:
    assert best_and_worst(ADVANTAGES, 2) == list(TRAINED)
    assert best_and_worst([0.0, 3.0, 1.0, -2.0, 5.0, 0.0], 4) == [0, 1, 3, 4]
    assert best_and_worst([0.0] * 4, 2) == [0, 3], "equal ones: the first and the last"
    assert best_and_worst(ADVANTAGES, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["flow-grpo", "grpo-guard", "diffusion-nft"])
def test_the_others_are_no_rows(policy: LoadedPolicy, name: str) -> None:
    """The gradient is that of a batch whose groups have the trained samples alone."""
    recipe = recipe_of(name, algorithm__kl_beta=0.04, algorithm__best_of=2)
    data = group(recipe, policy, (1, 1, 1, 1))
    trajectories = tuple(data.trajectories[sample] for sample in TRAINED)
    advantages = tuple(ADVANTAGES[sample] for sample in TRAINED)
    alone = recipe_of(name, algorithm__kl_beta=0.04, batch__group_size=2)
    wanted, metrics = gradient(
        alone,
        policy,
        replace(data, trajectories=trajectories, advantages=advantages),
        Chunk(2, WINDOW),
    )
    for cut, chunk in (((1, 3), Chunk(1, 1)), ((SIZE,), Chunk(2, WINDOW)), ((2, 2), Chunk(1, 2))):
        found, of_cut = gradient(recipe, policy, group(recipe, policy, cut), chunk)
        assert error(found, wanted) < 1e-5
        assert of_cut["loss"] == pytest.approx(metrics["loss"], rel=1e-4)


def test_slices_of_several_devices_are_of_the_trained_samples(policy: LoadedPolicy) -> None:
    recipe = recipe_of("flow-grpo", algorithm__best_of=2)
    data = group(recipe, policy)
    wanted, _ = gradient(recipe, policy, data, Chunk(2, WINDOW))
    transaction = GradientTransaction.from_recipe(recipe, policy.model)
    transaction.begin()
    for sample in (1, 0):
        part = read_group(recipe, data).sliced(GroupSlice(range(sample, sample + 1)))
        transaction.accumulate(part, Chunk(1, WINDOW))
    parameters = policy.model.transformer.named_parameters()
    found = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    assert error(found, wanted) < 1e-6
    assert transaction.tally.num_rows == 2 * WINDOW == transaction.num_rows


def test_a_group_and_what_is_skipped_count_trained_rows(policy: LoadedPolicy) -> None:
    recipe = recipe_of("flow-grpo", algorithm__best_of=2, batch__groups=2)
    engine = TrainerEngine(recipe, policy)
    engine.begin()
    engine.train(engine.read(group(recipe, policy)))
    engine.skip(recipe.trained_samples)
    metrics = engine.step(0)
    assert metrics["zero_advantage_fraction"] == 0.5


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm\.best_of.*multiple of 2"):
        recipe_of("flow-grpo", algorithm__best_of=3)
    with pytest.raises(UserError, match=r"algorithm\.best_of: 6 is more than batch\.group_size"):
        recipe_of("flow-grpo", algorithm__best_of=6)
    with pytest.raises(UserError, match=r"trainer\.micro_batch: 4 .*algorithm\.best_of \(2\)"):
        recipe_of("flow-grpo", algorithm__best_of=2, trainer__micro_batch=4)
