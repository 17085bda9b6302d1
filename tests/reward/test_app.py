"""A score that fails is a failure, never a number."""

import io

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from PIL import Image
from prometheus_client import REGISTRY

from services.reward.app import RewardApp, weighted_sum
from services.reward.scorer import Metadata, Scorer, WeightedScorer, build_scorers
from shared.errors import ScoringError, UserError
from shared.recipe import rewards as recipe_rewards
from tests import examples
from tests.paths import ROOT
from tests.reward.on_bus import context_alone

PROXY = recipe_rewards.ScorerTable(
    name="proxy", type="digit-probability", folder=ROOT / "models" / "digits-rewards"
)


class Constant:
    def __init__(self, *values: float) -> None:
        self._values = list(values)

    def score(self, images: object, metadata: object, /) -> list[float]:
        return self._values


class Mean:
    """Scores by the mean of the pixels, and refuses black images a number of times."""

    def __init__(self, num_fears: int) -> None:
        self.num_fears = num_fears
        self.sizes: list[int] = []

    def score(self, images: npt.NDArray[np.uint8], metadata: object, /) -> list[float]:
        self.sizes.append(len(images))
        if self.num_fears and any(not image.any() for image in images):
            self.num_fears -= 1
            raise ValueError("it is black")
        return [float(image.mean()) for image in images]


def scores(
    scorer: Scorer, *brightness: int, attempt: int = 0, source: bytes | None = None
) -> dict[str, tuple[float | None, ...]]:
    app = RewardApp([WeightedScorer("proxy", 1.0, scorer)], context_alone())
    images = np.stack([np.full((1, 8, 8), each, np.uint8) for each in brightness])
    event = examples.generated(examples.task())
    fragment = event.fragment.model_copy(
        update={"attempt": attempt, "num_samples": len(brightness)}
    )
    media = safetensors.numpy.save({"images": images})
    outcomes = app._outcomes(media, event.model_copy(update={"fragment": fragment}), source)
    return {name: outcome.scores for name, outcome in outcomes.items()}


class Changed:
    """Compares each sample with the image that it edits."""

    def score(self, images: npt.NDArray[np.uint8], metadata: Metadata) -> list[float]:
        pairs = zip(images, metadata, strict=True)
        return [float(np.abs(image - told["source_images"][0]).mean()) for image, told in pairs]  # type: ignore[index]


def test_a_scorer_gets_the_source_image_at_the_size_of_the_sample() -> None:
    out = io.BytesIO()
    Image.new("RGB", (20, 20), (3, 3, 3)).save(out, format="PNG")
    assert scores(Changed(), 5, 3, source=out.getvalue()) == {"proxy": (2.0, 0.0)}


def test_one_finite_number_per_sample_is_a_score() -> None:
    assert scores(Constant(0.25, 0.5), 1, 1) == {"proxy": (0.25, 0.5)}


@pytest.mark.parametrize("values", [(0.5,), (), (0.5, 0.5, 0.5)])
def test_another_number_of_scores_is_a_failure(values: tuple[float, ...]) -> None:
    with pytest.raises(ScoringError, match="proxy"):
        scores(Constant(*values), 1, 1)


def test_what_fails_once_is_tried_again_alone() -> None:
    scorer = Mean(num_fears=2)
    assert scores(scorer, 7, 0, 9) == {"proxy": (7.0, 0.0, 9.0)}
    assert scorer.sizes == [3, 1, 1, 1, 1]


def test_a_sample_that_fails_again_has_no_score_and_the_others_have_theirs() -> None:
    before = REGISTRY.get_sample_value("digenrl_samples_failed_total", {"scorer": "proxy"}) or 0
    assert scores(Mean(num_fears=99), 7, 0, 9) == {"proxy": (7.0, None, 9.0)}
    after = REGISTRY.get_sample_value("digenrl_samples_failed_total", {"scorer": "proxy"})
    assert after == before + 1
    for value in (float("nan"), float("inf")):
        assert scores(Finite(value), 7, 0) == {"proxy": (7.0, None)}


def test_a_fragment_without_any_score_is_tried_anew_but_not_for_ever() -> None:
    with pytest.raises(ScoringError, match="proxy: ValueError: it is black"):
        scores(Mean(num_fears=99), 0, 0)
    assert scores(Mean(num_fears=99), 0, 0, attempt=2) == {"proxy": (None, None)}


class Finite:
    """Gives ``value`` for black images."""

    def __init__(self, value: float) -> None:
        self._value = value

    def score(self, images: npt.NDArray[np.uint8], metadata: object, /) -> list[float]:
        return [float(image.mean()) if image.any() else self._value for image in images]


def test_an_exception_in_a_scorer_is_a_failure_with_its_reason() -> None:
    scorer = build_scorers([PROXY])
    app = RewardApp(scorer, context_alone())
    media = safetensors.numpy.save({"images": np.zeros((2, 1, 8, 8), np.uint8)})
    with pytest.raises(ScoringError, match=r"proxy: ValueError: .*digit"):
        app._outcomes(media, examples.generated(examples.task()))  # its prompt names no digit


def test_rewards_are_the_weighted_sum_of_the_scores() -> None:
    scorers = [WeightedScorer("a", 2.0, Constant()), WeightedScorer("b", -0.5, Constant())]
    assert weighted_sum({"a": (1.0, 2.0), "b": (4.0, 0.0)}, scorers) == (0.0, 4.0)
    assert weighted_sum({"a": (1.0, 2.0), "b": (None, 0.0)}, scorers) == (None, 4.0)


def test_an_unknown_scorer_is_named_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"reward\.scorers\.x\.type.*digit-probability"):
        build_scorers([recipe_rewards.ScorerTable(name="x", type="magic")])
