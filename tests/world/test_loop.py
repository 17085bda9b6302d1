"""The loop of worlds: its clock, and how processes are killed, hang and fail."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from tests.world.loop import Idle, Process, WorldLoop

HOUR_S = 3600.0


def lives(work: Callable[[], Coroutine[Any, Any, None]]) -> WorldLoop:
    loop = WorldLoop(0)
    loop.run(work())
    return loop


def process(name: str = "one") -> Process:
    return Process(name, Random(0))


def test_an_hour_passes_at_once_and_timers_come_in_their_order() -> None:
    rang: list[tuple[str, int]] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def ring(name: str) -> None:
            rang.append((name, round(loop.time())))

        loop.call_later(2 * HOUR_S, ring, "late")
        loop.call_later(HOUR_S, ring, "soon")
        await asyncio.sleep(3 * HOUR_S)

    assert round(lives(work).now) == 3 * HOUR_S
    assert rang == [("soon", HOUR_S), ("late", 2 * HOUR_S)]


def test_a_world_in_which_nothing_can_happen_any_more_ends_with_an_error() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Idle):
        lives(work)


def test_what_a_thread_would_do_is_done_within_the_loop() -> None:
    async def work() -> None:
        assert await asyncio.to_thread(asyncio.get_running_loop) is asyncio.get_running_loop()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    lives(work)


def test_a_killed_process_does_nothing_more_and_its_kernel_closes_what_it_had() -> None:
    done: list[str] = []

    async def tick() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                done.append("tick")
        finally:
            done.append("finally")

    async def work() -> None:
        killed = process()
        killed.at_death.append(lambda: done.append("closed"))
        killed.start(tick())
        await asyncio.sleep(2.5)
        killed.kill()
        await asyncio.sleep(5)
        assert done == ["tick", "tick", "closed"]

    lives(work)


def test_what_a_hanging_process_would_have_done_it_does_afterwards() -> None:
    done: list[float] = []

    async def tick() -> None:
        for _ in range(2):
            await asyncio.sleep(1)
            done.append(round(asyncio.get_running_loop().time()))

    async def work() -> None:
        hanging = process()
        hanging.start(tick())
        await asyncio.sleep(0)
        hanging.hang()
        await asyncio.sleep(10)
        assert done == []
        hanging.go_on()
        await asyncio.sleep(5)

    lives(work)
    assert done == [10, 11]


@pytest.mark.parametrize(("callbacks", "steps"), [(0, 0), (1, 1), (3, 3)])
def test_a_process_fails_before_any_of_its_callbacks(callbacks: int, steps: int) -> None:
    done: list[int] = []

    async def step() -> None:
        for number in range(5):
            done.append(number)
            await asyncio.sleep(0)

    async def work() -> None:
        failing = process()
        failing.failing = (callbacks, Process.kill)
        failing.start(step())
        await asyncio.sleep(1)

    lives(work)
    assert done == list(range(steps))


def test_tasks_of_a_set_are_in_the_order_in_which_they_were_made() -> None:
    async def work() -> None:
        made = [asyncio.ensure_future(asyncio.sleep(1)) for _ in range(20)]
        assert list(set(reversed(made))) == made

    lives(work)
