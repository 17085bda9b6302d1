"""A run that goes on and gets nowhere has an alarm with the reason."""

import asyncio
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.run_alarms import RunAlarms
from services.scheduler.shell.run_log import RunLog
from shared.messages.fluid import TrainPiece
from shared.messages.workers import Activity, WorkerStatus
from shared.run.log import Log
from shared.run.log_entries import Alarm
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples
from tests.scheduler.core.test_fluid import Run, held, trained
from tests.scheduler.core.test_fluid_updates import exchanged, take_update


def worker(activity: Activity, busy_seconds: float = 3.0) -> WorkerStatus:
    return examples.status("trainer", activity, busy_seconds=busy_seconds)


def test_members_that_answer_for_another_update_stand_still_and_an_alarm_says_so() -> None:
    """As if their answers left out which update of the batch they are about."""
    run, alarms, idle = Run(updates=2), RunAlarms(), [worker("waiting_for_rollout")]
    run.generate()
    take_update(run, exchanged(run))
    pieces = run.take(TrainPiece)
    run.give(*(trained(piece).model_copy(update={"update": 0}) for piece in pieces))
    for now in (100.0, 105.0, 109.9):
        assert alarms.look(run.plan, run.state, idle, (), now)["nobody_works"] == ""
    reason = alarms.look(run.plan, run.state, idle, (), 110.0)["nobody_works"]
    assert reason == (
        "no device has worked for 10 s, and batch 0 is open. It waits for groups that are not "
        "trained: 1; attempt 0, update 2 of 2; pieces that members do not report: 4. A restart "
        "of the workers gives out the work again"
    )
    run.give(*map(trained, pieces))
    at_work = [worker("training")]
    assert alarms.look(run.plan, run.state, at_work, (), 111.0)["nobody_works"] == ""


@pytest.mark.parametrize("activity", ["generating", "training", "committing", "loading_weights"])
def test_a_device_at_work_has_no_alarm_however_long_it_takes(activity: Activity) -> None:
    run, alarms = Run(), RunAlarms()
    for now in (0.0, 1000.0):
        assert not any(alarms.look(run.plan, run.state, [worker(activity)], (), now).values())


def test_a_total_that_a_member_does_not_find_has_an_alarm() -> None:
    run, alarms, at_work = Run(), RunAlarms(), [worker("committing")]
    command = run.exchange()
    run.give(held(command, command.committer))
    assert not any(alarms.look(run.plan, run.state, at_work, (), run.now + 1.0).values())
    reason = alarms.look(run.plan, run.state, at_work, (), run.now + 11.0)["nobody_works"]
    [silent] = {share.worker for share in command.shares} - {command.committer}
    assert f"attempt 0, update 1 of 1; the sums of {silent}. " in reason
    run.give(held(command, silent))
    assert not any(alarms.look(run.plan, run.state, at_work, (), run.now + 11.0).values())


def test_short_work_between_two_looks_counts() -> None:
    run, alarms = Run(), RunAlarms()
    for second in range(60):
        seen = [worker("waiting_for_rollout", busy_seconds=second / 100)]
        assert not any(alarms.look(run.plan, run.state, seen, (), float(second)).values())


def test_workers_that_come_and_go_put_no_alarm_off() -> None:
    run, alarms = Run(), RunAlarms()
    for second in range(11):
        idle = examples.status("trainer", "waiting_for_rollout", worker=f"trainer-{second}")
        found = alarms.look(run.plan, run.state, [idle], (), 100.0 + second)
    assert found["nobody_works"]


def test_the_api_and_the_log_have_what_an_alarm_says(
    scheduler: Scheduler, client: TestClient, tmp_path: Path
) -> None:
    state, recent = scheduler.state, scheduler.chain.recent
    for now in (0.0, 12.0):
        reasons = scheduler.alarms.look(scheduler.plan, state, [], recent, now)
    [reason] = client.get("/v1/run").json()["alarms"]
    assert reason.startswith("no device has worked for 12 s, and batch 1 is open. It waits for ")

    async def noted() -> object:
        log = Log.of_run(ObjectStore(FolderBackend(tmp_path / "log")), "test")
        run_log = RunLog(log)
        writing = asyncio.create_task(run_log.write())
        while not log.numbered:
            await asyncio.sleep(0.01)
            for what in reasons:
                run_log.alarm(what, reasons[what])
        writing.cancel()
        return log.numbered[0]

    found = asyncio.run(noted())
    assert isinstance(found, Alarm)
    assert (found.what, found.firing, found.reason) == ("nobody_works", True, reason)
