"""Plans of many devices against a fixed sweep in the simulator; `auto` against planned steps."""

import time
from typing import Literal

import pytest

from digenrl.planning.planner import plan_split
from digenrl.planning.scheduler_load import scheduler_seconds
from digenrl.planning.symmetry import part_of
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.split import Split
from services.scheduler.sim.profiled import simulate
from shared.recipe.schedule import RunSchedule
from tests.planning.sweep import Case, seconds, setting_of, settings, simulated

AS_GOOD = 1.03


@pytest.mark.parametrize(
    ("devices", "num_splits", "max_staleness"),
    [
        (4, 3, 0),
        *(pytest.param(8, 3, staleness, marks=pytest.mark.slow) for staleness in (0, 1)),
        *(
            pytest.param(
                devices, 8, staleness, marks=[pytest.mark.night, pytest.mark.timeout(1200)]
            )
            for devices in (64, 256)
            for staleness in (0, 1)
        ),
    ],
)
def test_no_setting_of_a_sweep_is_clearly_faster_than_a_plan(
    devices: int, num_splits: int, max_staleness: Literal[0, 1]
) -> None:
    case = Case(devices, max_staleness)
    best, swept = setting_of(case.plan().best), settings(case, num_splits)
    assert case.in_full(best) <= AS_GOOD * min(simulated(case, swept).values())


@pytest.mark.parametrize("devices", [64, 256, 1024, 4096])
def test_very_many_devices_are_planned_by_a_part_of_them(devices: int) -> None:
    part = Case(devices, 0).part
    assert part.factor == devices // 32
    assert part.devices == {"H100": 32} and part.profile.shape.groups == 32
    whole = part.whole_split(Split({"H100": 11}, {"H100": 21}))
    assert whole == Split({"H100": 11 * part.factor}, {"H100": 21 * part.factor})
    assert part.whole_schedule(RunSchedule(tag=3)).fixed_tag == 3 * part.factor


@pytest.mark.slow
def test_a_part_takes_as_long_as_all() -> None:
    case = Case(256, 0)
    best = plan_split(case.profile, {"H100": 256}, RunSchedule()).best
    assert best.factor == 8
    own = case.in_full(setting_of(best))
    assert own == pytest.approx(best.step_seconds, rel=0.01)


CASES = [
    ("qwen-image", Split({"H100": 1}, {"H100": 31}), 0, 16, 31),
    ("qwen-image", Split({"H100": 8}, {"H100": 24}), 0, 16, 24),
    ("qwen-image", Split({"H100": 22}, {"H100": 10}), 1, 16, 4),
    ("qwen-image", Split({"A100": 16, "H100": 9}, {"H100": 7}), 1, 16, 3),
    ("flux1-dev", Split({"H100": 1}, {"H100": 31}), 0, 8, 30),
    ("flux1-dev", Split({"H100": 8}, {"H100": 24}), 0, 4, 14),
    ("flux1-dev", Split({"A100": 16, "H100": 1}, {"H100": 15}), 1, 16, 9),
    ("wan2.1-14b", Split({"L40S": 16, "H100": 3}, {"H100": 13}), 1, 8, 14),
    ("wan2.1-14b", Split({"H100": 8}, {"H100": 24}), 0, 2, 15),
    ("hunyuanvideo", Split({"H100": 13}, {"H100": 19}), 1, 4, 7),
]


@pytest.mark.parametrize(
    ("name", "split", "max_staleness", "size", "groups"),
    [pytest.param(*case, marks=[] if case == CASES[1] else [pytest.mark.slow]) for case in CASES],
)
def test_a_recipes_defaults_are_as_good_as_the_published_plans(
    name: str, split: Split, max_staleness: int, size: int, groups: int
) -> None:
    schedule = RunSchedule(max_staleness=1 if max_staleness else 0)
    planned, auto = (
        simulate(
            load_profile(name), rollout=split.rollout, trainer=split.trainer, schedule=each,
            batches=6 if max_staleness else 3,
        ).step_seconds
        for each in (schedule.changed(fragment_size=size, tag=groups), schedule)
    )  # fmt: skip
    assert auto <= AS_GOOD * planned


@pytest.mark.clock
@pytest.mark.night
@pytest.mark.parametrize("devices", [64, 256, 1024, 4096])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_plan_of_any_size_takes_seconds(devices: int, max_staleness: Literal[0, 1]) -> None:
    profile = Case(devices, max_staleness).profile
    schedule = RunSchedule(max_staleness=max_staleness)
    began = time.process_time()
    plan_split(profile, {"H100": devices}, schedule, host_gpus=8, fluid=True)
    assert time.process_time() - began <= 10


@pytest.mark.slow
def test_pieces_of_fluid_devices_are_as_coarse_in_a_plan_as_in_a_run() -> None:
    """One message names as many pieces of 8,192 devices as of 64, and a plan is by 64 of them."""
    many, few = Case(8192, 0).profile, Case(64, 0).profile
    part = Case(8192, 0).part
    assert part.devices == {"H100": 64} and part.profile.shape.groups == few.shape.groups
    assert part.profile.shape.most_pieces == many.shape.most_pieces // 128
    fluid, everybody = RunSchedule(mode="fluid", max_staleness=0), Split({}, part.devices)
    assert seconds(part.profile, everybody, fluid) > AS_GOOD * seconds(few, everybody, fluid)


@pytest.mark.slow
def test_a_plan_counts_what_the_scheduler_takes() -> None:
    """A small model's pieces for 4,096 devices keep it busy for longer than a split does."""
    profile = load_profile("flux2-klein-base-4b")

    shape = profile.shape.model_copy(update={"groups": 4096})
    of_groups, devices = profile.model_copy(update={"shape": shape}), {"H100": 4096}
    best = plan_split(of_groups, devices, RunSchedule(), host_gpus=8, fluid=True).best
    assert best.schedule.mode == "disaggregated"
    assert best.scheduler_seconds < best.step_seconds == best.simulated.step_seconds
    fluid, everybody = RunSchedule(mode="fluid", fragment_size=12), Split({}, devices)
    assert scheduler_seconds(of_groups, everybody, fluid) > best.step_seconds
    part = part_of(of_groups, devices)
    by_part = seconds(part.profile, Split({}, part.devices), fluid)
    assert by_part < best.step_seconds, "it would be the best without the scheduler"
