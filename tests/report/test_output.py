"""The report shows how far it is, and its table names the rewards."""

import io

from rich.console import Console

from digenrl.report.output import EvaluationBar, figure_fields
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS


def test_an_evaluation_shows_how_far_it_is() -> None:
    screen = io.StringIO()
    with EvaluationBar(
        Console(file=screen, force_terminal=True, color_system=None, width=120), 4
    ) as shown:
        shown.version(0)
        shown.progress(4, 10)
        shown.progress(10, 10)
    assert "evaluating version 0" in screen.getvalue() and "10/10 prompts" in screen.getvalue()
    plain = io.StringIO()
    with EvaluationBar(Console(file=plain), 4) as shown:
        shown.version(3)
        shown.progress(4, 10)
        assert plain.getvalue() == "evaluating version 3\n"
        shown.progress(10, 10)
    assert plain.getvalue().splitlines() == [
        "evaluating version 3", "scoring 40 samples (evaluation.samples_per_prompt = 4)",
    ]  # fmt: skip


def test_the_table_names_the_rewards_that_were_used() -> None:
    digits = load_recipe(DIGITS)
    assert list(figure_fields(digits))[:2] == [
        "training reward: digit-probability",
        "proxy accuracy (training classifier)",
    ]
    own = [
        {"name": "mine", "type": "remote", "url": "http://scorers:8100"},
        {"name": "round", "type": "python", "source": "own.py:score"},
        {"name": "calm", "type": "jpeg-compressibility", "weight": 0.5},
    ]
    assert list(figure_fields(override(digits, {"reward.scorers": own})))[:2] == [
        "training reward: remote + round + 0.5 x jpeg-compressibility",
        "proxy accuracy (classifier, not trained on)",
    ]
