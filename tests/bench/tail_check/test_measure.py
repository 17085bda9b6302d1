"""What a tail does to the digits' rewards, measured with the demo's model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tail_check.commands import lines
from bench.tail_check.measure import tail_check, with_coarse_tail, with_tail
from digenrl.evaluation.settings import as_evaluated
from shared.models.sigmas import default_sigmas, linear_sigmas
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.recipe.sampling import check_sigmas
from tests.paths import DIGITS


def recipe(last: int = 2) -> Recipe:
    return override(
        load_recipe(DIGITS),
        {
            "sampling.steps": 10, "sampling.sigmas": "linear", "sampling.window": 1,
            "sampling.first_window_starts": (0, last), "sampling.shared_noise": True,
        },
    )  # fmt: skip


@given(st.integers(3, 40), st.integers(0, 30), st.integers(1, 30))
def test_a_tail_keeps_what_is_before_it_and_ends_at_0(steps: int, start: int, tail: int) -> None:
    start, whole = min(start, steps - 2), default_sigmas(steps, 3.0)
    found = with_tail(whole, start, tail)
    assert found[: start + 1] == whole[: start + 1]
    check_sigmas("sigmas", found, start + tail)
    if tail == steps - start:
        assert found == pytest.approx(whole)


def test_the_tail_of_a_linear_grid_is_linear() -> None:
    found = with_tail(linear_sigmas(10), 4, 3)
    assert found == pytest.approx((1, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2, 0))


def test_a_tail_begins_where_the_last_window_ends_and_evaluations_take_all_steps() -> None:
    coarse = with_coarse_tail(recipe(), 4)
    assert coarse.sampling.steps == 7
    assert as_evaluated(coarse).sampling.sigmas == "linear"
    assert as_evaluated(coarse).sampling.steps == 10


def test_a_tail_ranks_as_all_steps_do_if_it_is_not_too_coarse() -> None:
    whole, early = recipe(), recipe(last=0)
    good, bad = with_coarse_tail(whole, 4), with_coarse_tail(early, 1)
    found, worse = (
        tail_check(each, tailed, num_prompts=2, num_samples=6, progress=lambda done, of: None)
        for each, tailed in ((whole, good), (early, bad))
    )
    assert found.reward.groups == 2
    assert found.reward.within is not None and found.reward.within >= 0.9
    assert worse.reward.within is not None and worse.reward.within < 0.9
    said = list(lines(found, whole, good))
    assert said[0].startswith(f"{good.model.name}: 7 steps against all 10, 2 prompts")
    assert said[2].startswith("reward (decides)")
    assert said[-1].startswith("for the recipe: sampling.steps = 7, sampling.sigmas = [1, 0.9, 0.8")
    assert list(lines(worse, early, bad))[-1].startswith("less than 0.9")
