"""A run's goal is reached by two evaluations in a row."""

from pathlib import Path

import pytest

from shared.errors import UserError
from shared.recipe.recipe import load_recipe
from shared.run.evaluations import reached
from tests.shared.recipe.recipes import changed


def test_the_goal_is_reached_by_two_evaluations_in_a_row() -> None:
    assert reached([], 0.9) is None
    assert reached([{0: 0.95, 2: 0.5, 4: 0.9}], 0.9) is None
    assert reached([{4: 0.9, 0: 0.5, 2: 0.91, 6: 0.2}], 0.9) == 4
    assert reached([{2: 0.9}, {4: 0.9}], 0.9) is None, "measured with other settings"
    assert reached([{2: 0.9, 8: 0.9}, {4: 0.9, 6: 0.9}], 0.9) == 6


def test_a_goal_needs_evaluations_during_the_run(tmp_path: Path) -> None:
    path = changed(tmp_path, "[run]\n", "[run]\nstop_at = 0.95\n")
    with pytest.raises(UserError, match=r"run\.stop_at: is reached by gold rewards .*every"):
        load_recipe(path)
    path.write_text(path.read_text().replace("[evaluation]\n", "[evaluation]\nevery = 2\n"))
    assert load_recipe(path).run.stop_at == 0.95
