"""The noise schedule of a recipe."""

from typing import Any

import pytest

from shared.recipe.sampling import Sampling, make_sigmas

NUMBERS = (1.0, 0.9, 0.7, 0.4, 0.1, 0.0)


@pytest.mark.parametrize("sigmas", ["linear", "shifted", "default", NUMBERS])
def test_a_schedule_has_a_sigma_more_than_steps(sigmas: Any) -> None:
    steps = 5 if isinstance(sigmas, tuple) else 10
    found = make_sigmas(Sampling(steps=steps, sigmas=sigmas, window=1))
    assert len(found) == steps + 1 and (found[0], found[-1]) == (1, 0)
