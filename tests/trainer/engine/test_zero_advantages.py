"""Rows without advantage: left out of passes where they have no gradient, and of the mean where the
recipe drops them."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.weights.trained_weights import load_weights, trained_tensors
from shared.recipe.recipe import Recipe, override
from tests.shared.diffusion.shared_noise import move
from tests.trainer.batches import Group, make_batch
from tests.trainer.engine.test_gradient import relative_error


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    policy: LoadedPolicy
    group: Group
    adapter: bytes

    @property
    def drops_zeros(self) -> bool:
        return self.recipe.algorithm.zero_advantages == "dropped"

    def data(self, advantages: Sequence[float]) -> GroupData:
        return GroupData(
            trajectories=tuple(self.group.cut((4,))), conditions=self.group.conditions,
            advantages=tuple(advantages),
        )  # fmt: skip

    def engine(self, **changes: object) -> TrainerEngine:
        """Return an engine with the weights that the case begins with."""
        recipe = override(self.recipe, {k.replace("__", "."): v for k, v in changes.items()})
        load_weights(self.policy.model.transformer, unpack(self.adapter))
        engine = TrainerEngine(recipe, self.policy)
        engine.begin()
        return engine


@pytest.fixture(scope="module", params=["kept", "dropped"])
def case(request: pytest.FixtureRequest, recipe: Recipe) -> Case:
    recipe = override(recipe, {
        "algorithm.zero_advantages": request.param, "algorithm.kl_beta": 3.0,
        "trainer.max_grad_norm": 1e6, "trainer.learning_rate": 1e-3, "sampling.window": 2,
        "schedule.tsp_steps": 2,
    })  # fmt: skip
    policy = load_policy(recipe, {"transformer", "text", "decoder"})
    move(policy, 0.1)
    groups = make_batch(recipe, off_policy=3e-3, loaded=policy)
    return Case(recipe, policy, groups[0], pack(trained_tensors(policy.model.transformer)))


def test_rows_without_advantage_are_left_out_where_they_have_no_gradient(case: Case) -> None:
    """They are skipped in the passes, and still count in the denominator of the sum."""
    advantages = (1.5, 0.0, -0.5, 0.0)
    for beta, wanted in ((0.0, 2), (0.3, 2 if case.drops_zeros else 4)):
        gradients, metrics, rows = [], [], list[int]()
        for left_out in (False, True):
            changes = {"algorithm__kl_beta": beta}
            engine = case.engine(trainer__micro_batch=4, **changes)
            count, whole = engine._loaded.model.velocity, rows if left_out else list[int]()

            def counted(latents, *rest, whole=whole, count=count, **more):  # type: ignore
                whole.append(len(latents) * torch.is_grad_enabled())
                return count(latents, *rest, **more)

            engine._loaded.model.velocity = counted  # type: ignore[method-assign]
            data = case.data(advantages)
            engine.train(engine.read(data), None if left_out else Chunk(4, 2))
            del engine._loaded.model.velocity
            gradients.append(engine.gradient())
            metrics.append(engine.step(0))
        assert relative_error(*gradients) <= 1e-6
        assert sum(rows) == 2 * wanted
        assert [each["zero_advantage_fraction"] for each in metrics] == [0.5, 0.5]


def test_a_mean_over_the_rows_that_are_kept_is_that_of_each_update_and_never_by_zero(
    case: Case,
) -> None:
    zeros, mixed = (0.0,) * 4, (1.5, 0.0, -0.5, 0.0)
    alone = case.engine(batch__groups=1)
    alone.train(alone.read(case.data(mixed)))
    norm = alone.step(0)["grad_norm"]
    engine = case.engine(batch__groups=4, trainer__updates=2)
    norms = []
    for advantages in ((mixed, zeros), (zeros, zeros)):
        for each in advantages:
            engine.train(engine.read(case.data(each)))
        norms.append(engine.step(0)["grad_norm"])
    if case.drops_zeros:  # of both, the mean over the two rows of each step that have an advantage
        assert norms == pytest.approx([norm, 0.0], rel=1e-6)
    else:
        assert norms[0] < 0.9 * norm and norms[1] > 0, "the KL pulls"
