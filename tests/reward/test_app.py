"""A score that fails is a failure, never a number."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from services.reward.app import RewardApp, weighted_sum
from services.reward.scorer import WeightedScorer, build_scorers
from shared.errors import ScoringError, UserError
from shared.recipe_rewards import Scorer
from tests import examples

PROXY = Scorer(
    name="proxy",
    type="digit-probability",
    folder=Path(__file__).parents[2] / "models" / "digits-rewards",
)


class Constant:
    def __init__(self, *values: float) -> None:
        self._values = list(values)

    def score(self, images: object, metadata: object, /) -> list[float]:
        return self._values


def scores(*values: float) -> dict[str, tuple[float, ...]]:
    scorer = WeightedScorer("proxy", 1.0, Constant(*values))
    app = RewardApp([scorer], None, None, None)  # type: ignore[arg-type]
    media = safetensors.numpy.save({"images": np.zeros((2, 1, 8, 8), np.uint8)})
    return app._parts(media, examples.generated(examples.task()))


def test_one_finite_number_per_sample_is_a_score() -> None:
    assert scores(0.25, 0.5) == {"proxy": (0.25, 0.5)}


@pytest.mark.parametrize("values", [(0.5,), (0.5, float("nan")), (0.5, float("inf")), ()])
def test_anything_else_is_a_failure(values: tuple[float, ...]) -> None:
    with pytest.raises(ScoringError, match="proxy"):
        scores(*values)


def test_an_exception_in_a_scorer_is_a_failure_with_its_reason() -> None:
    scorer = build_scorers([PROXY])
    app = RewardApp(scorer, None, None, None)  # type: ignore[arg-type]
    media = safetensors.numpy.save({"images": np.zeros((2, 1, 8, 8), np.uint8)})
    with pytest.raises(ScoringError, match=r"proxy: ValueError: .*digit"):
        app._parts(media, examples.generated(examples.task()))  # its prompt names no digit


def test_rewards_are_the_weighted_sum_of_the_scores() -> None:
    scorers = [WeightedScorer("a", 2.0, Constant()), WeightedScorer("b", -0.5, Constant())]
    assert weighted_sum({"a": (1.0, 2.0), "b": (4.0, 0.0)}, scorers) == (0.0, 4.0)


def test_an_unknown_scorer_is_named_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"reward\.scorers\.x\.type.*digit-probability"):
        build_scorers([Scorer(name="x", type="magic")])
