import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation.colocated import colocated_seconds
from bench.simulation.figures import DetailedResult, simulate
from bench.simulation.techniques import compare
from digenrl.trace.memory import usual, with_memory
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.fluid import exchange_seconds
from services.scheduler.costs.profile import Profile, load_profile
from services.scheduler.costs.seconds import generation_work, training_work
from services.scheduler.costs.split import Split
from services.scheduler.sim.profiled import make_timing
from shared.errors import UserError
from shared.recipe.schedule import RunSchedule
from tests.scheduler.costs.bounds import split_bound

QWEN, FLUX = load_profile("qwen-image"), load_profile("flux1-dev")
GAP = RunSchedule(tag=0, fragment_size=4)


def _qwen(generate: int, train: int, schedule: RunSchedule, batches: int = 4) -> DetailedResult:
    return simulate(
        QWEN, rollout={"H100": generate}, trainer={"H100": train}, schedule=schedule,
        batches=batches,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("generate", "train", "schedule", "seconds"),
    [
        # The study's rows of sequential and GAP at 16 devices, its best splits.
        (8, 8, RunSchedule(mode="sequential", tsp_steps=1, fragment_size=16), 125),
        # Here members exchange twice in a batch, and take more calls for small pieces.
        (12, 4, GAP, 80),
        (2, 14, GAP.changed(fragment_size=8, tag=28), 69),
    ],
)
def test_the_studys_rows(generate: int, train: int, schedule: RunSchedule, seconds: float) -> None:
    assert _qwen(generate, train, schedule).step_seconds == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_one_device_is_never_faster_than_its_bound_by_the_luck_of_a_few_draws(seed: int) -> None:
    wan = load_profile("wan2.1-14b")
    shape = wan.shape.model_copy(update={"groups": 4, "group_size": 8})
    found = simulate(
        wan.model_copy(update={"shape": shape}), rollout={}, trainer={"H100": 1},
        schedule=RunSchedule(mode="colocated", fragment_size=8), batches=8, seed=seed,
    )  # fmt: skip
    assert 0.99 < found.utilisation < 1


@settings(max_examples=12)
@given(
    generate=st.integers(1, 12),
    train=st.integers(1, 12),
    schedule=st.builds(
        RunSchedule,
        mode=st.sampled_from(["disaggregated", "sequential"]),
        fragment_size=st.sampled_from(["auto", 8, 16]),
        tsp_steps=st.sampled_from(["auto", 1]),
        tag=st.sampled_from([0, 5, 32]),
        max_staleness=st.just(0),
    ),
)
def test_a_schedule_never_beats_its_bound_and_shares_add_up(
    generate: int, train: int, schedule: RunSchedule
) -> None:
    split = Split({"A100": generate}, {"H100": train})
    found = simulate(
        FLUX, rollout=split.rollout, trainer=split.trainer, schedule=schedule, batches=1, seed=None
    )
    bound = floor_seconds(FLUX, split.devices)
    if not schedule.trainer_generates:
        bound = split_bound(FLUX, split.rollout, split.trainer)
    assert found.step_seconds > bound
    assert found.floor_seconds == pytest.approx(floor_seconds(FLUX, split.devices))
    assert found.utilisation == found.floor_seconds / found.step_seconds
    for busy in found.busy.values():
        assert all(share >= 0 for share in busy.values()) and sum(busy.values()) < 1.01
    assert found.staleness == {0: 1.0}
    assert found.discarded >= 0


def test_one_step_asynchrony_is_stale_by_one_at_most_and_removes_the_tail() -> None:
    strict = _qwen(11, 5, GAP.changed(fragment_size=8))
    ahead = _qwen(11, 5, GAP.changed(fragment_size=8, max_staleness=1), batches=6)
    assert set(ahead.staleness) == {0, 1} and ahead.staleness[1] > 0.1
    assert ahead.step_seconds < 0.92 * strict.step_seconds
    assert sum(ahead.busy["rollout"].values()) > 0.98
    assert sum(strict.busy["rollout"].values()) < 0.9


