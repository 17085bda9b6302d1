"""What a fragment takes whatever its size is learned from fragments of several sizes."""

import random

import pytest

from services.scheduler.core.tag.estimates import Costs, Overhead

SPEEDS = {"a": 1.0, "b": 2.3, "c": 0.4}


def learned(
    r: float, sizes: list[int], *, noise: float = 0.03, rounds: int = 20, warm_up: float = 1.0
) -> Costs:
    rng, costs = random.Random(0), Costs(group_size=16)
    for number in range(rounds):
        for size in sizes:
            for worker, each in SPEEDS.items():
                seconds = each * (r + size) * max(0.5, rng.gauss(1.0, noise))
                first = warm_up if not number and size == sizes[0] else 1.0
                costs = costs.observe_fragment(worker, size, seconds * first)
    return costs


@pytest.mark.parametrize("r", [0.0, 0.3, 0.7, 4.0])
@pytest.mark.parametrize("sizes", [[8, 4], [8, 8, 8, 7, 5, 4, 2], [1, 2], [16, 1]])
def test_devices_of_any_speed_tell_the_same_overhead(r: float, sizes: list[int]) -> None:
    found = learned(r, sizes).overhead.samples(16)
    assert found == pytest.approx(r, abs=0.1 * (r + sum(sizes) / len(sizes)))


def test_fragments_of_one_size_tell_nothing() -> None:
    costs = learned(0.7, [8])
    assert not costs.overhead.is_known and costs.fixed_share == 0.0
    assert costs.whole_samples(3) == 3


def test_first_fragments_that_take_ten_times_as_long_are_forgotten() -> None:
    assert learned(0.7, [8, 4], warm_up=10.0).overhead.samples(16) == pytest.approx(0.7, abs=0.5)


def test_an_outlier_counts_little() -> None:
    costs = learned(0.7, [8, 4])
    before = costs.overhead.samples(16)
    after = costs.observe_fragment("a", 4, 1000.0).overhead.samples(16)
    assert before is not None and after == pytest.approx(before, abs=0.3)


def test_what_is_learned_says_how_long_another_size_takes() -> None:
    costs = learned(0.7, [8, 4], noise=0.0)
    assert costs.whole_samples(2) / costs.whole_samples(16) == pytest.approx(2.7 / 16.7, rel=0.02)
    assert costs.whole_samples(16) == pytest.approx(16)


def test_steps_that_are_known_to_be_shared_are_the_least_overhead() -> None:
    costs = Costs(shared_share=0.5, group_size=4).with_overhead(Overhead.known_after(0.2))
    assert costs.fixed_share == 0.5
    assert costs.with_overhead(Overhead.known_after(3.0)).fixed_share == pytest.approx(0.75)
