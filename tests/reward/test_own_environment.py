"""A reward file in an environment of its own, with another numpy than ours."""

from pathlib import Path

import numpy as np
import pytest

from services.reward.scorer import build_scorers
from services.reward.scorers.python_file import PythonScorer
from shared.errors import UserError
from shared.recipe.rewards import ScorerTable

TEXT = """
# /// script
# dependencies = ["{package}"]
# ///
import numpy

def score(image):
    return int(numpy.__version__.split(".")[0]) + image.mean() / 1000
"""


@pytest.mark.night
@pytest.mark.timeout(600)
def test_the_same_file_runs_with_another_numpy(tmp_path: Path) -> None:
    found = {}
    for name, package in {"own": "numpy<2", "none": None}.items():
        file = tmp_path / f"{name}.py"
        text = TEXT.format(package=package)
        file.write_text(text if package else text.replace("# /// script", "# no script"))
        table = ScorerTable(name="mine", type="python", source=file, patience=60)
        [scorer] = build_scorers([table])
        found[name] = scorer.score(np.full((1, 3, 4, 4), 100, np.uint8), [{}])
        assert isinstance(scorer.scorer, PythonScorer)
        scorer.scorer.close()
    assert found == {"own": [1.1], "none": [int(np.__version__.split(".")[0]) + 0.1]}


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_package_that_is_none_is_named_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TEXT.format(package="numpy==0.0.1.dev999"))
    with pytest.raises(UserError, match=r"^reward\.scorers\.mine\.source: .*no environment with"):
        build_scorers([ScorerTable(name="mine", type="python", source=file)])
