"""What statuses of workers mean to the scheduler."""

from typing import cast

import pytest

from services.scheduler.core.machine import MachineInput, WorkerInactive, WorkerJoined
from services.scheduler.core.state import State
from services.scheduler.core.usage import Meter
from services.scheduler.core.workers import Workers, WorkerState
from services.scheduler.shell.roster import Roster
from shared.bus.bus import Bus
from shared.messages.workers import Activity, Service, WorkerStatus


def status(
    service: Service, activity: Activity, seconds: dict[Activity, float] | None = None
) -> WorkerStatus:
    return WorkerStatus(
        service=service, worker=f"{service}-0", address=f"{service}-0-a", activity=activity,
        seconds=seconds or {},
    )  # fmt: skip


@pytest.fixture
def inputs() -> list[MachineInput]:
    return []


@pytest.fixture
def roster(inputs: list[MachineInput]) -> Roster:
    worker = WorkerState(address="rollout-0-a", name="rollout-0", service="rollout", concurrency=1)
    state = State(workers=Workers({worker.address: worker}))
    return Roster(cast(Bus, None), inputs.append, lambda: state, Meter())


async def test_an_encoder_is_seen_and_given_no_work(
    roster: Roster, inputs: list[MachineInput]
) -> None:
    await roster.record(status("encoder", "encoding"))
    await roster.record(status("encoder", "waiting_for_trainer"))
    assert inputs == []
    assert [seen.status.service for seen in roster.seen.values()] == ["encoder"]
    await roster.record(status("rollout", "generating"))
    assert [type(each) for each in inputs] == [WorkerJoined]


@pytest.mark.parametrize("activity", ["loading_weights", "waiting_for_conditions"])
async def test_a_device_that_lacks_something_for_its_work_is_not_late(
    roster: Roster, inputs: list[MachineInput], activity: Activity
) -> None:
    await roster.record(status("rollout", "generating"))
    roster._meter.devices = {"rollout-0": {"generating": 5.0}}
    await roster.record(status("rollout", activity, {activity: 2.0}))
    assert inputs[-1] == WorkerInactive("rollout-0-a", "loading")
    use = activity.replace("loading", "waiting_for")
    assert roster._meter.devices == {"rollout-0": {"generating": 3.0, use: 2.0}}
