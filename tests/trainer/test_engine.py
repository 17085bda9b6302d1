"""Commit and restore: what a resumed trainer does is what it would have done."""

import pytest
import torch

from services.trainer.engine import TrainerEngine, learning_rate
from shared.diffusion.tensors import pack, unpack
from shared.errors import ContractError, IntegrityError
from shared.recipe import Recipe, override
from tests.trainer.batches import Group, make_batch


@pytest.fixture(scope="module")
def groups(recipe: Recipe) -> list[Group]:
    return make_batch(recipe)


def train(engine: TrainerEngine, groups: list[Group], batch: int) -> None:
    engine.begin()
    for group in groups:
        engine.accumulate(group.cut([4]), group.conditions, group.advantages)
    engine.step(batch)


def test_a_restored_trainer_goes_on_to_the_last_bit(recipe: Recipe, groups: list[Group]) -> None:
    straight = TrainerEngine(recipe)
    for batch in range(3):
        train(straight, groups, batch)
        if batch == 1:
            saved = straight.weights()

    resumed = TrainerEngine(recipe)
    train(resumed, groups[:1], 0)  # something else was in its memory
    resumed.restore(saved.adapter, saved.checkpoint)
    assert resumed.weights_digest() == saved.digest
    train(resumed, groups, 2)
    assert resumed.weights() == straight.weights()


def test_a_step_changes_the_digest_of_the_weights_in_use(
    recipe: Recipe, groups: list[Group]
) -> None:
    engine = TrainerEngine(recipe)
    before = engine.weights_digest()
    train(engine, groups, 0)
    assert engine.weights_digest() != before


def test_a_gradient_that_is_not_finite_takes_no_step(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(recipe)
    before = engine.weights_digest()
    engine.begin()
    engine.accumulate(groups[0].cut([4]), groups[0].conditions, [float("nan")] * 4)
    assert engine.step(0)["skipped_not_finite"] == 1
    assert engine.weights_digest() == before


def test_a_checkpoint_of_another_adapter_is_refused(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(recipe)
    train(engine, groups, 0)
    saved = engine.weights()
    wider = TrainerEngine(override(recipe, {"model.lora": {"rank": 8, "alpha": 8.0}}))
    with pytest.raises(IntegrityError):
        wider.restore(saved.adapter, saved.checkpoint)
    tensors = unpack(saved.checkpoint)
    foreign = {key.replace("lora_A", "lora_X"): value for key, value in tensors.items()}
    with pytest.raises(IntegrityError):
        engine.restore(saved.adapter, pack(foreign))


def test_a_trajectory_of_another_schedule_is_refused(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(override(recipe, {"sampling.sigmas": "shifted"}))
    engine.begin()
    with pytest.raises(ContractError, match="sigmas"):
        engine.accumulate(groups[0].cut([4]), groups[0].conditions, groups[0].advantages)


def test_fragments_of_different_windows_are_no_group(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(recipe)
    engine.begin()
    mixed = [groups[0].cut([2, 2])[0], groups[1].cut([2, 2])[1]]
    with pytest.raises(ContractError):
        engine.accumulate(mixed, groups[0].conditions, groups[0].advantages)


def test_the_learning_rate_depends_on_the_batch_number_alone(recipe: Recipe) -> None:
    table = recipe.trainer.model_copy(update={"learning_rate": 2e-3, "decay_steps": 40})
    rates = [learning_rate(table, batch) for batch in (0, 20, 40, 100)]
    assert rates == pytest.approx([2e-3, 1e-3, 0.0, 0.0])
    constant = table.model_copy(update={"decay_steps": None})
    assert learning_rate(constant, 100) == 2e-3


def test_the_random_state_is_part_of_a_checkpoint(recipe: Recipe) -> None:
    engine = TrainerEngine(recipe)
    saved = engine.weights()
    expected = torch.rand(3)
    torch.manual_seed(12345)
    engine.restore(saved.adapter, saved.checkpoint)
    assert torch.equal(torch.rand(3), expected)
