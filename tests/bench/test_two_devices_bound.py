import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog  # type: ignore[import-untyped]

from bench.two_devices.bound import Speed, fastest, least_seconds

SPEEDS = st.floats(min_value=0.01, max_value=10)


def by_linear_program(speeds: Sequence[Speed], samples: int) -> float:
    """The same bound from its definition: seconds T, and samples g, t of each device."""
    n = len(speeds)
    busy = np.zeros((n, 2 * n + 1))
    for index, speed in enumerate(speeds):
        busy[index, index], busy[index, n + index] = speed.generate, speed.train
        busy[index, 2 * n] = -1
    done = np.zeros((2, 2 * n + 1))
    done[0, :n] = done[1, n : 2 * n] = 1
    cost = np.zeros(2 * n + 1)
    cost[-1] = 1
    found = linprog(cost, A_ub=busy, b_ub=np.zeros(n), A_eq=done, b_eq=[samples, samples])
    return float(found.x[-1])


@given(st.lists(st.tuples(SPEEDS, SPEEDS), min_size=1, max_size=4), st.integers(1, 1000))
def test_the_bound_is_that_of_the_linear_program(
    pairs: list[tuple[float, float]], samples: int
) -> None:
    speeds = [Speed(generate=generate, train=train) for generate, train in pairs]
    expected = by_linear_program(speeds, samples)
    assert least_seconds(speeds, samples) == pytest.approx(expected, rel=1e-6)


def test_equal_devices_share_all_work_and_one_that_cannot_train_leaves_it_to_the_other() -> None:
    equal = Speed(generate=0.3, train=0.2)
    assert least_seconds([equal, equal], 10) == pytest.approx(10 * 0.5 / 2)
    only_generates = Speed(generate=0.1)
    assert least_seconds([only_generates, equal], 10) == pytest.approx(10 * 0.2)
    assert least_seconds([only_generates], 10) == math.inf
    assert least_seconds([Speed(), equal], 10) == pytest.approx(10 * 0.5)


def test_the_bound_is_of_the_best_that_was_measured_of_each_device_and_task() -> None:
    first = {"a": Speed(generate=1.0, train=3.0), "b": Speed(generate=2.0)}
    second = {"a": Speed(generate=2.0, train=2.0)}
    assert fastest([first, second]) == {
        "a": Speed(generate=1.0, train=2.0),
        "b": Speed(generate=2.0),
    }
