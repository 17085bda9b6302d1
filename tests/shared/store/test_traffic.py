"""What a process has stored and read: bytes, and the seconds in which anything was under way."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from prometheus_client import REGISTRY

from shared.errors import Unavailable
from shared.store import traffic
from shared.store.traffic import MIN_BYTES, Meter, Traffic


class Clock:
    """Seconds that only tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(traffic, "time", clock)
    return clock


def test_seconds_with_several_objects_under_way_count_once(clock: Clock) -> None:
    meter = Meter()
    with meter.transfer(3 * MIN_BYTES):
        clock.now += 1.0
        with meter.transfer(MIN_BYTES):
            clock.now += 2.0
        clock.now += 1.0
    clock.now += 10.0
    assert (meter.num_bytes, meter.seconds) == (4 * MIN_BYTES, 4.0)


def test_small_objects_measure_no_line_unless_they_take_long(clock: Clock) -> None:
    meter = Meter()
    for _ in range(3):
        with meter.transfer(1000):
            clock.now += 0.1
    assert meter.num_bytes == 0
    with meter.transfer(1000):
        clock.now += 5.0
    assert meter.num_bytes == 4000
    assert meter.seconds == pytest.approx(5.3)


def test_a_transfer_that_fails_does_not_count_and_a_cancelled_one_bounds_the_rate(
    clock: Clock,
) -> None:
    meter = Meter()
    with pytest.raises(Unavailable), meter.transfer(MIN_BYTES):
        clock.now += 60.0
        raise Unavailable("the store does not answer")
    assert (meter.num_bytes, meter.seconds) == (0, 0.0)
    with pytest.raises(asyncio.CancelledError), meter.transfer(MIN_BYTES):
        clock.now += 60.0
        raise asyncio.CancelledError
    assert (meter.num_bytes, meter.seconds) == (MIN_BYTES, 60.0)


async def test_a_stream_counts_only_the_time_in_which_chunks_are_awaited(clock: Clock) -> None:
    async def chunks() -> AsyncGenerator[bytes]:
        for _ in range(4):
            clock.now += 1.0
            yield bytes(MIN_BYTES)

    meter = Meter()
    async for _ in meter.counted(chunks()):
        clock.now += 5.0
    assert (meter.num_bytes, meter.seconds) == (4 * MIN_BYTES, 4.0)


def test_the_rate_is_that_of_the_newest_transfers(clock: Clock) -> None:
    meter = Meter()
    assert meter.rate is None
    for seconds in (1.0, 4.0):
        for _ in range(traffic.NUM_NEWEST):
            with meter.transfer(MIN_BYTES):
                clock.now += seconds
        assert meter.rate == MIN_BYTES / seconds


def test_metrics_have_the_round_trip_of_each_direction(clock: Clock) -> None:
    both = Traffic()
    for meter, seconds in ((both.up, 0.3), (both.down, 0.2), (both.up, 0.1), (both.up, 5.0)):
        with meter.transfer(100):
            clock.now += seconds
    assert both.round_trip == pytest.approx(0.1)
    for direction, seconds in (("up", 0.1), ("down", 0.2)):
        found = REGISTRY.get_sample_value("digenrl_round_trip_seconds", {"direction": direction})
        assert found == pytest.approx(seconds)


def test_a_clock_that_goes_back_makes_no_line_faster(clock: Clock) -> None:
    both = Traffic()
    for seconds in (2.0, -5.0, 2.0):
        with both.up.transfer(MIN_BYTES):
            clock.now += seconds
    assert (both.up.num_bytes, both.up.seconds) == (3 * MIN_BYTES, 4.0)
    assert both.round_trip == 0.0
