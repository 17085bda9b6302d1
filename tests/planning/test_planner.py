"""The planner against the project's performance study, and against what a user fixes."""

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation.colocated import Baseline, colocated_seconds
from digenrl.planning.planner import PlanResult, plan_split
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.split import Split
from services.scheduler.sim.profiled import simulate
from shared.errors import UserError
from shared.recipe.schedule import RunSchedule

STRICT = RunSchedule(tag="auto")
ONE_STEP = STRICT.changed(max_staleness=1)
QUICK = 0.4
"""Effort of tests in which the last per cent does not matter."""


@dataclass(frozen=True)
class Row:
    """LoRA on equal devices: the best split's bound over its batch, and how often its batch fits
    into a colocated one in the study."""

    profile: str
    number: int
    one_step: float
    strict: float
    study_one_step: dict[Baseline, float]
    study_strict: dict[Baseline, float]

    def __str__(self) -> str:
        return f"{self.profile}-{self.number}"


def _row(
    profile: str,
    number: int,
    utilisation: tuple[float, float],
    one_step: tuple[float, float, float],
    strict: tuple[float, float],
) -> Row:
    names: tuple[Baseline, Baseline, Baseline] = ("2026-06", "batched", "tuned")
    return Row(
        profile, number, *utilisation, dict(zip(names, one_step, strict=True)),
        {"2026-06": strict[0], "tuned": strict[1]},
    )  # fmt: skip


ROWS = [
    _row("qwen-image", 16, (0.96, 0.93), (2.12, 1.70, 1.01), (2.02, 0.97)),
    _row("flux1-dev", 16, (0.98, 0.96), (1.55, 1.45, 1.05), (1.47, 0.99)),
    _row("wan2.1-14b", 16, (0.99, 0.98), (1.24, 1.22, 1.00), (1.21, 0.98)),
    _row("hunyuanvideo", 16, (0.99, 0.985), (1.21, 1.21, 1.00), (1.20, 0.99)),
    _row("qwen-image", 32, (0.91, 0.88), (2.90, 2.49, 1.14), (2.62, 1.03)),
    _row("flux1-dev", 32, (0.97, 0.935), (1.76, 1.67, 1.07), (1.64, 1.00)),
    _row("wan2.1-14b", 32, (0.985, 0.97), (1.29, 1.27, 1.02), (1.25, 0.99)),
    _row("hunyuanvideo", 32, (0.985, 0.975), (1.24, 1.24, 1.02), (1.21, 0.99)),
]


def over_best(planned: PlanResult, baseline: Baseline) -> float:
    """Return how many times longer the same devices take colocated."""
    colocated = colocated_seconds(planned.profile, planned.devices, baseline)
    return colocated / planned.best.step_seconds


def check_against_the_study(planned: PlanResult, row: Row, *, one_step: bool) -> None:
    best = planned.best
    assert (row.one_step if one_step else row.strict) <= best.simulated.utilisation <= 1
    for baseline, gain in (row.study_one_step if one_step else row.study_strict).items():
        assert over_best(planned, baseline) >= 0.97 * gain, baseline


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("one_step", [True, False])
def test_best_splits_come_near_the_bound_and_are_no_worse_than_the_studys(
    one_step: bool, row: Row
) -> None:
    schedule, devices = ONE_STEP if one_step else STRICT, {"H100": row.number}
    planned = plan_split(load_profile(row.profile), devices, schedule, fluid=True)
    check_against_the_study(planned, row, one_step=one_step)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("qwen-image", 0.83),
        pytest.param("flux1-dev", 0.93, marks=pytest.mark.slow),
        pytest.param("wan2.1-14b", 0.97, marks=pytest.mark.slow),
        pytest.param("hunyuanvideo", 0.98, marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_generates_makes_up_for_a_split_that_is_far_from_balance(
    name: str, least: float
) -> None:
    profile, size = load_profile(name), {"qwen-image": 8, "flux1-dev": 8}.get(name, 4)
    schedule = ONE_STEP.changed(tag=32, fragment_size=size)
    found = simulate(
        profile, rollout={"H100": 8}, trainer={"H100": 24}, schedule=schedule,
        batches=6,
    )  # fmt: skip
    assert found.utilisation > least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "schedule"),
    [
        # The study's best splits at 32 devices.
        ("qwen-image", (2, 30), STRICT.changed(fragment_size=8, tag=30)),
        ("flux1-dev", (8, 24), STRICT.changed(fragment_size=4, tag=12)),
        ("qwen-image", (22, 10), ONE_STEP.changed(fragment_size=16, tag=0)),
        ("wan2.1-14b", (14, 18), ONE_STEP.changed(fragment_size=4, tag=32)),
    ],
)
def test_no_known_good_split_is_better_than_the_planners(
    name: str, split: tuple[int, int], schedule: RunSchedule
) -> None:
    profile = load_profile(name)
    known = simulate(
        profile, rollout={"H100": split[0]}, trainer={"H100": split[1]}, schedule=schedule,
        batches=6,
    )  # fmt: skip
    free = schedule.changed(tag="auto", fragment_size="auto")
    best = plan_split(profile, {"H100": 32}, free).best
    assert best.step_seconds <= known.step_seconds * 1.01


