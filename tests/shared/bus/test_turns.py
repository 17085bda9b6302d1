"""Messages that are not stored are handled in slices, between which others have a turn."""

import asyncio

import pytest

from shared.bus import bus as bus_module
from shared.bus.bus import Bus
from shared.messages.workers import WorkerStatus

NUMBER = 300


async def test_others_have_turns_while_a_burst_of_statuses_is_handled(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "MAX_HANDLING_S", 0.0)
    turns, seen = 0, list[int]()

    async def take_turns() -> None:
        nonlocal turns
        while len(seen) < NUMBER:
            turns += 1
            await asyncio.sleep(0)

    async def handle(_: WorkerStatus) -> None:
        seen.append(turns)

    async with Bus.connect(nats_url, run="test", name="test") as bus:
        await bus.on_status(handle)
        for number in range(NUMBER):
            name = f"r{number}"
            await bus.send(
                WorkerStatus(service="rollout", worker=name, address=name, activity="generating")
            )
        async with asyncio.timeout(30):
            await take_turns()
    assert len(set(seen)) > 0.9 * NUMBER, "each came in a turn of its own"
