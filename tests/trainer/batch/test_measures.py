"""What is said of a batch: exact on numbers that one can add up by hand."""

import math

import pytest
import torch

from services.trainer.batch.measures import batch_metrics
from shared.diffusion.training.loss import Surrogate
from shared.diffusion.training.row_sums import RowSums
from shared.diffusion.training.tally import Tally
from shared.run.commits import TrainedGroup
from tests import examples


def group(
    number: int, version: int, dropped: str | None = None, **scores: tuple[float | None, ...]
) -> TrainedGroup:
    rewards = tuple(
        None if None in given else math.fsum(score for score in given if score is not None)
        for given in zip(*scores.values(), strict=True)
    )
    return examples.trained_group(number, version, rewards, parts=scores, dropped=dropped)


def test_rewards_are_said_together_and_by_scorer() -> None:
    groups = [
        group(0, 4, taste=(1.0, 3.0), text=(0.0, 0.0)),
        group(1, 3, taste=(5.0, 7.0), text=(1.0, 1.0)),
    ]
    metrics = batch_metrics(4, groups, [-1.0, 0.5, 0.5, 2.0])
    assert metrics == pytest.approx({
        "reward_mean": 4.5, "reward_std": math.sqrt((3.5**2 + 1.5**2 + 1.5**2 + 3.5**2) / 4),
        "reward_mean/taste": 4.0, "reward_std/taste": math.sqrt(5.0),
        "reward_mean/text": 0.5, "reward_std/text": 0.5,
        "advantage_mean": 0.5, "advantage_std": math.sqrt(4.5 / 4),
        "failed_fraction": 0.0, "dropped_groups": 0.0,
        "advantage_min": -1.0, "advantage_max": 2.0, "staleness_mean": 0.5,
    })  # fmt: skip


def tally(*ratios: float, staleness: int = 1) -> Tally:
    ratio = torch.tensor(ratios)
    found, sums = Tally(), RowSums()
    surrogate = Surrogate(ratio, ratio, ratio, torch.ones_like(ratio))
    sums.record(surrogate, torch.ones_like(ratio), clip_range=0.1, staleness=staleness)
    found.count(len(ratios), staleness=staleness)
    sums.move_to(found)
    return found


def test_the_approximate_kl_is_a_mean_over_the_rows_that_were_seen() -> None:
    both = tally(1.0, 2.0)
    both.merge(tally(0.5).as_dict())
    both.skip(7)
    wanted = ((1 - math.log(2)) + (math.log(2) - 0.5)) / 3
    assert both.metrics()["approx_kl"] == pytest.approx(wanted)
    assert tally(1.0, 1.0, staleness=0).metrics()["approx_kl"] == 0
    assert tally(1 + 1e-4).metrics()["approx_kl"] == pytest.approx(5e-9, rel=1e-2)
    assert Tally().metrics()["approx_kl"] == 0


def test_a_ratio_that_has_underflowed_leaves_it_finite() -> None:
    assert math.isfinite(tally(0.0, 1.0).metrics()["approx_kl"])


def test_samples_without_a_score_count_in_no_mean() -> None:
    groups = [group(0, 4, taste=(1.0, None)), group(1, 4, "2 of 2 failed", taste=(None, None))]
    metrics = batch_metrics(4, groups, [0.0] * 4)
    assert (metrics["reward_mean"], metrics["reward_mean/taste"]) == (1.0, 1.0)
    assert (metrics["failed_fraction"], metrics["dropped_groups"]) == (0.75, 1.0)
    nothing = batch_metrics(4, groups[1:], [0.0] * 2)
    assert (nothing["reward_mean"], nothing["failed_fraction"]) == (0.0, 1.0)


def test_means_do_not_depend_on_how_python_adds_numbers() -> None:
    """From 3.12 on `sum` makes good what floats lose."""
    spread = (1e16, 1.0, -1e16, 1.0)
    metrics = batch_metrics(4, [group(0, 4, taste=spread)], spread)
    assert metrics["reward_mean"] == metrics["advantage_mean"] == 0.5
