"""What statuses of workers mean to the scheduler."""

import asyncio
from typing import cast

import pytest

from services.scheduler import limits
from services.scheduler.core.fluid.events import VersionLoaded
from services.scheduler.core.inputs import (
    LinkMeasured,
    MachineInput,
    WorkerInactive,
    WorkerJoined,
    WorkerLeft,
)
from services.scheduler.core.state import State
from services.scheduler.core.usage import UsageMeter
from services.scheduler.core.workers import Workers, WorkerState
from services.scheduler.shell.roster import Roster
from shared.bus.bus import Bus
from shared.cancellation import stop
from shared.errors import UserError
from shared.messages.workers import Activity, Device, Service, Transferred, WorkerStatus
from shared.process import worker as worker_module
from shared.process.worker import Worker
from shared.release import RELEASE
from tests import examples
from tests.waiting import until


def status(
    service: Service, activity: Activity, seconds: dict[Activity, float] | None = None
) -> WorkerStatus:
    return examples.status(service, activity, seconds=seconds or {})


@pytest.fixture
def inputs() -> list[MachineInput]:
    return []


@pytest.fixture
def roster(inputs: list[MachineInput]) -> Roster:
    worker = WorkerState(address="rollout-0-a", name="rollout-0", service="rollout", concurrency=1)
    state = State(workers=Workers({worker.address: worker}))
    return Roster(cast(Bus, None), inputs.append, lambda: state, UsageMeter())


async def test_an_encoder_is_seen_and_given_no_work(
    roster: Roster, inputs: list[MachineInput]
) -> None:
    await roster.record(status("encoder", "encoding"))
    await roster.record(status("encoder", "waiting_for_trainer"))
    assert inputs == []
    assert [seen.status.service for seen in roster.statuses.values()] == ["encoder"]
    await roster.record(status("rollout", "generating"))
    assert [type(each) for each in inputs] == [WorkerJoined, VersionLoaded]


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


async def test_nobody_is_silent_while_statuses_wait_to_be_recorded(
    roster: Roster, inputs: list[MachineInput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROSTER_CHECK_S", 0.001)
    monkeypatch.setattr(limits, "LEASE_S", 0.05)
    await roster.record(status("rollout", "generating"))
    inputs.clear()
    roster.num_waiting = lambda: 1
    watching = asyncio.create_task(roster.watch())
    await asyncio.sleep(0.3)  # six times a lease
    assert inputs == []
    roster.num_waiting = lambda: 0
    await until(lambda: inputs)
    assert inputs == [WorkerLeft("rollout-0-a")]
    await stop(watching)


async def test_a_worker_of_another_release_is_given_no_work_and_ends(
    bus: Bus, inputs: list[MachineInput], monkeypatch: pytest.MonkeyPatch
) -> None:
    roster = Roster(bus, inputs.append, State, UsageMeter())
    await bus.on_status(roster.record)
    old = Worker("rollout", "rollout-0", "waiting_for_trainer", Device(concurrency=1))
    with monkeypatch.context() as patched:
        patched.setattr(worker_module, "versions", lambda: {"digenrl": "0.1.0"})
        with pytest.raises(UserError, match=f"rollout-0 is of release 0.1.0, .* of {RELEASE}"):
            await old.report(bus)
    assert inputs == []
    new = asyncio.create_task(
        Worker("rollout", "rollout-0", "waiting_for_trainer", Device(concurrency=1)).report(bus)
    )
    await until(lambda: [type(each) for each in inputs] == [WorkerJoined, VersionLoaded])
    await stop(new)


async def test_what_a_member_has_transferred_since_its_last_status_measures_its_line(
    roster: Roster, inputs: list[MachineInput]
) -> None:
    first = status("trainer", "committing").model_copy(
        update={"sent": Transferred(num_bytes=100, seconds=2.0)}
    )
    await roster.record(first)
    await roster.record(first)
    later = {
        "sent": Transferred(num_bytes=300, seconds=3.0),
        "received": Transferred(num_bytes=50, seconds=5.0),
    }
    await roster.record(first.model_copy(update=later))
    measured = [each for each in inputs if isinstance(each, LinkMeasured)]
    assert [(each.up, each.down) for each in measured] == [(0.02, None), (0.005, 0.1)]


@pytest.mark.parametrize(("num_bytes", "seconds"), [(1, 1e300), (2**62, 5e-324), (0, 9.0)])
async def test_a_rate_that_no_line_has_is_not_learned(
    roster: Roster, inputs: list[MachineInput], num_bytes: int, seconds: float
) -> None:
    sent = Transferred(num_bytes=num_bytes, seconds=seconds)
    lie = status("rollout", "generating").model_copy(update={"sent": sent, "received": sent})
    await roster.record(lie)
    assert not any(isinstance(each, LinkMeasured) for each in inputs)
    assert [each.status for each in roster.statuses.values()] == [lie]
