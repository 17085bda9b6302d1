"""What a plan advises can be typed into a recipe, of hosts that one may have."""

import json

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.planning.plan import costs_and_use
from digenrl.planning.planner import PlanResult, RecipeSupport, list_candidates, plan_split
from digenrl.planning.runnable import recipe_keys, why_not
from digenrl.planning.symmetry import part_of
from digenrl.trace.memory import with_memory
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.split import Split
from shared.recipe.recipe import load_recipe, override
from shared.recipe.schedule import RunSchedule
from tests.paths import RECIPES

FLUX = load_profile("flux1-dev")
TAG, OFF = RunSchedule(tag=5), RunSchedule(tag=0)
QUICK = 0.1


ROLES = {"schedule.mode": "disaggregated", "rollout.workers": 1}


def planned(recipe: str, profile: str, devices: dict[str, int], host_gpus: int) -> PlanResult:
    loaded = override(load_recipe(RECIPES / f"{recipe}.toml"), ROLES)
    costs = with_memory(*costs_and_use(loaded, profile))
    return plan_split(costs, devices, loaded.run_schedule, effort=QUICK, host_gpus=host_gpus)


@pytest.mark.parametrize(
    ("split", "schedule", "reason"),
    [
        (Split({"H100": 8}, {"H100": 24}), TAG, None),
        (Split({"A100": 9}, {"A100": 7, "H100": 8}), OFF, None),
        (Split({}, {"H100": 9}), RunSchedule(mode="colocated"), None),
        (Split({"4090": 1}, {"H100": 2}), OFF, "4090 has 23 GiB"),
    ],
)
def test_members_are_of_any_hosts_and_kinds_that_hold_the_model(
    split: Split, schedule: RunSchedule, reason: str | None
) -> None:
    found = why_not(FLUX, split, schedule)
    assert found == reason if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("recipe", "profile", "devices", "host_gpus"),
    [
        ("flux1-dev", "flux1-dev", {"H100": 16, "A100": 16}, 8),
        ("sd35-medium.mixed", "sd35-medium", {"A100": 4, "H100": 4}, 4),
        ("qwen-image", "qwen-image", {"H100": 16}, 4),
        ("wan2.1-14b.1-gpu", "wan2.1-14b", {"H100": 8}, 8),
    ],
)
def test_every_row_of_a_plan_is_a_recipe(
    recipe: str, profile: str, devices: dict[str, int], host_gpus: int
) -> None:
    found = planned(recipe, profile, devices, host_gpus)
    assert found.choices
    for choice in found.choices:
        keys = recipe_keys(choice.split, choice.schedule)
        typed = override(load_recipe(RECIPES / f"{recipe}.toml"), {**ROLES, **keys})
        assert typed.run_schedule.trainer_generates == choice.schedule.trainer_generates
        trains = typed.trainer.devices
        assert trains + typed.rollout.workers == sum(choice.split.devices.values())


def test_all_weights_are_planned_in_shard_groups_that_generate() -> None:
    words = ["plan", "--profile", "flux1-dev", "--devices", "h100=8", "--variant", "full"]
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    best = json.loads(result.output)["choices"][0]
    assert best["recipe"]["trainer.shard_devices"] == best["recipe"]["trainer.devices"] == 8
    assert best["recipe"]["schedule.mode"] == "fluid" and best["recipe"]["rollout.workers"] == 0


def test_of_fragments_that_are_forecast_equal_the_larger_ones_are_looked_at_first() -> None:
    """Members that are always behind make all sizes equal, and small ones cost messages."""
    ahead, split = RunSchedule(tag=0, max_staleness=1), Split({"H100": 16}, {"H100": 8})
    part = part_of(FLUX, split.devices)
    found = list_candidates(part, {"disaggregated": ahead}, RecipeSupport(part, 8, None))
    of_split = [each.size for each in found if each.split == split]
    assert of_split[0] == FLUX.shape.group_size