def test_one_step_ahead_a_batch_waits_for_the_state_that_a_commit_stores() -> None:
    slow = QWEN.variant.model_copy(update={"publish_seconds": 60.0})
    found = simulate(
        QWEN.model_copy(update={"variant": slow}), rollout={}, trainer={"H100": 16},
        schedule=RunSchedule(mode="fluid", fragment_size=8, max_staleness=1), batches=3, seed=None,
    )  # fmt: skip
    # 30 s for the weights, and three times as long for moments and average; then it trains.
    assert 4 * 30 < found.step_seconds < 4 * 30 + 62


def test_work_taken_from_stock_is_paid_for() -> None:
    """Here the trainer fills the lead in one batch, and nine batches live on it."""
    found = simulate(
        FLUX, rollout={"H100": 6}, trainer={"H100": 10}, batches=6,
        schedule=RunSchedule(fragment_size=16, tag=32, max_staleness=1),
    )  # fmt: skip
    assert found.step_seconds == pytest.approx(126.1, rel=0.015)  # of 11 batches, one whole cycle
    assert found.utilisation < 1


def all_weights(ranks: int) -> Profile:
    profile = load_profile("flux1-dev", "full")
    assert profile.memory is not None
    return with_memory(profile, replace(usual(profile.memory), rank=0, ranks=ranks))


def test_uneven_shares_of_shared_weights_cost_time() -> None:
    """16 samples on 5 ranks take as long as on 4, and 16 GPUs on two hosts gather over the line."""
    four, five, sixteen = (make_timing(all_weights(n), {"H100": n}) for n in (4, 5, 16))
    assert five.piece is not None and five.gradient("H200", 16) == four.gradient("H200", 16)
    assert four.gradient("H100", 16) > five.gradient("H100", 16), "fewer rows of a pass fit"
    assert five.help("H100", 16) == math.inf, "what it gathers does not fit"
    moved = 2 * 23.8 + 4 * 11.9
    assert sixteen.gradient("H100", 16) == pytest.approx(moved * 15 / 16 / 12.5, rel=0.01)
    assert sixteen.gather == pytest.approx(23.8 * 15 / 16 / 12.5, rel=0.01)


@pytest.mark.parametrize(
    "schedule",
    [
        RunSchedule(mode="fluid", fragment_size=16),
        RunSchedule(mode="fluid", fragment_size=16, max_staleness=1),
        RunSchedule(fragment_size=16, tag=16),
    ],
)
def test_shard_groups_generate_and_train_as_devices_do(schedule: RunSchedule) -> None:
    profile = all_weights(8)
    found = simulate(
        profile, rollout={} if schedule.members_generate else {"H100": 8}, trainer={"H100": 16},
        schedule=schedule, batches=2,
    )  # fmt: skip
    stored = 2 * exchange_seconds(profile, 16)  # of each update, through the object store
    assert found.floor_seconds < found.step_seconds < 1.6 * found.floor_seconds + stored
    assert found.busy["trainer"]["generate"] > 0.05


def test_colocated_devices_generate_and_then_train() -> None:
    found = simulate(
        QWEN, rollout={}, trainer={"H100": 16}, batches=2,
        schedule=RunSchedule(mode="colocated", fragment_size=16),
    )  # fmt: skip
    assert found.step_seconds == pytest.approx(
        colocated_seconds(QWEN, {"H100": 16}, "tuned"), rel=0.05
    )
    busy = found.busy["trainer"]
    assert busy["generate"] * found.step_seconds * 16 == pytest.approx(
        generation_work(QWEN), rel=0.02
    )
    training = busy["train"] * found.step_seconds * 16
    # Pieces are whole passes, so that they take no more calls than whole groups.
    assert training == pytest.approx(training_work(QWEN), rel=0.005)
    assert found.staleness == {0: 1.0}


