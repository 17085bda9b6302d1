"""Sums over rows, whoever has trained them, and rows without advantage that are not trained."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.policy import load_policy
from shared.diffusion.training.tally import Tally
from shared.errors import BatchFailed
from shared.recipe.recipe import Recipe, override
from tests.stored import as_bytes
from tests.trainer.batches import groups_of

SIZE = 4


def test_tallies_of_parts_add_up_to_that_of_all_rows() -> None:
    one = Tally(num_rows=3, ratio_sum=3.3, ratio_min=0.9, ratio_max=1.4, onpolicy_ratio_error=0.4)
    two = Tally(num_rows=5, ratio_sum=4.5, ratio_min=0.7, ratio_max=1.1, num_stale=5, loss=2.0)
    one.merge(two.as_dict())
    assert one == Tally(
        num_rows=8, ratio_sum=7.8, ratio_min=0.7, ratio_max=1.4,
        onpolicy_ratio_error=0.4, num_stale=5, loss=2.0,
    )  # fmt: skip


def test_the_effective_share_is_the_same_however_rows_are_tallied() -> None:
    """Two tallies have two weights of 1, 1, 1 and 3 each, which gives 6^2 / (4 x 12)."""
    one = Tally(num_rows=2, weight_sum=2.0, weight_square_sum=2.0)
    one.merge(Tally(num_rows=2, weight_sum=4.0, weight_square_sum=10.0).as_dict())
    assert one.effective_share == pytest.approx(0.75)
    one.skip(10)
    assert one.effective_share == pytest.approx(0.75), "rows without advantage have no weight"
    assert Tally().effective_share == 1


@pytest.mark.parametrize(("ratio", "fails"), [(0.4, True), (0.6, False), (1.9, False), (2.1, True)])
def test_ratios_that_are_all_too_far_from_one_fail_a_batch_whose_weights_are_equal(
    ratio: float, fails: bool
) -> None:
    weight = min(ratio, 2.0)
    tally = Tally(
        num_rows=8, ratio_sum=8 * ratio, weight_sum=8 * weight, weight_square_sum=8 * weight**2
    )
    with pytest.raises(BatchFailed, match=f"mean ratio is {ratio}") if fails else nullcontext():
        tally.check_weights(2.0)


def test_too_few_rows_that_count_fail_a_batch_whose_mean_ratio_is_well() -> None:
    """3 of 8 rows have the largest weight and the others none; 4 would do."""
    for counting, fails in ((3, True), (4, False)):
        sums = 2.0 * counting
        tally = Tally(num_rows=8, ratio_sum=sums, weight_sum=sums, weight_square_sum=4.0 * counting)
        with pytest.raises(BatchFailed, match="count as 38%") if fails else nullcontext():
            tally.check_weights(2.0)


@pytest.mark.parametrize("num_zeros", [1, 3])
def test_groups_without_advantage_that_are_not_trained_change_no_bit(
    recipe: Recipe, num_zeros: int
) -> None:
    """They come in the second batch, so that the optimizer has something to remember."""
    recipe = override(recipe, {"algorithm.kl_beta": 0.0})
    groups = groups_of(recipe)

    def second_step(*, skip: bool) -> tuple[TrainerEngine, dict[str, float]]:
        engine = TrainerEngine(recipe, load_policy(recipe, {"transformer"}, trains=True))
        engine.begin()
        for group in groups:
            engine.train(engine.read(group))
        engine.step(0)
        engine.begin()
        for number, group in enumerate(groups):
            is_zero = number < num_zeros
            if skip and is_zero:
                engine.skip(SIZE)
            else:
                advantages = (0.0,) * SIZE if is_zero else group.advantages
                engine.train(engine.read(replace(group, advantages=advantages)))
        return engine, engine.step(1)

    (trained, wanted), (skipped, found) = second_step(skip=False), second_step(skip=True)
    assert as_bytes(skipped.weights()) == as_bytes(trained.weights())
    said = ("loss", "grad_norm", "zero_advantage_fraction", "clip_fraction_low")
    assert {n: found[n] for n in said} == {n: wanted[n] for n in said}
    assert all(abs(value) < 10 for value in found.values())
