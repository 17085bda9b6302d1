import pickle
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.tag import estimates
from services.scheduler.core.tag.estimates import Costs, Estimate

seconds = st.floats(1e-3, 1e3)


def learned(*observations: float, start: Estimate = Estimate()) -> Estimate:  # noqa: B008
    for x in observations:
        start = start.observe(x)
    return start


def test_nothing_is_known_at_first_and_a_prior_yields_to_the_first_observation() -> None:
    assert Estimate().value is None
    prior = Estimate(value=10.0)
    assert (prior.value, prior.count) == (10.0, 0)
    assert (prior.observe(2.0).value, prior.observe(2.0).count) == (2.0, 1)
    assert prior.observe(2.0).spread == 0.0


@given(st.lists(st.floats(0.97, 1.03), min_size=4, max_size=20), st.integers(1, 30))
@settings(deadline=None)
def test_one_outlier_does_not_move_the_value_by_more_than_noise(
    noise: list[float], at: int
) -> None:
    at = min(at, len(noise))
    outlier = learned(*noise[:at], 5.0, *noise[at:])
    assert outlier.value == pytest.approx(1.0, abs=0.0301)
    assert outlier.spread <= 0.06


def test_a_step_is_followed_within_six_observations() -> None:
    estimate = learned(*[1.0] * 10, *[3.0] * 6)
    assert estimate.value == pytest.approx(3.0, rel=0.06)


def test_the_spread_is_the_relative_distance_from_the_value() -> None:
    assert learned(*[2.0] * 9).spread == 0.0
    assert learned(*[9.0, 11.0] * 20).spread == pytest.approx(0.1, abs=0.03)


@given(st.lists(seconds, min_size=1))
@settings(deadline=None)
def test_the_value_stays_within_what_was_observed(observations: list[float]) -> None:
    estimate = learned(*observations)
    assert estimate.value is not None
    assert min(observations) * (1 - 1e-9) <= estimate.value <= max(observations) * (1 + 1e-9)
    assert estimate.count == len(observations)


def test_an_unmeasured_device_is_assumed_to_be_average() -> None:
    costs = Costs()
    assert costs.rollout_seconds("a") is None
    for worker, each in (("a", 1.0), ("b", 2.0), ("c", 9.0)):
        costs = costs.observe_rollout(worker, each)
    assert costs.rollout_seconds("a") == 1.0
    assert costs.rollout_seconds("new") == 2.0


def test_members_train_a_group_together() -> None:
    costs = Costs()
    assert costs.train_seconds(["a", "b"]) is None
    costs = costs.observe_gradient("a", 3.0)
    assert costs.train_seconds(["a", "b"]) == 1.5, "b is assumed to be as fast"
    assert costs.observe_gradient("b", 6.0).train_seconds(["a", "b"]) == 2.0
    assert costs.train_seconds([]) is None


def test_the_average_is_computed_once_until_something_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that opens asks for every device that is not measured yet."""
    count = 0

    def counted(values: list[float]) -> float:
        nonlocal count
        count += 1
        return median(values)

    monkeypatch.setattr(estimates, "median", counted)
    costs = Costs().observe_rollout("a", 1.0).observe_gradient("a", 7.0)
    for _ in range(2):
        costs = costs.observe_rollout("b", 3.0 + count)
        known = {costs.rollout_seconds(f"new-{number}") for number in range(9)}
        assert known == {median(each.value or 0.0 for each in costs.rollout.values())}
        assert costs.gradient_seconds("new-0") == 7.0
    assert count == 3


def test_what_was_never_seen_costs_nothing() -> None:
    costs = Costs()
    known = (costs.switch.seconds, costs.ready.seconds, costs.commit.seconds)
    assert known == (0.0,) * 3
    assert Costs(switch=Estimate(value=3.0)).switch.seconds == 3.0


def test_as_measured_means_the_newest_observations_and_the_priors() -> None:
    costs = Costs(switch=Estimate(value=7.0))
    for x in (1.0, 1.0, 1.0, 5.0):
        costs = costs.observe("ready", x).observe_rollout("a", 2 * x)
    assert (costs.ready.seconds, costs.rollout_seconds("a")) == (1.0, 2.0)
    measured = costs.as_measured()
    assert (measured.ready.seconds, measured.rollout_seconds("a")) == (5.0, 10.0)
    assert measured.switch.seconds == 7.0


def test_costs_survive_pickling() -> None:
    costs = Costs().observe_rollout("a", 1.0).observe("switch", 3.0).observe("commit", 0.5)
    assert pickle.loads(pickle.dumps(costs)) == costs  # noqa: S301
    assert hash(costs.switch) == hash(Estimate(value=0.0).observe(3.0))
