"""The noise schedule of a recipe, with a tail of fewer steps and without."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import UserError
from shared.models.sigmas import default_sigmas, linear_sigmas, with_tail
from shared.recipe.grid import make_sigmas
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.recipe.sampling import Sampling, check_sigmas
from tests.paths import DIGITS

NUMBERS = (1.0, 0.9, 0.7, 0.4, 0.1, 0.0)


def recipe(**changes: Any) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_recipe(DIGITS), dotted)


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


@pytest.mark.parametrize("sigmas", ["linear", "shifted", "default", NUMBERS])
def test_a_tail_begins_where_the_last_window_ends(sigmas: Any) -> None:
    steps = 5 if isinstance(sigmas, tuple) else 10
    whole = Sampling(steps=steps, sigmas=sigmas, window=1, first_window_starts=(0, 1))
    coarse = whole.model_copy(update={"tail": 2})
    assert coarse.num_steps == 4 == len(make_sigmas(coarse)) - 1
    assert make_sigmas(coarse)[:3] == make_sigmas(whole)[:3]
    assert whole.num_steps == steps == len(make_sigmas(whole)) - 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tail": 5}, "sampling.tail: 5 steps in place of 5 are not fewer; at most 4"),
        ({"tail": 1, "first_window_starts": (0, 6)}, "sampling.tail: windows reach step 8 of 10"),
        ({"tail": 0}, "sampling.tail: input should be greater than 0"),
        ({"tail": 2}, "sampling.tail: set tail_correlation to what `python -m bench tail-check"),
        ({"tail": 2, "tail_correlation": 0.85}, "sampling.tail_correlation: input should be great"),
    ],
)
def test_a_tail_that_replaces_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        recipe(**{f"sampling__{key}": value for key, value in changes.items()})
    assert said in str(raised.value).replace("Input", "input") and "\n" not in str(raised.value)


def test_windows_that_move_to_the_end_leave_no_tail() -> None:
    with pytest.raises(UserError, match=r"sampling\.tail: windows reach step 8 of 10, which leave"):
        recipe(algorithm__name="mix-grpo", sampling__tail=2, sampling__first_window_starts=(0, 6))


def test_an_algorithm_without_a_window_has_no_tail() -> None:
    with pytest.raises(UserError, match=r"sampling\.tail: follows the last window, and diffusion-"):
        recipe(
            algorithm__name="diffusion-nft", algorithm__kl_beta=0.0, sampling__tail=2,
            sampling__tail_correlation=0.9, sampling__windows="group",
            sampling__first_window_starts=(0, 0),
        )  # fmt: skip


def test_evaluations_and_samples_for_people_take_all_steps() -> None:
    from digenrl.evaluation.settings import as_evaluated

    coarse = recipe(sampling__tail=2, sampling__tail_correlation=0.95)
    assert coarse.sampling.num_steps == 7
    assert as_evaluated(coarse).sampling.num_steps == 10
    assert coarse.with_whole_grid == recipe()