def test_choices_are_ranked_and_the_best_is_near_the_bound_and_no_worse_than_the_studys() -> None:
    planned = plan_split(load_profile("flux1-dev"), {"H100": 16}, STRICT, effort=QUICK, fluid=True)
    check_against_the_study(planned, ROWS[1], one_step=False)
    seconds = [choice.step_seconds for choice in planned.choices]
    assert len(seconds) > 1 and seconds == sorted(seconds)
    assert planned.best is planned.choices[0]
    assert planned.num_forecast == 16 * 5
    assert planned.floor_seconds < seconds[0]
    for choice in planned.choices:
        assert choice.forecast_seconds == pytest.approx(choice.step_seconds, rel=0.06)


@pytest.mark.slow
def test_the_same_question_has_the_same_answer() -> None:
    profile = load_profile("qwen-image")
    first, again = (plan_split(profile, {"H100": 4}, ONE_STEP, effort=QUICK) for _ in range(2))
    assert first.choices == again.choices


@pytest.mark.slow
def test_unequal_devices_gain_over_tuned_colocated() -> None:
    """16 H100 and 16 A100: 1.46 in the study, with two H100 that generate."""
    planned = plan_split(load_profile("flux1-dev"), {"H100": 16, "A100": 16}, ONE_STEP)
    best = planned.best
    assert over_best(planned, "tuned") == pytest.approx(1.46, rel=0.03)
    assert best.split.rollout["A100"] == 16 and best.split.rollout["H100"] <= 3


@cache
def _fixed(schedule: RunSchedule) -> PlanResult:
    return plan_split(load_profile("qwen-image"), {"H100": 6}, schedule, effort=QUICK)


@pytest.mark.slow
def test_what_is_fixed_stays() -> None:
    sizes = {c.schedule.fixed_fragment for c in _fixed(STRICT.changed(fragment_size=2)).choices}
    assert sizes == {2}
    assert {c.schedule.tag for c in _fixed(STRICT.changed(tag=0)).choices} == {0}
    assert {c.schedule.tag for c in _fixed(ONE_STEP.changed(tag=3)).choices} == {3}
    sequential = _fixed(RunSchedule(mode="sequential")).best
    assert sequential.schedule.mode == "sequential" and sequential.schedule.max_staleness == 0
    assert _fixed(STRICT).best.schedule.max_staleness == 0


def test_colocated_all_devices_that_can_are_the_trainers() -> None:
    colocated = RunSchedule(mode="colocated")
    planned = plan_split(load_profile("qwen-image"), {"H100": 12, "L40S": 2}, colocated)
    assert {str(choice.split) for choice in planned.choices} == {"none : 12 H100"}
    assert planned.best.simulated.utilisation > 0.85
    for choice in planned.choices:
        assert choice.forecast_seconds == pytest.approx(choice.step_seconds, rel=0.05)


@pytest.mark.slow
def test_each_freedom_helps() -> None:
    sequential, gap, tag, one_step = (
        _fixed(schedule).best.step_seconds
        for schedule in (RunSchedule(mode="sequential"), RunSchedule(tag=0), STRICT, ONE_STEP)
    )
    assert sequential > 1.4 * gap > 1.4 * tag > 1.4 * one_step


def test_needless_help_is_left_out() -> None:
    """Asynchrony leaves nothing to help with if generation and training are in balance."""
    profile = load_profile("flux1-dev", "full")
    assert plan_split(profile, {"H100": 16}, ONE_STEP, effort=QUICK).best.schedule.tag == 0


@pytest.mark.slow
def test_help_that_costs_a_switch_is_simulated_beside_none() -> None:
    profile = load_profile("hunyuanvideo", "full")
    free, without = (
        plan_split(profile, {"H100": 16}, STRICT.changed(tag=tag)).best for tag in ("auto", 0)
    )
    assert free.step_seconds <= without.step_seconds * 1.001


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({"H100": 1}, "one device cannot be split"),
        ({"4090": 4}, "no split of 4 4090 can both generate and train: qwen-image needs 41.5 GiB"),
        ({"L40S": 4}, "qwen-image needs 52 GiB on a trainer device; L40S has 44 GiB"),
        ({"H100": 1, "4090": 4}, "no split of 1 H100 [+] 4 4090 can both"),
        ({"TPU": 4}, "no device kind TPU in qwen-image"),
    ],
)
def test_devices_that_cannot_be_split_are_refused(devices: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan_split(load_profile("qwen-image"), devices, STRICT)


def test_two_devices_are_enough() -> None:
    planned = plan_split(load_profile("qwen-image"), {"H100": 1, "A100": 1}, STRICT, effort=QUICK)
    assert planned.best.split == Split({"A100": 1}, {"H100": 1})


@pytest.mark.slow
@settings(max_examples=5)
@given(
    st.sampled_from([STRICT, ONE_STEP]),
    st.sampled_from(["qwen-image", "flux1-dev"]),
    st.integers(4, 20),
    st.sampled_from(["H100", "A100"]),
)
def test_more_devices_are_never_slower(
    schedule: RunSchedule, name: str, number: int, kind: str
) -> None:
    profile: Profile = load_profile(name)
    few = {"H100": number, "A100": 4}
    more = {**few, kind: few[kind] + 4}
    before, after = (plan_split(profile, each, schedule, effort=QUICK) for each in (few, more))
    assert after.best.step_seconds <= before.best.step_seconds * 1.01


@pytest.mark.slow
def test_64_devices_of_three_kinds_take_no_more_forecasts_than_there_are_splits_to_try() -> None:
    devices = {"H100": 20, "A100": 24, "L40S": 20}
    planned = plan_split(load_profile("hunyuanvideo"), devices, ONE_STEP)
    assert planned.num_forecast <= 63 * 8
    assert over_best(planned, "tuned") > 1.4
