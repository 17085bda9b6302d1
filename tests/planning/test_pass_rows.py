"""What `digenrl check` says of the rows of training passes, of hosts and of encoders."""

from collections.abc import Mapping
from typing import Any

import pytest

from digenrl.planning.forecast import Forecast, forecast, lines
from digenrl.planning.runnable import HOST_GPUS
from services.scheduler.sim.profiled import simulate
from shared.recipe.recipe import NO_OPTIONS, load_recipe, override
from tests.local.test_check import SHIPPED, stated_devices
from tests.paths import RECIPES

IMAGES = ("qwen-image", "flux1-dev", "sd35-medium", "z-image", "qwen-image-edit")
ENCODED_BY_DEVICES = {"encoder.workers": 0, "encoder.device": None}


def on(
    name: str, devices: str, changes: Mapping[str, Any] = NO_OPTIONS, *, timing: bool = False
) -> Forecast:
    recipe = override(load_recipe(RECIPES / f"{name}.toml"), changes)
    return forecast(recipe, devices, None, host_gpus=HOST_GPUS, timing=timing)


@pytest.mark.parametrize("name", IMAGES)
def test_eight_rows_fit_a_card_of_80_gb(name: str) -> None:
    [line] = on(name, stated_devices(name)).pass_rows
    assert int(line.split(": ")[1].split()[0]) >= 8
    assert "times as long" not in line


def test_few_rows_are_named_with_what_they_cost_and_the_remedy() -> None:
    [line] = on("qwen-image", "h100=8", ENCODED_BY_DEVICES).pass_rows
    assert line == (
        "rows of a training pass on H100: 2 (3 fit); training takes 1.38 times as long as in "
        "passes of 8, with encoder.workers = 1"
    )


def test_encoders_work_ahead_of_a_run_and_are_charged() -> None:
    told = list(lines(on("qwen-image", "h100=8")))
    [line] = [each for each in told if each.startswith("prompts are encoded ahead")]
    assert "on 16 threads of a CPU: 45 take about 33 s; the first step waits for at most 24" in line
    aside = list(lines(on("qwen-image", "h200=8", ENCODED_BY_DEVICES)))
    assert not any("encoded ahead" in each for each in aside)


def test_a_host_that_launches_slowly_makes_steps_longer() -> None:
    recipe = load_recipe(RECIPES / "sd35-medium.1-gpu.toml")
    alone, slowed = (
        forecast(recipe, "h100=1", None, host_gpus=1, launch_us=each) for each in (None, "100,150")
    )
    assert alone.simulated is not None and slowed.simulated is not None
    assert slowed.simulated.step_seconds > 1.2 * alone.simulated.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_what_check_says_is_what_a_longer_run_takes(name: str) -> None:
    found = on(name, stated_devices(name), timing=True)
    own = found.own
    longer = simulate(
        found.profile, rollout=own.split.rollout, trainer=own.split.trainer,
        schedule=own.schedule, warm_up=4, batches=12, seed=1,
    )  # fmt: skip
    assert found.simulated is not None
    assert found.simulated.step_seconds == pytest.approx(longer.step_seconds, rel=0.03)
