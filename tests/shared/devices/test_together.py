"""How many groups' merged steps go through the network in one pass."""

import pytest

from shared.devices.together import ENOUGH, Together


def grown(call: float, row: float, most: int = 64) -> Together:
    """What is decided once passes of n groups have taken call + n row seconds."""
    found = Together(most=most)
    while found.measures(found.number):
        found = found.observe(found.number, call + found.number * row)
    return found


@pytest.mark.parametrize(
    ("call", "row", "number"),
    [(0.0, 1.0, 1), (1.0, 1.0, 2), (3.0, 1.0, 4), (7.0, 1.0, 8), (8.0, 1.0, 8), (1.0, 0.0, 64)],
)
def test_so_many_go_together_as_take_no_more_than_twice_as_long_as_one(
    call: float, row: float, number: int
) -> None:
    found = grown(call, row)
    assert found.number == number
    alone, together = call + row, call + number * row
    assert together <= 2 * alone
    assert number == 1 or together <= 0.75 * number * alone, "where rows fill a device, none waits"


def test_the_number_is_doubled_as_it_is_measured() -> None:
    found, seen = Together(most=8), []
    while found.measures(found.number):
        seen.append(found.number)
        found = found.observe(found.number, 1.0)
    assert seen == [number for number in (1, 2, 4, 8) for _ in range(ENOUGH)]
    assert found.observe(8, 100.0) == found, "it is decided"


def test_no_more_go_together_than_there_are() -> None:
    assert grown(1.0, 0.0, most=5).number == 4
    assert grown(1.0, 0.0, most=1).number == 1


def test_the_fastest_pass_of_a_size_decides() -> None:
    """Others were held up by what else the machine does."""
    found = Together(most=4, seconds={1: (1.0,) * ENOUGH, 2: (9.0,) * (ENOUGH - 1)})
    assert found.number == 2, "it is not known yet"
    assert found.observe(2, 1.2).number == 4
    assert found.observe(2, 9.0).number == 1


def test_half_as_many_are_tried_after_some_did_not_fit() -> None:
    assert grown(1.0, 0.0).without(64).number == 32
    assert Together(most=4).without(1).number == 1


def test_a_number_that_was_not_asked_for_tells_nothing() -> None:
    found = Together(most=8)
    assert found.observe(3, 1.0) == found
