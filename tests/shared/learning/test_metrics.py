"""Every metric of a step is in the table that people read."""

import pytest

from services.trainer.batch.measures import batch_metrics
from shared.learning.advantages import group_advantages
from shared.learning.metrics import (
    SCORER_METRICS,
    STEP_METRICS,
    nothing_trained,
    scorer_metric,
    split_metric,
)
from tests import examples
from tests.paths import ROOT

PAGE = ROOT / "docs" / "metrics.md"


def test_the_page_has_a_row_for_each_metric_and_no_other() -> None:
    section = PAGE.read_text().split("## Per optimizer step")[1].split("\n## ")[0]
    scorers = {scorer_metric(name, "<scorer>"): metric for name, metric in SCORER_METRICS.items()}
    metrics = {**STEP_METRICS, **scorers}
    wanted = {f"| `{name}` | {one.unit} | {one.meaning} |" for name, one in metrics.items()}
    assert {line for line in section.splitlines() if line.startswith("| `")} == wanted


def test_a_scorer_s_metric_names_it() -> None:
    assert split_metric(scorer_metric("reward_std", "text-2")) == ("reward_std", "text-2")
    assert split_metric("reward_std") == ("reward_std", "")


def step(*groups: tuple[float | None, ...]) -> dict[str, float]:
    """Return the metrics of a step of groups with these rewards."""
    trained = [
        examples.trained_group(number, rewards=rewards) for number, rewards in enumerate(groups)
    ]
    known = [[each for each in rewards if each is not None] for rewards in groups]
    zeros = [0.0] * len(groups[0])
    advantages = [each for some in known for each in (group_advantages(some) if some else zeros)]
    return batch_metrics(0, trained, advantages)


SPREAD = step((0.25, 0.5), (0.5, 0.75))
NO_REWARDS = "as no group has two rewards: "


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([SPREAD, SPREAD], []),
        ([{}], []),  # version 0
        ([SPREAD, step((1.0, 1.0), (0.5, 0.75))], []),
        ([step((0.3, 0.3), (0.3, 0.3))],
         [f"step 0 trained nothing (the newest: 0), {NO_REWARDS}the reward is constant: every "
          "sample has 0.3"]),
        ([SPREAD, step((0.3, 0.3), (0.3, 0.3))],
         [f"step 1 trained nothing (the newest: 1), {NO_REWARDS}the reward is constant: every "
          "sample has 0.3"]),
        ([SPREAD, step((1.0, 1.0), (1.0, 1.0)), step((1.0, 1.0), (1.0, 1.0))],
         [f"2 of 3 steps trained nothing (the newest: 2), {NO_REWARDS}the reward is saturated: "
          "every sample has 1, the best value of the run"]),
        ([step((0.1, 0.1), (0.7, 0.7)), SPREAD],
         [f"step 0 trained nothing (the newest: 0), {NO_REWARDS}the reward is constant within each "
          "group: the scorer does not tell samples apart"]),
        ([step((None, None), (None, None))],
         [f"step 0 trained nothing (the newest: 0), {NO_REWARDS}its samples could not be scored; "
          "`digenrl dlq list` has the reasons"]),
    ],
)  # fmt: skip
def test_a_step_that_trained_nothing_has_a_line_with_the_reason(
    steps: list[dict[str, float]], said: list[str]
) -> None:
    assert nothing_trained(list(enumerate(steps))) == said
