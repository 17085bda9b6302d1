"""A reward that is added as CONTRIBUTING.md says: its class, and its entry in the table. Together
they are two files of the product."""

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
from tests.paths import DIGITS
from tests.product_copy import Edits, copy_product, run_in_copy

Images = npt.NDArray[np.uint8]
ADDITION: Edits = {
    "services/reward/scorers/contrast.py": (
        (
            "",
            """class Contrast:
    def __init__(self, folder):
        self._scale = float((folder / "scale.txt").read_text())

    def score(self, images, metadata):
        return (images.std((1, 2, 3)) * self._scale).tolist()
""",
        ),
    ),
    "services/reward/kinds.py": (
        (
            '    "digit-edit": ScorerKind(',
            """    "contrast": ScorerKind(
        "services.reward.scorers.contrast:Contrast", needs="folder", files=("scale.txt",),
        prompt_readers=(wanted_text,), network=Network(gib=2.0, image_gflop=8_000.0),
        hub=("contrast/network", ""),
    ),
    "digit-edit": ScorerKind(""",
        ),
    ),
}
"""A reward with all that a reward may have: a folder, a network, and needs of its prompts."""
PROGRAM = """
from pathlib import Path
import numpy as np
from typer.testing import CliRunner
from digenrl.commands.cli import app
from digenrl.hub import rewards
from digenrl.planning.scoring import image_tflop
from services.reward.scorer import build_scorers, check_prompts
from shared.errors import UserError
from shared.messages.contracts import Prompt
from shared.recipe.recipe import load_recipe

recipe = load_recipe(Path("recipe.toml"))
hub = Path("hub")
rewards._fetched = lambda model, *_: hub.joinpath(model)
list(rewards.fetch_rewards(recipe, print))
[scorer] = build_scorers(recipe.reward.scorers)
images = np.zeros((1, 3, 4, 4), np.uint8)
images[..., :2] = 2
print(scorer.score(images, [{}]), image_tflop(recipe, on_gpu=True))
try:
    check_prompts(recipe.reward.scorers[0], [Prompt(text="a fox")])
except UserError as error:
    print(error)
listed = CliRunner().invoke(app, ["rewards"]).stdout.splitlines()
print([line for line in listed if line.startswith("contrast")])
"""


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


def test_a_file_and_an_entry_are_scored_fetched_planned_checked_and_listed(tmp_path: Path) -> None:
    copy_product(tmp_path, ADDITION)
    model = tmp_path / "hub" / "contrast" / "network"
    model.mkdir(parents=True)
    (model / "scale.txt").write_text("0.5")
    table = '[[reward.scorers]]\nname = "mine"\ntype = "contrast"\nfolder = "mine"'
    (tmp_path / "recipe.toml").write_text(f'base = "{DIGITS}"\n{table}')
    scored, refused, listed = run_in_copy(tmp_path, PROGRAM)
    assert scored == "[0.5] 8.0"
    assert refused.startswith("reward.scorers.mine: the prompt 'a fox': the prompt has no text in")
    assert "needs folder, scores images" in listed
