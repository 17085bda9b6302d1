"""Processes that go on after they were replaced: what they do late has no effect, 20 per role."""

import contextlib
import os
import signal
from collections.abc import Iterable
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import structlog

from tests.storm.cluster import Cluster, cluster, every_service
from tests.storm.judge import violations_of
from tests.storm.small import small
from tests.storm.test_two_schedulers import commanding, other, stands_by, until_commands
from tests.storm.zombies import ask_to_stop, done_late

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(600)]
AT_ONCE = 5
"""Zombies of a role that are about at the same time."""
TURNS = 4
ROLES = ("trainer", "rollout", "reward", "encoder")
ENDS_S = 30.0
MOST = 0.75
"""Share of zombies that do what they had begun; others hear before that they were replaced."""
log = structlog.get_logger()


def workers(role: str) -> list[list[str]]:
    """Return the names of the workers of a role that stop, those that stop together side by
    side."""
    if role == "trainer":
        return [["trainer"]] * AT_ONCE
    return [[f"{role}-{number}" for number in range(AT_ONCE)]]


def is_stopped(process: ForkServerProcess) -> bool:
    """Whether all of a process stands still."""
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


async def until_stopped(run: Cluster, names: Iterable[str]) -> list[ForkServerProcess]:
    """Have processes stop just before they do what lasts, and return them."""
    processes = [run.children[name].process for name in names]
    assert all(isinstance(each, ForkServerProcess) for each in processes)
    for name in names:
        ask_to_stop(run.folder, name)

    async def have_stopped() -> bool:
        return all(is_stopped(each) for each in processes)  # type: ignore[arg-type]

    await run.until(have_stopped, f"{', '.join(names)} stop")
    return processes  # type: ignore[return-value]


async def replaced(run: Cluster, names: Iterable[str]) -> list[ForkServerProcess]:
    """Return processes that have stopped, and in whose place others of their names are."""
    found = await until_stopped(run, names)
    for name in names:
        child = run.children[name]
        child.process = child.start()
    return found


def wake(zombies: Iterable[ForkServerProcess]) -> None:
    for each in zombies:
        assert each.pid is not None
        os.kill(each.pid, signal.SIGCONT)


def num_joined(run: Cluster, role: str) -> int:
    """Return how often a worker of a role has taken its name so far."""
    return run.log("scheduler").count(f'"service": "{role}", "event": "worker_joined"')


async def replace_all(run: Cluster, role: str) -> list[ForkServerProcess]:
    """Return the workers of a role that have stopped, once others have their names."""
    joined = num_joined(run, role)
    names = workers(role)
    # Trainers stop one after the other at the same commit: each is the successor of the one before.
    zombies = [each for turn in names for each in await replaced(run, turn)]

    async def have_names() -> bool:
        return num_joined(run, role) >= joined + len(names[-1])

    await run.until(have_names, f"others take the names of {role} workers")
    return zombies


async def turn(run: Cluster, zombies: list[ForkServerProcess]) -> None:
    """Have some workers of each role be replaced, and go on once a batch is over without them."""
    for role in ROLES:
        zombies += await replace_all(run, role)
        await run.until_step(await run.num_commits())
    await run.until_step(await run.num_commits() + 1)
    newest = await run.num_commits() - 1
    wake(zombies)

    async def have_ended() -> bool:  # another one has the name of each, so that they are refused
        return not any(each.is_alive() for each in zombies)

    await run.until(have_ended, "all that were replaced end", seconds=ENDS_S)
    for role in ROLES:
        for late in done_late(run.folder, role):
            if late.is_first:
                assert late.batch is not None, f"{role}: what others have done is done again"
                assert late.batch < newest, f"{role}: of a batch that is not committed"
    zombies.clear()


async def test_what_a_replaced_worker_does_late_has_no_effect(tmp_path: Path) -> None:
    setting = small(
        tmp_path, steps=100_000, tag=1, rollout={"H100": AT_ONCE}, encoders=AT_ONCE,
    )  # fmt: skip
    names = [name for role in ROLES for together in workers(role) for name in together]
    services = ["scheduler", *dict.fromkeys(names)]
    zombies = list[ForkServerProcess]()
    async with cluster(tmp_path / "run", setting, services=services) as run:
        try:
            await run.until_step(2)
            for _ in range(TURNS):
                await turn(run, zombies)
            for role in ROLES:
                found = len(done_late(run.folder, role))
                log.info("done_late", role=role, times=found, of=AT_ONCE * TURNS)
                assert found >= AT_ONCE * TURNS * MOST, role
            assert await violations_of(run) == []
        finally:
            end(zombies)


async def test_what_a_replaced_scheduler_does_late_has_no_effect(tmp_path: Path) -> None:
    setting = small(tmp_path, steps=100_000, tag=1)
    services = [*every_service(setting), "scheduler-1"]
    async with cluster(tmp_path / "run", setting, services=services) as run:
        await run.until_step(2)
        for _ in range(AT_ONCE * TURNS):
            first = await commanding(run)
            [zombie] = await until_stopped(run, [first])
            await until_commands(run, other(first))
            await run.until_step(await run.num_commits())
            wake([zombie])
            await run.until(partial(stands_by, run, first), f"{first} notices that it was replaced")
        found = len(done_late(run.folder, "scheduler"))
        log.info("done_late", role="scheduler", times=found, of=AT_ONCE * TURNS)
        assert found >= AT_ONCE * TURNS * MOST
        assert await violations_of(run) == []


def end(zombies: Iterable[ForkServerProcess]) -> None:
    for each in zombies:
        with contextlib.suppress(ProcessLookupError):
            if each.pid is not None:
                os.kill(each.pid, signal.SIGKILL)
        each.join()
