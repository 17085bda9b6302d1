"""Where all weights are trained, KL and DPO compare them with those that the run began from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.recipe.recipe import Recipe, override
from tests.stored import read_back
from tests.trainer.batches import fresh_groups

KL = {
    "algorithm.kl_beta": 0.1, "algorithm.zero_advantages": "kept", "trainer.micro_batch": 2,
    "schedule.tsp_steps": 1,
}  # fmt: skip
DPO = {"algorithm.name": "dpo", "algorithm.best_of": None, "trainer.micro_batch": 1}
STEP = 3e-3


@pytest.fixture
def full(recipe: Recipe, wan: Path) -> Recipe:
    """Wan, some of whose weights are kept in float32."""
    return override(recipe, {
        "model.folder": str(wan), "model.trained": "full", "model.height": 32, "model.width": 32,
        "model.dtype": "bfloat16", "trainer.learning_rate": 1e-3, "schedule.fragment_size": 2,
        **KL,
    })  # fmt: skip


def loaded(recipe: Recipe) -> LoadedPolicy:
    return load_policy(recipe, {"transformer", "text", "decoder"}, trains=True)


def velocity(recipe: Recipe, policy: LoadedPolicy, *, of_reference: bool = False) -> Tensor:
    transaction = GradientTransaction.from_recipe(recipe, policy.model, policy.sets)
    shape = policy.model.latent_shape(height=32, width=32, frames=1)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    conditions = policy.model.encode("a three", guidance=recipe.model.guidance)
    found = transaction.reference_velocity if of_reference else transaction.velocity
    with torch.no_grad():
        return found(latents, torch.tensor([0.6]), conditions)


def train(recipe: Recipe, policy: LoadedPolicy, batches: int) -> tuple[TrainerEngine, float]:
    """Return the engine, and the KL of the last batch."""
    engine = TrainerEngine(recipe, policy)
    for batch in range(batches):
        groups = fresh_groups(recipe, policy)
        engine.begin()
        for group in groups:
            engine.train(engine.read(group))
        metrics = engine.step(batch)
    return engine, metrics["kl"]


async def test_the_reference_stays_what_the_run_began_from(full: Recipe) -> None:
    first, policy = loaded(full), loaded(full)
    base = velocity(full, first)
    assert train(full, loaded(full), 1)[1] == 0.0, "it has not moved yet"
    engine, kl = train(full, policy, 3)
    assert kl > 0
    assert velocity(full, policy, of_reference=True).equal(base)
    assert not velocity(full, policy).equal(base)
    saved, resumed = engine.weights(), loaded(full)
    again = TrainerEngine(full, resumed)
    await again.restore(read_back(saved.weights), read_back(saved.checkpoint))
    assert velocity(full, resumed).equal(velocity(full, policy))
    assert velocity(full, resumed, of_reference=True).equal(base)


@pytest.mark.parametrize("changes", [KL, DPO], ids=["KL", "DPO"])
def test_a_gradient_is_that_of_the_loss_about_the_reference(
    full: Recipe, changes: dict[str, Any]
) -> None:
    """By differences; without advantages the loss is the KL alone."""
    recipe = override(full, {"model.dtype": "float32", **changes})
    policy = loaded(recipe)
    engine = TrainerEngine(recipe, policy)
    data = fresh_groups(recipe, policy)[0]
    if recipe.algorithm.name != "dpo":
        data = replace(data, advantages=(0.0,) * len(data.advantages))
    with torch.no_grad():
        for number, each in enumerate(engine._parameters.values()):
            noise = torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
            each.add_(0.02 * noise)

    def loss(by: float = 0.0) -> float:
        with torch.no_grad():
            engine._parameters[name].add_(by * direction)
        engine.begin()
        engine.train(engine.read(data))
        with torch.no_grad():
            engine._parameters[name].sub_(by * direction)
        return engine.tally["loss"]

    name, direction = "", torch.zeros(())
    engine.begin()
    engine.train(engine.read(data))
    found = {n: p.grad.clone() for n, p in engine._parameters.items() if p.grad is not None}
    name = max(found, key=lambda each: float(found[each].norm()))
    size = float(found[name].norm())
    direction = found[name] / size
    assert (loss(STEP) - loss(-STEP)) / (2 * STEP) == pytest.approx(size, rel=0.05)


def test_blocks_that_come_from_the_host_compute_what_resident_ones_do(full: Recipe) -> None:
    policy = loaded(full)
    network, base = policy.model.transformer, velocity(full, policy)
    parameters = trained_parameters(network)
    with torch.no_grad():
        for each in parameters.values():
            each.add_(0.05)
    moved = velocity(full, policy)
    with policy.sets.comparing():
        assert velocity(full, policy).equal(base)
        inside = {n for n, each in network.named_parameters() if each is not parameters[n]}
        assert inside and not any(name.startswith("blocks.") for name in inside), "they went again"
    assert all(each is parameters[n] for n, each in network.named_parameters())
    assert velocity(full, policy).equal(moved) and not moved.equal(base)
