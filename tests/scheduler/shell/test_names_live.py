"""Two workers of one name, on a real broker: the first keeps it, the second ends and says why."""

import asyncio
import contextlib

import pytest

from services.scheduler.shell.views import worker_views
from shared.errors import UserError
from shared.messages.workers import Device
from shared.process.settings import ServiceSettings
from shared.process.worker import Worker
from shared.process.worker_process import one_user_error
from tests.scheduler.shell.live import Live
from tests.waiting import until

pytestmark = pytest.mark.broker


def worker(name: str) -> Worker:
    return Worker("rollout", name, "waiting_for_trainer", device=Device(concurrency=1))


async def test_the_second_worker_of_a_name_ends_with_the_reason_and_the_first_goes_on(
    live: Live,
) -> None:
    first, second = worker("host-1"), worker("host-1")
    async with live.running(), asyncio.TaskGroup() as tasks:
        await live.recovered()
        bus = live.trainer.bus
        await live.trainer.commit(announce=True)
        reporting = tasks.create_task(first.report(bus))
        await until(lambda: first.address in live.scheduler.state.workers)
        with pytest.raises(UserError, match=r"'host-1'.*--worker or DIGENRL_WORKER"):
            await second.report(bus)
        assert list(live.scheduler.state.workers) == [first.address]
        assert live.scheduler.state.phase == "running"
        refused = {view.address: view.refused for view in worker_views(live.scheduler)}
        assert refused[first.address] is None
        assert "host-1" in str(refused[second.address])
        reporting.cancel()


async def test_a_worker_that_is_started_again_joins_under_its_name(live: Live) -> None:
    async with live.running():
        await live.recovered()
        for each in (worker("host-1"), worker("host-1")):
            task = asyncio.create_task(each.report(live.trainer.bus))
            async with asyncio.timeout(5.0):
                while list(live.scheduler.state.workers) != [each.address]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_of_several_failures_the_one_that_a_user_can_fix_is_reported() -> None:
    async def ends() -> None:
        raise UserError("--worker: taken")

    with pytest.raises(UserError, match="--worker: taken"), one_user_error():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ends())
            tasks.create_task(asyncio.sleep(60))


def test_two_processes_of_equal_numbers_on_one_host_have_different_names() -> None:
    assert ServiceSettings(run="r").worker != ServiceSettings(run="r").worker
