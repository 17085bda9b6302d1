"""A run whose steps are followed, and what it leaves besides."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shared.metrics import STEP_METRICS
from tests.e2e.conftest import StartRun

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]

STEPS = 3


def test_every_step_is_a_point_of_every_curve_and_the_adapter_has_a_card(
    start_run: StartRun, tmp_path: Path
) -> None:
    run = start_run("--steps", str(STEPS), "--tensorboard", str(tmp_path / "tb"))
    summary = run.finish()
    [folder] = (tmp_path / "tb").iterdir()
    curves = EventAccumulator(str(folder)).Reload()
    assert set(curves.Tags()["scalars"]) == {
        *STEP_METRICS, "reward_mean/proxy", "reward_std/proxy"
    }  # fmt: skip
    for tag in curves.Tags()["scalars"]:
        assert [event.step for event in curves.Scalars(tag)] == list(range(1, STEPS + 1)), tag
    rewards = [event.value for event in curves.Scalars("reward_mean")]
    assert rewards == pytest.approx(summary["reward_per_step"], abs=1e-5)

    card = (run.folder / "adapter" / "README.md").read_text()
    assert f"{STEPS} optimizer steps on {STEPS * 12} samples" in card
    assert (run.folder / "adapter" / "curve.png").stat().st_size > 10_000
