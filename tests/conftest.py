"""Fixtures that every test may use: real brokers, started for the test and gone after it."""

import asyncio
import gc
import os
import subprocess
from collections.abc import AsyncIterator, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
import structlog
import typer
import typer.testing
from hypothesis import HealthCheck, settings

from digenrl.local.brokers.embedded import Brokers, Program, plan_brokers, wait_ready
from digenrl.local.processes.ports import releasing_ports
from shared.bus.bus import Bus
from shared.process.settings import ServiceSettings
from shared.store import ObjectStore, open_store
from shared.store.folder import FolderBackend
from tests.brokers import PASSWORD, StartProgram, program

settings.register_profile(
    "same",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=50,
    derandomize=True,
)
settings.register_profile(
    "random", settings.get_profile("same"), max_examples=100, derandomize=False
)
settings.load_profile(os.environ.get("DIGENRL_EXAMPLES", "same"))

typer.testing._get_command = cache(typer.main.get_command)  # type: ignore[attr-defined]
"""It builds all of the command line for each command that a test types."""
BROKERS = {"brokers", "start_run"}
"""Fixtures that start brokers; the others of brokers ask for these."""


RANKS = "ranks"
"""Fixture of processes that torchrun starts, which takes longer than most of what they do."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect all tests without looking for garbage, and never look at what they import again.

    Modules hold millions of objects; to go over them takes seconds in each of the processes.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests whose fixtures start a broker, and those that one process of several has to
    take: the tests of a file, if they name no group, and all files that ask for ranks."""
    fixtures = [set(getattr(item, "fixturenames", ())) for item in items]
    ranked = {item.path for item, named in zip(items, fixtures, strict=True) if RANKS in named}
    for item, named in zip(items, fixtures, strict=True):
        if BROKERS & named:
            item.add_marker(pytest.mark.broker)
        if item.get_closest_marker("xdist_group") is None:
            group = RANKS if item.path in ranked else str(item.path)
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def ports_of_this_test() -> Iterator[None]:
    with releasing_ports():
        yield


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command configures the logs of its process, which here is that of all tests."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartProgram]:
    """Starts programs and waits until they answer; kills what is left at the end."""
    running: list[subprocess.Popen[bytes]] = []

    def start_program(program: Program) -> "subprocess.Popen[bytes]":
        with (tmp_path / f"{program.name}.log").open("ab") as log:
            process = subprocess.Popen(
                program.argv, stdout=log, stderr=log, env={**os.environ, **program.environment}
            )
        running.append(process)
        asyncio.run(wait_ready(program))
        return process

    yield start_program
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    """Brokers of this test alone, not yet started."""
    return plan_brokers(tmp_path / "brokers", PASSWORD)


@pytest.fixture
def nats_url(brokers: Brokers, start: StartProgram) -> str:
    start(program(brokers, "nats"))
    return brokers.environment["DIGENRL_NATS_URL"]


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """A connection of the run "test" to a broker that has its streams."""
    async with Bus.connect(nats_url, run="test", name="test") as bus:
        await bus.ensure_streams()
        yield bus


@pytest.fixture
def redis_url(brokers: Brokers, start: StartProgram) -> str:
    start(program(brokers, "valkey"))
    return brokers.environment["DIGENRL_REDIS_URL"]


@pytest.fixture
def folder_store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(FolderBackend(tmp_path / "objects"))


@pytest.fixture
def s3_store(brokers: Brokers, start: StartProgram, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    start(program(brokers, "objects"))
    for key, value in brokers.environment.items():
        monkeypatch.setenv(key, value)
    return open_store(ServiceSettings(run="test").store)
