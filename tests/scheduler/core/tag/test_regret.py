"""Over whole runs: near a clairvoyant, soon again after a step, never worse than without help."""

from itertools import product

import pytest

from tests.scheduler.core.tag.loop import REGIMES, SCENARIOS, STEP_AT, Batch, run

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
WINDOW = 50
MAX_REGRET = dict.fromkeys(SCENARIOS, 0.05) | {"stationary": 0.02}
CASES = [
    pytest.param(scenario, regime, marks=() if regime == "balanced" else pytest.mark.slow)
    for scenario, regime in product(SCENARIOS, REGIMES)
]


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def regret(batches: tuple[Batch, ...]) -> float:
    return sum(b.seconds for b in batches) / sum(b.clairvoyant for b in batches) - 1


def worst_window(batches: tuple[Batch, ...]) -> float:
    """Loss against no help, in the window of 50 batches where it is largest."""
    windows = [batches[first : first + WINDOW] for first in range(len(batches) - WINDOW + 1)]
    return max(sum(b.seconds for b in w) / sum(b.without for b in w) - 1 for w in windows)


@pytest.mark.parametrize(("scenario", "regime"), CASES)
def test_regret_against_a_clairvoyant_is_small(seed: int, scenario: str, regime: str) -> None:
    assert regret(run(scenario, regime, seed)) <= MAX_REGRET[scenario]


@pytest.mark.parametrize(("scenario", "regime"), CASES)
def test_no_window_is_a_hundredth_slower_than_without_help(
    seed: int, scenario: str, regime: str
) -> None:
    assert worst_window(run(scenario, regime, seed)) <= 0.01


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("scenario", ["slower rollout", "faster rollout"])
def test_ten_batches_after_a_step_runs_are_near_the_clairvoyant_again(
    seed: int, scenario: str, regime: str
) -> None:
    batches = run(scenario, regime, seed)
    for first in range(STEP_AT + 10, STEP_AT + 60, 10):
        found = regret(batches[first : first + 10])
        assert found <= 0.03, f"batches from {first}: {found:.2%}"


@pytest.mark.parametrize("scenario", ["stationary", "slow switch"])
def test_help_that_harms_in_a_way_the_model_does_not_know_stays_off(
    seed: int, scenario: str
) -> None:
    """Say, because it slows rollout down by more than it adds."""
    batches = run(scenario, "balanced", seed, hidden=1.25)
    assert sum(b.decision.groups > 0 for b in batches) <= 20
    assert worst_window(batches) <= 0.02


def test_a_switch_that_is_fast_again_is_found_out(seed: int) -> None:
    end = run("slow switch", "balanced", seed)[-20:]
    assert all(b.decision.groups for b in end)
