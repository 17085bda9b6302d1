"""Children are kept running; what happens when one cannot be depends on who needs it."""

import asyncio
import sys
from pathlib import Path

import pytest

from digenrl.local.brokers import Program
from digenrl.local.supervisor import ChildFailed, Supervisor

ENDS_AS_A_USER_ERROR = [sys.executable, "-c", "import sys; sys.exit(2)"]


async def never() -> bool:
    return False


async def given_up(supervisor: Supervisor) -> None:
    keeper = supervisor.children["one"].keeper
    assert keeper is not None
    await asyncio.wait_for(keeper, 30)


def child(*, optional: bool) -> Program:
    return Program(name="one", argv=ENDS_AS_A_USER_ERROR, ready=never, optional=optional)


async def test_a_needed_child_that_cannot_be_kept_running_fails_the_run(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, {})
    await supervisor.start(child(optional=False), wait=False)
    await given_up(supervisor)
    with pytest.raises(ChildFailed, match="one ended with status 2"):
        await supervisor.failed


async def test_an_optional_one_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, {})
    await supervisor.start(child(optional=True), wait=False)
    await given_up(supervisor)
    assert not supervisor.failed.done() and not supervisor.is_kept("one")


async def test_deaths_are_counted_until_something_is_done_however_long_a_child_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a large model takes longer than a child had to live to be started again for ever."""
    for name, value in {"STABLE_S": 0.0, "MAX_BACKOFF_S": 0.01, "MAX_DEATHS": 3}.items():
        monkeypatch.setattr(f"digenrl.local.supervisor.{name}", value)
    supervisor = Supervisor(tmp_path, {})
    dies = ["/bin/sh", "-c", "echo out of memory; exit 1"]
    await supervisor.start(
        Program(name="one", argv=dies, ready=never, reports_work=True), wait=False
    )
    one = supervisor.children["one"]
    while one.num_restarts < 2:  # noqa: ASYNC110 -- of a process
        await asyncio.sleep(0.001)
    supervisor.record_work("one", "its first fragment")
    await given_up(supervisor)
    assert 5 <= one.num_restarts <= 6, "three more, after the death that had something done"
    supervisor.record_work("one", "its first fragment")
    assert not one.has_worked, "that was done before"
    with pytest.raises(ChildFailed, match="status 1: out of memory"):
        await supervisor.failed
