"""Whether a step of staleness pays, decided by costs before a run begins."""

from typing import Any

import pytest

from digenrl.planning.work import sample_seconds, work_line
from services.scheduler.costs.counted import DEVICE, counted_profile
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.recipes import batch_shape, fit_to_recipe
from services.scheduler.costs.split import Split
from services.scheduler.sim.profiled import simulate
from services.scheduler.sim.staleness import (
    STALENESS_STEP_FACTOR,
    decide,
    decide_at_start,
    decide_by_seconds,
    line,
)
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import DIGITS

TODAY = {
    "batch.groups": 10, "batch.group_size": 24, "sampling.steps": 10, "sampling.sigmas": "linear",
    "sampling.window": 3, "sampling.first_window_starts": (0, 2), "sampling.shared_noise": False,
    "trainer.updates": 1, "trainer.micro_batch": "auto", "schedule.fragment_size": "auto",
    "schedule.max_staleness": "auto", "algorithm.kl_beta": 1.0,
}  # fmt: skip
SHARED = {
    **TODAY, "batch.groups": 20, "batch.group_size": 12, "sampling.steps": 6, "sampling.window": 1,
    "sampling.sigmas": (1, 0.9, 0.8, 0.7, 0.5, 0.25, 0), "sampling.shared_noise": True,
}  # fmt: skip


def digits(keys: dict[str, Any], workers: int, **changes: Any) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_recipe(DIGITS), {**keys, "rollout.workers": workers, **dotted})


def test_where_training_is_little_a_step_of_staleness_gains_little() -> None:
    """The trainer's share is .07 and one device generates: no overlap gains more than 1.08."""
    found = decide_at_start(digits(SHARED, 1))
    assert found.max_staleness == 0
    assert found.gain is not None and 1 <= found.gain < 1.08
    assert line(found).startswith('schedule.max_staleness = "auto" is 0: a step of staleness makes')
    assert "counted rows of the network" in found.reason


def test_it_pays_where_as_many_devices_generate_as_one_trainer_keeps_up_with() -> None:
    gains = {number: decide_at_start(digits(SHARED, number)) for number in (1, 4, 12, 24)}
    assert [found.max_staleness for found in gains.values()] == [0, 0, 1, 0]
    assert "1.27 times as fast" in gains[12].reason


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_where_the_trainer_is_the_bottleneck_it_does_not_pay(workers: int) -> None:
    assert decide_at_start(digits(TODAY, workers)).max_staleness == 0


@pytest.mark.parametrize("workers", [1, 12])
def test_what_is_forecast_is_what_the_simulator_shows(workers: int) -> None:
    recipe = digits(SHARED, workers, schedule__tag="off", schedule__fragment_size=12)
    profile = counted_profile(batch_shape(recipe), forward_only_passes=1)
    split = Split({DEVICE: workers}, {DEVICE: 1})
    schedule = recipe.run_schedule
    strict, ahead = (
        simulate(
            profile,
            rollout=split.rollout,
            trainer=split.trainer,
            schedule=schedule.changed(max_staleness=each),
            batches=4,
            seed=None,
        ).step_seconds
        for each in (0, 1)
    )
    found = decide(recipe, profile, split)
    assert found is not None and found.gain is not None
    assert found.gain == pytest.approx(strict / ahead, rel=0.1)


def test_the_decision_is_one_of_seconds() -> None:
    assert decide_by_seconds(STALENESS_STEP_FACTOR * 1.01, 1.0, by="x").max_staleness == 1
    assert decide_by_seconds(STALENESS_STEP_FACTOR * 0.99, 1.0, by="x").max_staleness == 0
    assert decide_by_seconds(2.0, 1.0, by="a clock").reason == (
        "a step of staleness makes steps 2.00 times as fast, by a clock, and takes 1.25 times as "
        "many"
    )


def test_modes_without_asynchrony_and_models_of_a_profile() -> None:
    found = decide_at_start(digits(SHARED, 2, schedule__mode="sequential"))
    assert (found.max_staleness, found.gain) == (0, None)
    recipe = digits(SHARED, 4).model_copy(
        update={
            "model": load_recipe(DIGITS).model.model_copy(update={"folder": DIGITS / "FLUX.1-dev"})
        }
    )
    assert "the cost profile flux1-dev" in decide_at_start(recipe).reason


def test_the_share_of_training_falls_where_a_group_shares_its_noise() -> None:
    """It falls from .55 to .07 of the digits' rows of the network."""
    costs = load_profile("sd35-medium")
    today, shared = digits(TODAY, 2), digits(SHARED, 2)
    before, after = (work_line(fit_to_recipe(costs, each), each) for each in (today, shared))
    assert "10.00 rows of the network to generate and 12.00 to train (55%," in before
    assert "4.17 rows of the network to generate and 0.33 to train (7%," in after
    assert "computes 2 of 6 steps once" in after and "computes 1 of 1 trained steps once" in after
    assert "once" not in before
    size = {"model__height": 1024, "model__width": 1024}
    large = [fit_to_recipe(costs, digits(keys, 2, **size)) for keys in (TODAY, SHARED)]
    trained = [sample_seconds(each)["train"] for each in large]
    assert 15 < trained[0] / trained[1] < 36, "calls take something, however few rows they have"
