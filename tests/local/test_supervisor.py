"""Children are kept running; what happens when one cannot be depends on who needs it."""

import asyncio
import gc
import sys
from pathlib import Path

import pytest

from digenrl.local.brokers.embedded import Program
from digenrl.local.processes.child_logs import reason_in
from digenrl.local.processes.supervisor import ChildFailed, Supervisor
from shared.errors import UserError

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
    with pytest.raises(UserError, match="one ended with status 2"):
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
        monkeypatch.setattr(f"digenrl.local.processes.supervisor.{name}", value)
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


EVENT = '{"svc": "reward", "worker": "r-0", "run": "a", "event": "loading", "level": "info"}'
GROUP = """
import asyncio
async def fails():
    raise ValueError("no\\nsuch folder")
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (GROUP, "ValueError: no"),
        ("raise RuntimeError('out of memory\\ncompile it anew')", "RuntimeError: out of memory"),
        (f"print({EVENT!r})", "loading"),
        (f"print({EVENT!r}); print('digenrl: model.folder: no folder x')",
         "digenrl: model.folder: no folder x"),
        ("raise SystemExit('wrong number of arguments')", "wrong number of arguments"),
        ("import os; os.abort()", "aborts.log"),
        ("import faulthandler, os; faulthandler.enable(); os.abort()",
         "Fatal Python error: Aborted"),
    ],
)  # fmt: skip
async def test_why_a_child_has_died_is_its_last_event_or_exception(
    code: str, reason: str, tmp_path: Path
) -> None:
    log = tmp_path / "aborts.log"
    with log.open("wb") as output:
        words = (sys.executable, "-c", code)
        child = await asyncio.create_subprocess_exec(*words, stdout=output, stderr=output)
        await child.wait()
    assert reason_in(log).endswith(reason), log.read_text()


async def test_a_start_that_is_interrupted_leaves_nobody_waiting(tmp_path: Path) -> None:
    """Whoever asks whether the child is ready would do so with a client that is closed by then."""
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))
    is_closed = False

    async def ready() -> bool:
        if is_closed:
            raise RuntimeError("the client has been closed")
        return False

    supervisor = Supervisor(tmp_path, {})
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    starting = asyncio.create_task(supervisor.start(Program(name="one", argv=sleeps, ready=ready)))
    await asyncio.sleep(0.3)
    starting.cancel()
    await asyncio.wait({starting})
    del starting  # which holds what it waited for
    is_closed = True
    await supervisor.stop(["one"])
    await asyncio.sleep(0.5)
    gc.collect()
    assert not unhandled