@pytest.mark.parametrize(
    ("name", "size", "over_floor"),
    [
        ("qwen-image", 8, 1.12),
        pytest.param("wan2.1-14b", 4, 1.025, marks=pytest.mark.slow),
        pytest.param("flux1-dev", 8, 1.04, marks=pytest.mark.slow),
    ],
)
def test_slow_devices_train_until_the_batch_ends(name: str, size: int, over_floor: float) -> None:
    """A fast device would finish a small piece sooner, and yet there is time for slow ones."""
    profile = load_profile(name)
    shape = profile.shape.model_copy(update={"groups": 16, "updates": 1})
    found = simulate(
        profile.model_copy(update={"shape": shape}), rollout={}, trainer={"H100": 8, "H20": 8},
        batches=6, schedule=RunSchedule(mode="fluid", fragment_size=size),
    )  # fmt: skip
    assert found.step_seconds <= over_floor * found.floor_seconds


def test_trainers_that_cannot_generate_do_not_help() -> None:
    devices = {**QWEN.devices, "TPU": QWEN.devices["H100"].model_copy(update={"memory_gib": 41})}
    small = QWEN.model_copy(
        update={"devices": devices, "variant": QWEN.variant.model_copy(update={"memory_gib": 40})}
    )
    found = simulate(
        small, rollout={"H100": 4}, trainer={"TPU": 4}, batches=1, seed=None,
        schedule=RunSchedule(fragment_size=16, tag=32),
    )  # fmt: skip
    assert "generate" not in found.busy["trainer"]


@pytest.mark.slow
def test_members_that_are_lent_generate_the_share_that_is_forecast_best() -> None:
    auto = GAP.changed(fragment_size=16, tag="auto")
    found = simulate(
        QWEN, rollout={"H100": 4}, trainer={"H100": 12}, schedule=auto, batches=2,
    )  # fmt: skip
    fixed = _qwen(4, 12, auto.changed(tag=23), batches=2)
    assert found.step_seconds == pytest.approx(fixed.step_seconds, rel=0.03)
    assert {batch.reason for batch in found.tag} == {"share"}
    assert all(18 <= batch.groups_generated <= 25 for batch in found.tag)


def test_what_generates_ahead_of_a_batch_leaves_the_share_of_members_that_will_be_lent() -> None:
    found = _qwen(8, 8, GAP.changed(fragment_size=16, tag=16), batches=2)
    assert [batch.groups_generated for batch in found.tag] == [16, 16]


def test_the_same_seed_gives_the_same_result() -> None:
    first, again = (_qwen(8, 8, GAP, batches=1) for _ in range(2))
    other = simulate(
        QWEN, rollout={"H100": 8}, trainer={"H100": 8}, schedule=GAP, batches=1, seed=1
    )
    assert first == again
    assert first.step_seconds != other.step_seconds


def test_techniques_add_up() -> None:
    rows = compare(QWEN, Split({"H100": 8}, {"H100": 8}), batches=2, seed=None)
    assert [row.name for row in rows] == ["sequential", "+ GAP", "+ TSP", "+ TAG", "+ one-step"]
    seconds = [row.simulated.step_seconds for row in rows]
    assert all(after < before * 1.01 for before, after in pairwise(seconds))
    assert seconds[-1] < 0.55 * seconds[0]


@pytest.mark.parametrize(
    ("rollout", "trainer", "words"),
    [
        ({}, {"H100": 1}, "no device for the rollout"),
        ({"H100": 1}, {"A100": 0}, "no device for the trainer"),
        ({"H100": 4}, {"L40S": 2}, "needs 52 GiB on a trainer device"),
        ({"4090": 4}, {"H100": 2}, "needs 41.5 GiB on a rollout device"),
    ],
)
def test_pools_that_cannot_work_are_refused(
    rollout: dict[str, int], trainer: dict[str, int], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        simulate(QWEN, rollout=rollout, trainer=trainer, schedule=GAP)
