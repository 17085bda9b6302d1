"""A reward that is added as CONTRIBUTING.md says: its class, and its line in the table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import numpy.typing as npt
import pytest

from services.reward.kinds import KINDS, ScorerKind
from services.reward.scorer import build_scorers, check_packages, scorer_kind
from shared.errors import UserError
from shared.recipe.rewards import ScorerTable

Images = npt.NDArray[np.uint8]


class Brightness:
    """Scores the mean of all pixels, from 0 to 1."""

    def score(self, images: Images, metadata: Sequence[Mapping[str, object]]) -> list[float]:
        scores: list[float] = (images.reshape(len(images), -1).mean(1) / 255).tolist()
        return scores


class AboveThreshold(Brightness):
    """Scores how much brighter an image is than a number that a file holds."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "threshold.txt").read_text()
        if not text.strip():
            raise UserError(f"folder: {folder} has no threshold")
        self._threshold = float(text)

    def score(self, images: Images, metadata: Sequence[Mapping[str, object]]) -> list[float]:
        return [score - self._threshold for score in super().score(images, metadata)]


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "brightness", ScorerKind(f"{__name__}:Brightness"))
    monkeypatch.setitem(
        KINDS,
        "above-threshold",
        ScorerKind(f"{__name__}:AboveThreshold", needs="folder", files=("threshold.txt",)),
    )


def test_a_recipe_can_name_it() -> None:
    recipe = ScorerTable(name="bright", type="brightness", weight=2.0)
    check_packages(recipe)
    [scorer] = build_scorers([recipe])
    images = np.stack([np.full((3, 4, 4), level, np.uint8) for level in (0, 255)])
    assert (scorer.name, scorer.weight) == ("bright", 2.0)
    assert scorer.score(images, [{}, {}]) == [0.0, 1.0]
    assert scorer.score(np.stack([images]), [{}]) == [0.5], "a video scores the mean of its frames"


def test_what_it_needs_is_checked_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"scorers\.x\.folder: above-threshold needs the folder"):
        scorer_kind(ScorerTable(name="x", type="above-threshold"))
    recipe = ScorerTable(name="x", type="above-threshold", folder=tmp_path)
    with pytest.raises(UserError, match=r"scorers\.x\.folder: .* has no threshold\.txt"):
        scorer_kind(recipe)
    (tmp_path / "threshold.txt").write_text(" ")
    with pytest.raises(UserError, match=r"reward\.scorers\.x\.folder: .* has no threshold"):
        build_scorers([recipe])
    (tmp_path / "threshold.txt").write_text("0.25")
    [scorer] = build_scorers([recipe])
    assert scorer.score(np.full((1, 3, 4, 4), 255, np.uint8), [{}]) == [0.75]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_line_of_the_table_names_a_class_that_scores(kind: ScorerKind) -> None:
    assert callable(resolve_name(kind.scorer).score)
