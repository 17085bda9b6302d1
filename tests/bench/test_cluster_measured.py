"""What was seen of runs becomes figures."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cluster.case import Case
from bench.cluster.measured import MeasuredRun, measure
from bench.cluster.modes import MODES, Chosen, chosen, predicted, without_hand_over
from bench.cluster.request import Request
from bench.cluster.results import case_result
from bench.cluster.session import EmulatedRun
from bench.cluster.setting import Setting, default_scale, recipe_of, write_prompts
from bench.runner.figures import Interval, means, samples_between
from bench.runner.watch import Sample
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.seconds import generation_work
from services.scheduler.costs.split import Split
from shared.errors import UserError
from shared.learning.prompts import read_prompts
from shared.recipe.recipe import load_recipe
from shared.recipe.schedule import RunSchedule
from shared.run.usage import BatchUsage, DeviceUse

QWEN = load_profile("qwen-image")
SMALL = QWEN.model_copy(update={"shape": QWEN.shape.model_copy(update={"groups": 4})})
"""Quick to simulate."""


def record(*, staleness: Literal[0, 1] = 0, batches: int = 4, stock: float = 0.0) -> EmulatedRun:
    """Two rollout devices and a trainer of two; a batch of 512 samples takes 4 s.

    ``stock``: samples that are not generated in the measured batches."""
    setting = Setting(
        run="r", profile="qwen-image", rollout={"H100": 2}, trainer={"H100": 2}, scale=10.0,
        steps=batches, schedule=RunSchedule(max_staleness=staleness, fragment_size=16, tag="off"),
    )  # fmt: skip
    intervals = []
    for batch in range(batches):
        begin, samples = 4.0 * batch, (512 - stock) / 2
        for name in ("rollout-00-h100", "rollout-01-h100"):
            intervals.append(Interval(name, "generate", begin, begin + 2.0, samples))
        for name in ("trainer-00-h100", "trainer-01-h100"):
            intervals.append(Interval(name, "train", begin + 2.0, begin + 3.0))
            intervals.append(Interval(name, "commit", begin + 3.0, begin + 4.0))
    uses: dict[str, dict[DeviceUse, float]] = {
        "rollout-00-h100": {"generating": 2.0, "waiting_for_trainer": 2.0},
        "rollout-01-h100": {"generating": 2.0, "tail": 2.0},
        "trainer": {"training": 1.0, "committing": 1.0, "waiting_for_rollout": 2.0},
    }
    return EmulatedRun(
        setting=setting,
        commits=[4.0 * version for version in range(batches + 1)],
        begin=Sample(0, 0.0, {"scheduler": 1.0}, {"DG_TASK": 100}),
        end=Sample(batches, 4.0 * batches, {"scheduler": 3.0}, {"DG_TASK": 100 + 32 * batches}),
        usage=[BatchUsage(batch=batch, seconds=4.0, devices=uses) for batch in range(batches)],
        intervals=intervals,
        overshoot={"rollout": {"median_ms": 0.5, "p99_ms": 1.0, "sleeps": 9.0}},
        stored={},
    )


def test_a_run_s_shares_waits_and_rates() -> None:
    found = measure(record(), 0, 4)
    assert found.step_seconds == 4.0
    assert found.batch_seconds == [4.0] * 4
    assert found.shares["rollout"] == pytest.approx({"generate": 0.5, "idle": 0.5})
    assert found.shares["trainer"] == pytest.approx({"train": 0.25, "commit": 0.25, "idle": 0.5})
    assert found.waits["rollout"] == pytest.approx({"waiting_for_trainer": 0.25, "tail": 0.25})
    assert found.waits["trainer"] == pytest.approx({"waiting_for_rollout": 0.5})
    assert found.messages == {"DG_TASK": 32.0}
    assert found.cpu == {"scheduler": 2.0 / 16}


def test_what_was_taken_from_stock_counts() -> None:
    even = measure(record(staleness=1), 0, 4)
    short = measure(record(staleness=1, stock=51.2), 0, 4)
    assert even.from_stock == 0 and even.balanced_seconds == 4.0
    assert short.step_seconds == 4.0, "from commit to commit"
    assert short.from_stock == pytest.approx(0.1)
    seconds = generation_work(QWEN) / 2 / 10  # on two H100s, at this scale
    assert short.balanced_seconds == pytest.approx(4.0 + 0.1 * seconds)
    assert measure(record(stock=51.2), 0, 4).balanced_seconds == 4.0, "on-policy there is no stock"
    more = measure(record(staleness=1, stock=-51.2), 0, 4)
    assert more.from_stock == pytest.approx(-0.1)
    busy = 1 - more.shares["rollout"]["idle"]
    assert 0 < busy < 1 and more.balanced_seconds == pytest.approx(4.0 - 0.1 * seconds * busy)


@given(st.floats(0, 10), st.floats(0, 10))
def test_samples_are_counted_once_wherever_time_is_cut(cut: float, end: float) -> None:
    intervals = [Interval("d", "generate", 1.0, 4.0, 4.0), Interval("d", "generate", 4.0, 9.0, 2.0)]
    first, last = sorted((cut, end))
    whole = samples_between(intervals, 0.0, last)
    parts = samples_between(intervals, 0.0, first) + samples_between(intervals, first, last)
    assert whole == pytest.approx(parts)
    assert samples_between(intervals, 0.0, 10.0) == pytest.approx(6.0)


def measured(step: float) -> MeasuredRun:
    return MeasuredRun(
        seed=0, warm_up=0, step_seconds=step, balanced_seconds=step, batch_seconds=[step],
        from_stock=0.0, shares={}, waits={},
        messages={"DG_TASK": 32.0}, cpu={"scheduler": 0.5}, overshoot_ms=0.1,
    )  # fmt: skip


def test_a_mode_is_compared_with_bound_simulator_and_baselines() -> None:
    split = Split({"H100": 3}, {"H100": 1})
    tsp = chosen("tsp", MODES["tsp"].changed(fragment_size=4), SMALL, {"H100": 4}, split)
    own = chosen("colocated", MODES["colocated"], SMALL, {"H100": 4}, None)
    found = case_result(
        SMALL, {"H100": 4}, 10.0, [(tsp, [measured(4.2), measured(4.4), measured(4.6)]),
                                   (own, [measured(3.6)])],
    )  # fmt: skip
    mode = found.modes[0]
    assert [each.tag for each in found.modes] == [0, 0]
    assert mode.step_seconds == pytest.approx(44.0)
    assert (mode.fastest, mode.slowest) == pytest.approx((42.0, 46.0))
    assert mode.utilisation == pytest.approx(floor_seconds(SMALL, {"H100": 4}) / 44.0)
    assert mode.deviation == pytest.approx(44.0 / mode.simulated_seconds - 1)
    assert mode.over_tuned == pytest.approx(found.colocated_tuned / 44.0)
    assert mode.over_colocated == pytest.approx(36.0 / 44.0)
    assert mode.overhead_share == pytest.approx(mode.overhead_ms / 1000 / 44.0)
    assert 1000 * (44.0 - mode.simulated_seconds) / 10 < mode.overhead_ms, "hand-over is overhead"
    assert mode.messages_per_second == pytest.approx(32 / 4.4)


def test_what_one_round_does_not_have_counts_as_nothing() -> None:
    assert means([{"a": 2.0}, {"a": 4.0, "b": 1.0}]) == {"a": 3.0, "b": 0.5}


@pytest.mark.parametrize("name", list(MODES))
def test_a_recipe_says_what_the_mode_says(name: str, tmp_path: Path) -> None:
    split, schedule = Split({"H100": 24}, {"H100": 8}), MODES[name].changed(fragment_size=8)
    devices = {"H100": 8 if name == "colocated" else 32}  # colocated, of one host
    mode = chosen(name, schedule, QWEN, devices, split)
    case = Case(
        profile=QWEN, devices=devices, scale=10.0, modes=(mode,), rounds=1, batches=1,
        one_step_batches=2,
    )  # fmt: skip
    setting = case.setting(mode, 0).model_copy(update={"steps": 3})
    assert Setting.model_validate_json(setting.model_dump_json()) == setting
    write_prompts(tmp_path, 3 * 32)
    (tmp_path / "recipe.json").write_text(recipe_of(setting, tmp_path).model_dump_json())
    recipe = load_recipe(tmp_path / "recipe.json")
    assert recipe.schedule.mode == mode.schedule.mode
    assert recipe.schedule.staleness_limit == mode.schedule.max_staleness
    assert recipe.schedule.fragment_size == mode.schedule.fragment_size
    assert recipe.run_schedule.trainer_generates == mode.schedule.trainer_generates
    assert recipe.trainer.devices + recipe.rollout.workers == devices["H100"]
    assert recipe.sampling.window == QWEN.shape.trained_steps
    assert len({prompt.text for prompt in read_prompts(recipe.data.prompts)}) == 96


def test_a_batch_lasts_as_long_on_any_number_of_devices() -> None:
    for devices in ({"H100": 32}, {"H100": 16}, {"H100": 16, "A100": 16}):
        scale = default_scale(QWEN, devices)
        seconds = floor_seconds(QWEN, devices) / scale
        assert seconds == pytest.approx(floor_seconds(QWEN, {"H100": 32}) / 10, rel=0.01)


def test_hand_over_can_be_left_out_of_a_profile() -> None:
    assert without_hand_over(QWEN).rollout.handoff_seconds == 0
    assert generation_work(without_hand_over(QWEN)) == generation_work(QWEN)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(workload="sd"), "known are qwen-image"),
        (Request(workload="flux", modes=("fast",)), "known are sequential"),
        (Request(workload="flux", modes=("tsp",), split="8-24"), "not rollout:trainer"),
        (Request(workload="flux", modes=("tsp",), split="8:8"), "not a split of 32"),
        (Request(workload="flux", modes=("tag",), tag="some", split="24:8"), "neither planned"),
        (
            Request(workload="flux", modes=("tsp",), pool="h100=1,a100=1", split="1:1"),
            "split by the planner",
        ),
    ],
)
def test_a_request_that_cannot_be_met_says_what_to_change(request_: Request, says: str) -> None:
    with pytest.raises(UserError, match=says):
        request_.case()


def test_a_case_measures_pairs_of_batches_where_staleness_is_allowed() -> None:
    request = Request(
        workload="flux", modes=("tsp", "one-step"), split="24:8", tag="off", fragment_size=8
    )
    case = request.case()
    lengths = [case.length(mode) for mode in case.modes]
    assert lengths == [(1, 4), (4, 16)]
    assert case.num_batches == 2 * (4 + 16)
    assert case.setting(case.modes[1], 0).steps == 17


def test_fragments_are_smaller_where_that_costs_nothing() -> None:
    split, devices = Split({"H100": 2}, {"H100": 2}), {"H100": 4}
    found = chosen("sequential", MODES["sequential"], SMALL, devices, split)
    size = found.schedule.fixed_fragment
    assert size is not None
    step = predicted(SMALL, found).step_seconds
    best = min(
        predicted(SMALL, chosen("n", fixed, SMALL, devices, split)).step_seconds
        for fixed in (MODES["sequential"].changed(fragment_size=each) for each in (2, 4, 8, 16))
    )
    assert step <= 1.04 * best, "forecasts err by a few per cent"
    halved = replace(found, schedule=found.schedule.changed(fragment_size=size // 2))
    assert size == 1 or predicted(SMALL, halved).step_seconds > step


def test_colocated_devices_are_those_that_can_do_both() -> None:
    found: Chosen = chosen("c", MODES["colocated"], QWEN, {"H100": 8, "L40S": 8}, None)
    assert found.split == Split({}, {"H100": 8}), "of one host"
