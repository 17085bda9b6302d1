"""Runs whose rollout holds another network than the trainer's, or holds it elsewhere."""

from pathlib import Path

import pytest

from tests.e2e.local_run import SMALL, StartRun, recipe_of

pytestmark = pytest.mark.run


@pytest.mark.slow
def test_a_quantised_base_that_is_streamed_trains_with_the_ratio_one(
    tmp_path: Path, start_run: StartRun
) -> None:
    changes = SMALL | {
        "model.weights": "nf4",
        "trainer.memory": "streamed",
        "trainer.gradient_checkpointing": "offloaded",
    }
    summary = start_run("--steps", "4", recipe=recipe_of(tmp_path, changes)).finish()
    assert summary["commits"] == 4
    assert summary["onpolicy_ratio_error_max"] <= 1e-6
    assert summary["warnings"] == []


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_an_adapter_on_a_quantised_base_learns_the_digits(
    form: str, tmp_path: Path, start_run: StartRun
) -> None:
    """docs/large-models.md has three seeds, beside those of a base in float32."""
    summary = start_run(recipe=recipe_of(tmp_path, {"model.weights": form})).finish()
    assert summary["gold_accuracy_after"] >= 0.95
    assert summary["onpolicy_ratio_error_max"] <= 1e-6


@pytest.mark.slow
def test_w8a8_rollout_trains_with_its_ratios_measured_fresh_and_stale(
    tmp_path: Path, start_run: StartRun
) -> None:
    changes = SMALL | {
        "rollout.weights": "w8a8",
        "rollout.memory": "streamed",
        "schedule.max_staleness": 1,
        "schedule.tag": 1,
        "algorithm.stale_loss": "decoupled",
    }
    run = start_run("--steps", "4", recipe=recipe_of(tmp_path, changes))
    summary = run.finish()
    assert summary["commits"] == 4
    assert 1e-6 < summary["onpolicy_ratio_error_max"] < 1e-2, "that of the trainer is rounding"
    assert 0.99 < summary["effective_sample_share_min"] <= 1
    assert summary["warnings"] == []


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_w8a8_rollout_learns_the_digits(tmp_path: Path, start_run: StartRun) -> None:
    """docs/large-models.md has three seeds, beside those of a rollout in float32."""
    summary = start_run(recipe=recipe_of(tmp_path, {"rollout.weights": "w8a8"})).finish()
    assert summary["gold_accuracy_after"] >= 0.95
    assert summary["effective_sample_share_min"] > 0.99
