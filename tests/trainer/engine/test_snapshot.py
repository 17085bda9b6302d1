"""What is copied at a commit: to memory that is kept, and true to the device."""

from services.trainer.fluid.engine import FluidEngine
from shared.diffusion.policy import load_policy
from shared.recipe.recipe import Recipe, override
from tests.stored import as_bytes, packed
from tests.trainer.batches import Group, make_batch, train_group


def train(engine: FluidEngine, groups: list[Group], batch: int) -> None:
    engine.begin()
    for each in groups:
        train_group(engine, each.cut([4]), each.conditions, each.advantages)
    total = engine.term()
    engine.take(batch, total, engine.measured(total))


def test_a_copy_is_what_the_engine_holds_in_the_same_memory_as_the_one_before(
    recipe: Recipe,
) -> None:
    recipe = override(recipe, {"trainer.ema": 0.5})
    engine = FluidEngine(recipe, load_policy(recipe, {"transformer"}, trains=True))
    groups = make_batch(recipe)
    train(engine, groups, 0)
    first = engine.weights()
    before = packed(first.weights)
    train(engine, groups, 1)
    second = engine.weights()
    for one, other in ((first.weights, second.weights), (first.checkpoint, second.checkpoint)):
        assert [p.stored.data_ptr() for p in one] == [p.stored.data_ptr() for p in other]  # type: ignore[attr-defined]
    assert as_bytes(second) == as_bytes(super(FluidEngine, engine).weights())
    assert packed(second.weights) != before
    assert second.digest == engine.weights_digest()
