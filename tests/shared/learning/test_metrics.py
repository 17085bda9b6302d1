"""Every metric of a step is in the table that people read."""

from shared.learning.metrics import SCORER_METRICS, STEP_METRICS, of_scorer, scorer_of
from tests.paths import ROOT

PAGE = ROOT / "docs" / "metrics.md"


def test_the_page_has_a_row_for_each_metric_and_no_other() -> None:
    section = PAGE.read_text().split("## Per optimizer step")[1].split("\n## ")[0]
    scorers = {of_scorer(name, "<scorer>"): metric for name, metric in SCORER_METRICS.items()}
    metrics = {**STEP_METRICS, **scorers}
    wanted = {f"| `{name}` | {one.unit} | {one.meaning} |" for name, one in metrics.items()}
    assert {line for line in section.splitlines() if line.startswith("| `")} == wanted


def test_a_scorer_s_metric_names_it() -> None:
    assert scorer_of(of_scorer("reward_std", "text-2")) == ("reward_std", "text-2")
    assert scorer_of("reward_std") == ("reward_std", "")
