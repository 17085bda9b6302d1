"""The demo's reward of one's own knows no image that the held-out judges were trained on."""

import runpy

import numpy as np

from bench.digits.data import load_halves
from tests.paths import ROOT


def test_its_means_are_those_of_the_half_that_no_judge_has_seen() -> None:
    means = runpy.run_path(str(ROOT / "recipes" / "my_reward.py"))["MEANS"]
    half, judges = load_halves()
    of_half, of_judges = (
        np.stack([(each.of_digit(digit)[:, 0] + 1).mean(0) * 8 for digit in range(10)])
        for each in (half, judges)
    )
    np.testing.assert_allclose(means, of_half, atol=1e-5)
    assert np.abs(means - of_judges).max() > 0.5
