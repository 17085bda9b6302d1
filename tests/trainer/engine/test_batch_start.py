"""The decoupled loss of a batch's later updates is clipped around the weights at its start."""

import pytest
import torch
from torch import Tensor

from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.fluid.engine import FluidEngine
from shared.devices.protocols import GroupData
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import UserError
from shared.recipe.recipe import Recipe, override
from tests.trainer.batches import Group, make_batch
from tests.trainer.engine.test_gradient import relative_error, row_loss

CHANGES = {
    "algorithm.stale_loss": "decoupled", "algorithm.clip_range": 1e-4, "algorithm.kl_beta": 0.0,
    "algorithm.weight_cap": 10.0, "batch.groups": 2, "trainer.updates": 2,
    "trainer.learning_rate": 1e-3,
}  # fmt: skip
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def short(recipe: Recipe) -> Recipe:
    return override(recipe, CHANGES)


@pytest.fixture(scope="module")
def groups(short: Recipe) -> list[Group]:
    return make_batch(short, off_policy=3e-4)[:2]


def data(group: Group, staleness: int) -> GroupData:
    return GroupData(
        trajectories=tuple(group.cut((4,))), conditions=group.conditions,
        advantages=tuple(group.advantages), staleness=staleness,
    )  # fmt: skip


def loaded(recipe: Recipe) -> LoadedPolicy:
    return load_policy(recipe, {"transformer"}, trains=True)


def wanted(
    engine: TrainerEngine, recipe: Recipe, group: Group, staleness: int
) -> dict[str, Tensor]:
    """The gradient of the second update, written out."""
    model, start = engine._loaded.model, loaded(recipe).model
    parameters = trained_parameters(model.transformer)
    losses = [
        row_loss(model, recipe, group, sample, position, staleness, start)
        for sample in range(len(group.advantages))
        for position in range(recipe.sampling.window)
    ]
    total = torch.stack(losses).sum() / len(losses)
    return dict(zip(parameters, torch.autograd.grad(total, [*parameters.values()]), strict=True))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_second_update_has_the_gradient_of_the_formula(
    short: Recipe, groups: list[Group], staleness: int, weights: str | None
) -> None:
    recipe = override(short, {"rollout.weights": weights} if weights else {})
    engine = TrainerEngine(recipe, loaded(recipe))
    engine.begin()
    engine.train(engine.read(data(groups[0], staleness)))
    engine.step(0)
    engine.train(engine.read(data(groups[1], staleness)))
    found = engine.gradient()
    assert relative_error(found, wanted(engine, recipe, groups[1], staleness)) <= TOLERANCE
    metrics = engine.step(0)
    assert metrics["clip_fraction_low"] + metrics["clip_fraction_high"] > 0.1


@pytest.fixture(scope="module")
def alone(short: Recipe, groups: list[Group]) -> TrainerEngine:
    """One device after two batches, the second of stale samples."""
    engine = TrainerEngine(short, loaded(short))
    for batch in (0, 1):
        engine.begin()
        for group in groups:
            engine.train(engine.read(data(group, batch)))
            engine.step(batch)
    return engine


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_fluid_member_has_the_weights_of_one_trainer(
    short: Recipe, groups: list[Group], alone: TrainerEngine, max_staleness: int
) -> None:
    changes = {"schedule.mode": "fluid", "schedule.max_staleness": max_staleness}
    recipe = override(short, {"rollout.workers": 0, **changes})
    member = FluidEngine(recipe, loaded(recipe))
    for batch in (0, 1):
        for group in groups:
            member.begin()
            with member.in_training():
                member.train(member.read(data(group, batch)))
            total = member.term()
            take = member.take_concurrently if max_staleness else member.take
            take(batch, total, member.measured(total))
        if max_staleness:
            member.take_ahead()
    assert close(member, alone)


def close(found: TrainerEngine, engine: TrainerEngine) -> bool:
    parameters = (
        trained_parameters(found._loaded.model.transformer)
        if isinstance(found, FluidEngine)
        else None
    )
    mine = {n: each.detach() for n, each in (parameters or found._parameters).items()}
    theirs = {n: each.detach() for n, each in engine._parameters.items()}
    return relative_error(mine, theirs) <= TOLERANCE


def test_it_is_refused_where_all_weights_are_trained(short: Recipe) -> None:
    with pytest.raises(UserError, match=r"trainer.updates: the decoupled loss keeps the adapter"):
        override(short, {"model.trained": "full"})
