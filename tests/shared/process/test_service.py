"""How a service process starts and ends: its port first, and never longer than it is wanted."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

from shared.bus.bus import Bus
from shared.errors import UserError
from shared.process.service import give_threads, listen
from shared.process.worker_process import until_finished
from shared.recipe.recipe import load_recipe, override
from shared.run.layout import commit_key
from shared.run.versions import VersionIndex
from shared.store import ObjectStore
from tests import examples
from tests.brokers import PASSWORD
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe

PATIENCE_S = 25

Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
async def stored_run(folder_store: ObjectStore) -> None:
    """The recipe of the demo, where a worker of its run finds it."""
    await store_recipe(folder_store, load_recipe(DIGITS))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """``serve("reward")`` types `digenrl serve reward --run digits`; NATS is not there."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "digenrl", "serve", *arguments, "--run", "digits"],
            stderr=subprocess.PIPE, text=True,
            env={
                **os.environ,
                "DIGENRL_STORE_URL": f"file://{tmp_path}/objects",
                "DIGENRL_NATS_URL": "nats://digenrl:secret@127.0.0.1:9",
                **environment,
            },
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: "subprocess.Popen[str]", event: str) -> dict[str, str]:
    """The next line of the log that says so."""
    assert process.stderr is not None
    lines = []
    impatience = threading.Timer(PATIENCE_S, process.kill)
    impatience.start()
    try:
        for line in process.stderr:
            lines.append(line)
            if f'"event": "{event}"' in line:
                entry: dict[str, str] = json.loads(line)
                return entry
    finally:
        impatience.cancel()
    raise AssertionError(f"it ended without saying {event}: {lines}")


