"""Three members on two hosts, which are network namespaces: a line between them, and nothing else
but the folder that is their store."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from digenrl.local.brokers import plan_brokers
from shared.recipe.recipe import load_recipe, override
from shared.run.commits import commit_chain
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.brokers import PASSWORD, program
from tests.e2e.local_run import SMALL
from tests.paths import DIGITS

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(600)]

RUN, FIRST, PATIENCE_S = "hosts", "10.77.0.1", 300.0
ADDRESSES = {"one": FIRST, "two": "10.77.0.2"}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Hosts:
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def space(self, host: str) -> str:
        return f"dg-{os.getpid()}-{host}"

    def connect(self) -> None:
        """Make the hosts and the line; raises CalledProcessError where that is not allowed."""
        for host in ADDRESSES:
            _ip("netns", "add", self.space(host))
        ends = {host: f"dg{os.getpid() % 10**6}{host[0]}" for host in ADDRESSES}
        _ip("link", "add", ends["one"], "type", "veth", "peer", "name", ends["two"])
        for host, address in ADDRESSES.items():
            space, end = self.space(host), ends[host]
            _ip("link", "set", end, "netns", space)
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", space, "link", "set", end, "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def start(self, host: str, name: str, *argv: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.space(host), *argv],
                stdout=log, stderr=log, env={**os.environ, **self.environment, **environment},
            )  # fmt: skip

    def serve(self, host: str, name: str, service: str, *more: str) -> None:
        argv = (sys.executable, "-m", "digenrl", "serve", service, *more)
        self.start(host, name, *argv, *(() if service == "scheduler" else ("--worker", name)))

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        for name in list(self.running):
            self.kill(name)
        for host in ADDRESSES:
            subprocess.run(["ip", "netns", "del", self.space(host)], capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need ip, and root")
    made = Hosts(tmp_path)
    try:
        made.connect()
    except subprocess.CalledProcessError as error:
        made.end()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield made
    made.end()


def until(holds: Callable[[], Any], alive: Callable[[], None]) -> None:
    began = time.monotonic()
    while not holds():
        alive()
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.1)


def test_three_members_on_two_hosts_sum_over_the_line_and_one_host_may_be_lost(
    hosts: Hosts, tmp_path: Path
) -> None:
    steps = 5
    changes = SMALL | {
        "run.name": RUN, "run.steps": steps, "schedule.mode": "fluid", "rollout.workers": 0,
        "trainer.devices": 3, "trainer.updates": 1, "trainer.exchange": "group",
    }  # fmt: skip
    recipe = tmp_path / "recipe.json"
    recipe.write_text(override(load_recipe(DIGITS), changes).model_dump_json())
    brokers = plan_brokers(tmp_path / "brokers", PASSWORD)
    config = tmp_path / "brokers" / "nats" / "nats.conf"
    config.write_text(config.read_text().replace('listen: "127.0.0.1', 'listen: "0.0.0.0'))
    objects = tmp_path / "objects"
    nats = brokers.environment["DIGENRL_NATS_URL"].replace("127.0.0.1", FIRST)
    hosts.environment = brokers.environment | {
        "DIGENRL_NATS_URL": nats, "DIGENRL_STORE_URL": f"file://{objects}", "DIGENRL_RUN": RUN,
    }  # fmt: skip
    for name in ("nats", "valkey"):
        started = program(brokers, name)
        hosts.start("one", name, *started.argv, **started.environment)
    hosts.serve("one", "scheduler", "scheduler", "--recipe", str(recipe), "--port", "0")
    hosts.serve("one", "reward-0", "reward")
    for host, name in (("one", "trainer-0"), ("one", "trainer-1"), ("two", "trainer-2")):
        hosts.serve(host, name, "trainer")

    def alive() -> None:
        ended = [n for n, p in hosts.running.items() if n in BROKERS and p.poll() is not None]
        assert not ended, (tmp_path / f"{ended[0]}.log").read_text()[-2000:]

    def version(number: int) -> Path:
        return objects / RUN / "commits" / f"{number:08d}.json"

    until(lambda: version(2).exists(), alive)
    hosts.kill("trainer-2")
    until(lambda: version(3).exists(), alive)
    hosts.serve("two", "trainer-2", "trainer")
    until(lambda: version(steps).exists(), alive)
    chain = asyncio.run(commit_chain(ObjectStore(FolderBackend(objects)), RUN))
    assert [len(record.trained) for record in chain] == [0] + [3] * steps
    members = {share.worker.rsplit("-", 1)[0] for record in chain for share in record.shares}
    assert members == {"trainer-0", "trainer-1", "trainer-2"}


BROKERS = ("nats", "valkey", "scheduler")
