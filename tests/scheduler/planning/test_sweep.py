"""Plans of many devices against a fixed sweep in the simulator; `auto` against planned steps."""

import time

import pytest

from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.planning.planner import Choice, fragment_sizes, plan_split
from services.scheduler.planning.splits import Split
from services.scheduler.planning.symmetry import part_of
from services.scheduler.sim.profiled import simulate
from shared.recipe.fluid_devices import refusal
from shared.recipe.schedule import RunSchedule

AS_GOOD = 1.03


def one_group_per_device(name: str, devices: int) -> Profile:
    profile = load_profile(name)
    shape = profile.shape.model_copy(update={"groups": devices, "updates": 1})
    return profile.model_copy(update={"shape": shape})


def seconds(profile: Profile, split: Split, schedule: RunSchedule) -> float:
    return simulate(
        profile, rollout=split.rollout, trainer=split.trainer,
        schedule=schedule, batches=3 if schedule.staleness_limit else 1, seed=1, causes=False,
    ).step_seconds  # fmt: skip


def halves(devices: int, generate: int) -> Split:
    return Split({"H100": generate}, {"H100": devices - generate})


def best_of_sweep(profile: Profile, devices: int, best: Choice, near: int) -> float:
    """Fragments of every size, splits around the planned one, TAG off, planned and all; and fluid
    devices."""
    around = best.split.rollout["H100"]
    step = max(1, devices // 32)
    splits = {min(devices - 1, max(1, around + step * n)) for n in range(-near, near + 1)}
    tags = {0, best.schedule.fixed_tag or 0, profile.shape.groups}
    sizes = fragment_sizes(profile, RunSchedule())
    roles = (
        seconds(
            profile, halves(devices, generate), best.schedule.changed(fragment_size=size, tag=tag)
        )
        for size in sizes
        for generate in sorted(splits)
        for tag in sorted(tags)
    )
    fluid = RunSchedule(mode="fluid", max_staleness=best.schedule.staleness_limit)
    if refusal(max_staleness=fluid.max_staleness) is not None:
        return min(roles)
    everybody = Split({}, {"H100": devices})
    others = (seconds(profile, everybody, fluid.changed(fragment_size=size)) for size in sizes)
    return min(min(roles), min(others))


@pytest.mark.parametrize(
    ("devices", "near", "max_staleness"),
    [
        (4, 1, 0),
        *(pytest.param(8, 1, staleness, marks=pytest.mark.slow) for staleness in (0, 1)),
        *(
            pytest.param(
                devices, 4, staleness, marks=[pytest.mark.night, pytest.mark.timeout(1200)]
            )
            for devices in (64, 256)
            for staleness in (0, 1)
        ),
    ],
)
def test_no_setting_of_a_sweep_is_clearly_faster_than_a_plan(
    devices: int, near: int, max_staleness: int
) -> None:
    profile = one_group_per_device("flux1-dev", devices)
    schedule = RunSchedule(max_staleness=1 if max_staleness else 0)
    fluid = refusal(max_staleness=schedule.max_staleness) is None
    found = plan_split(profile, {"H100": devices}, schedule, fluid=fluid)
    own = seconds(profile, found.best.split, found.best.schedule)
    around = next(each for each in found.choices if each.schedule.mode == "pipelined")
    assert own <= AS_GOOD * best_of_sweep(profile, devices, around, near)


@pytest.mark.parametrize("devices", [64, 256, 1024, 4096])
def test_very_many_devices_are_planned_by_a_part_of_them(devices: int) -> None:
    profile = one_group_per_device("flux1-dev", devices)
    part = part_of(profile, {"H100": devices})
    assert part.factor == devices // 64
    assert part.devices == {"H100": 64} and part.profile.shape.groups == 64
    whole = part.whole_split(Split({"H100": 23}, {"H100": 41}))
    assert whole == Split({"H100": 23 * part.factor}, {"H100": 41 * part.factor})
    assert part.whole_schedule(RunSchedule(tag=3)).fixed_tag == 3 * part.factor


@pytest.mark.slow
def test_a_part_takes_as_long_as_all() -> None:
    profile = one_group_per_device("flux1-dev", 256)
    best = plan_split(profile, {"H100": 256}, RunSchedule()).best
    assert best.factor == 4
    own = seconds(profile, best.split, best.schedule)
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
    [pytest.param(*case, marks=[] if case == CASES[0] else [pytest.mark.slow]) for case in CASES],
)
def test_a_recipes_defaults_are_as_good_as_the_published_plans(
    name: str, split: Split, max_staleness: int, size: int, groups: int
) -> None:
    schedule = RunSchedule(max_staleness=1 if max_staleness else 0)
    planned, auto = (
        simulate(
            load_profile(name), rollout=split.rollout, trainer=split.trainer, batches=6,
            schedule=each, causes=False,
        ).step_seconds
        for each in (schedule.changed(fragment_size=size, tag=groups), schedule)
    )  # fmt: skip
    assert auto <= AS_GOOD * planned


@pytest.mark.clock
@pytest.mark.night
@pytest.mark.parametrize("devices", [64, 256, 1024, 4096])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_plan_of_any_size_takes_seconds(devices: int, max_staleness: int) -> None:
    profile = one_group_per_device("flux1-dev", devices)
    schedule = RunSchedule(max_staleness=1 if max_staleness else 0)
    began = time.process_time()
    plan_split(profile, {"H100": devices}, schedule, host_gpus=8, fluid=True)
    assert time.process_time() - began <= 10


def test_pieces_of_fluid_devices_are_as_coarse_in_a_plan_as_in_a_run() -> None:
    """One message names as many pieces of 2,048 devices as of 64, and a plan is by 64 of them."""
    many, few = (one_group_per_device("flux1-dev", number) for number in (2048, 64))
    part = part_of(many, {"H100": 2048})
    assert part.devices == {"H100": 64} and part.profile.shape.groups == few.shape.groups
    assert part.profile.shape.most_pieces == many.shape.most_pieces // 32
    fluid, everybody = RunSchedule(mode="fluid", max_staleness=0), Split({}, part.devices)
    assert seconds(part.profile, everybody, fluid) > AS_GOOD * seconds(few, everybody, fluid)