@pytest.mark.parametrize(
    "service",
    ["reward", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rollout", "trainer"))],
)
def test_a_worker_of_a_live_run_whose_port_is_taken_says_so_in_one_line_and_ends(
    service: str, serve: Serve, stored_run: None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = serve(service, "--port", str(port))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors == (
        f"digenrl: --port: {port} is occupied on 127.0.0.1; choose another, or 0 for a free one\n"
    )


@pytest.mark.slow
def test_workers_take_free_ports_and_say_which(serve: Serve, stored_run: None) -> None:
    urls = [said(process, "listening")["url"] for process in (serve("reward"), serve("reward"))]
    assert len(set(urls)) == 2
    for url in urls:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        assert httpx.get(f"{url}/livez", timeout=20).json() == {"status": "alive"}


def ended_by_sigterm(process: "subprocess.Popen[str]") -> int:
    """Its status, within a few seconds and without a traceback."""
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=10)
    assert "Traceback" not in rest
    return process.returncode


async def test_a_worker_says_what_it_waits_for_where_and_what_decides_that(
    serve: Serve, folder_store: ObjectStore, tmp_path: Path
) -> None:
    """First its run is not there, then a broker that answers."""
    process = serve("reward")
    waits = said(process, "waiting_for_recipe")
    assert waits["run"] == "digits" and waits["store"] == f"file://{tmp_path}/objects"
    assert "--run (DIGENRL_RUN)" in waits["hint"] and "DIGENRL_STORE_URL" in waits["hint"]
    await store_recipe(folder_store, load_recipe(DIGITS))
    assert said(process, "run_found")["store"].startswith("file://")
    assert said(process, "loading")["model"].endswith("models/digits")
    lost = said(process, "nats_unavailable")
    assert (lost["nats"], lost["setting"]) == ("nats://127.0.0.1:9", "DIGENRL_NATS_URL")
    assert ended_by_sigterm(process) == 0


STUCK = """
import asyncio, time
from shared.process import service
service.EXIT_TIMEOUT_S = 0.3
async def stuck():
    print("here", flush=True)
    await asyncio.to_thread(time.sleep, 600)
listener = service.listen("127.0.0.1", 0)
app = service.worker_app("reward", service.Health())
asyncio.run(service.serve(app, stuck(), listener=listener))
"""


def test_a_thread_that_nobody_can_interrupt_does_not_keep_a_process_from_ending() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("here" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143


async def test_what_a_device_does_next_does_not_wait_until_objects_are_stored() -> None:
    give_threads()
    stored = threading.Event()
    storing = [asyncio.create_task(asyncio.to_thread(stored.wait)) for _ in range(40)]
    try:
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: "a step") == "a step"
    finally:
        stored.set()
        await asyncio.gather(*storing)


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with Bus.connect(nats_url, run="digits", name="scheduler") as connected:
        await connected.ensure_streams()
        yield connected


@pytest.mark.slow
async def test_a_worker_ends_with_its_finished_run_and_says_where_it_got_before(
    serve: Serve, stored_run: None, folder_store: ObjectStore, nats_url: str, bus: Bus
) -> None:
    steps = load_recipe(DIGITS).run.steps
    await folder_store.write(commit_key("digits", steps), b"")
    process = serve("reward", environment={"DIGENRL_NATS_URL": nats_url})
    place = (await asyncio.to_thread(said, process, "connected"))["nats"]
    assert place.startswith("nats://127.0.0.1:") and PASSWORD not in place
    assert (await asyncio.to_thread(said, process, "ready"))["device"] == "cpu"
    await bus.publish(examples.published(steps))
    await asyncio.to_thread(said, process, "run_finished")
    _, rest = await asyncio.to_thread(process.communicate, timeout=10)
    assert (process.returncode, "Traceback" in rest) == (0, False)


@pytest.mark.slow
async def test_a_worker_that_is_to_stay_outlives_its_run_and_leaves_no_traceback(
    serve: Serve, stored_run: None, folder_store: ObjectStore, nats_url: str, bus: Bus
) -> None:
    steps = load_recipe(DIGITS).run.steps
    await folder_store.write(commit_key("digits", steps), b"")
    await bus.publish(examples.published(steps))
    process = serve("reward", "--stay", environment={"DIGENRL_NATS_URL": nats_url})
    await asyncio.to_thread(said, process, "ready")
    with pytest.raises(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, 2)
    assert await asyncio.to_thread(ended_by_sigterm, process) == 0


async def test_a_run_that_was_given_more_steps_is_finished_after_those_are_committed(
    folder_store: ObjectStore, bus: Bus
) -> None:
    first = override(load_recipe(DIGITS), {"run.steps": 1})
    await store_recipe(folder_store, override(first, {"run.steps": 2}))
    finishing = asyncio.create_task(until_finished(bus, folder_store, first))
    for version in (1, 2):  # nobody has committed the second one
        await bus.publish(examples.published(version))
        assert not (await asyncio.wait({finishing}, timeout=0.5))[0]
    await folder_store.write(commit_key("digits", 2), b"")
    await asyncio.wait_for(finishing, 5)


@pytest.mark.slow
async def test_a_wrong_password_is_named_with_its_setting_and_without_itself(
    nats_url: str, redis_url: str, serve: Serve, stored_run: None
) -> None:
    wrong = nats_url.replace(PASSWORD, "mistaken")
    process = serve("reward", environment={"DIGENRL_NATS_URL": wrong})
    _, errors = await asyncio.to_thread(process.communicate, timeout=60)
    last = errors.splitlines()[-1]
    assert process.returncode == 2
    assert last.startswith("digenrl: DIGENRL_NATS_URL: NATS at nats://127.0.0.1:")
    assert "refuses this user or password" in last and "mistaken" not in errors
    with pytest.raises(UserError, match=r"DIGENRL_REDIS_URL: Redis at redis://127\.0\.0\.1:"):
        async with VersionIndex.connect(redis_url.replace(PASSWORD, "mistaken"), run="digits"):
            raise AssertionError("it was let in")


def test_the_second_part_of_an_answer_does_not_wait_until_the_first_is_acknowledged() -> None:
    listener = listen("127.0.0.1", 0)
    with listener.socket, socket.create_connection(listener.socket.getsockname()):
        accepted, _ = listener.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
