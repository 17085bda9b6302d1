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
