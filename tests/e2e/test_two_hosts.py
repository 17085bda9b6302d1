"""Three members on two hosts, which are network namespaces: a line between them, and nothing else
but the folder that is their store."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.spread.network import Host, network, why_not
from digenrl.local.brokers.embedded import plan_brokers
from shared.run.commits import commit_chain
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.brokers import PASSWORD, program
from tests.e2e.local_run import SMALL, recipe_of

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(600)]

RUN, PATIENCE_S = "hosts", 300.0
BROKERS = ("nats", "valkey", "scheduler")


@dataclass
class Site:
    """What runs on the hosts."""

    folder: Path
    environment: dict[str, str]
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, host: Host, name: str, *argv: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                host.command(argv),
                stdout=log, stderr=log, env={**os.environ, **self.environment, **environment},
            )  # fmt: skip

    def serve(self, host: Host, name: str, service: str, *more: str, **environment: str) -> None:
        named = () if service == "scheduler" else ("--worker", name)
        argv = (sys.executable, "-m", "digenrl", "serve", service, *more, *named)
        self.start(host, name, *argv, **environment)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def alive(self) -> None:
        ended = [n for n, p in self.running.items() if n in BROKERS and p.poll() is not None]
        assert not ended, (self.folder / f"{ended[0]}.log").read_text()[-2000:]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if reason := why_not():
        pytest.skip(reason)
    with network([None] * 2) as made:
        yield made


def test_three_members_on_two_hosts_sum_over_the_line_and_one_host_may_be_lost(
    hosts: list[Host], tmp_path: Path
) -> None:
    steps, (one, two) = 5, hosts
    changes = SMALL | {
        "run.name": RUN, "run.steps": steps, "schedule.mode": "fluid", "rollout.workers": 0,
        "trainer.devices": 3, "trainer.updates": 1, "trainer.exchange": "group",
    }  # fmt: skip
    recipe = recipe_of(tmp_path, changes)
    brokers = plan_brokers(tmp_path / "brokers", PASSWORD)
    config = tmp_path / "brokers" / "nats" / "nats.conf"
    config.write_text(config.read_text().replace('listen: "127.0.0.1', 'listen: "0.0.0.0'))
    objects = tmp_path / "objects"
    nats = brokers.environment["DIGENRL_NATS_URL"].replace("127.0.0.1", one.address)
    site = Site(tmp_path, brokers.environment | {
        "DIGENRL_NATS_URL": nats, "DIGENRL_STORE_URL": f"file://{objects}", "DIGENRL_RUN": RUN,
    })  # fmt: skip

    def until(version: int) -> None:
        record, began = objects / RUN / "commits" / f"{version:08d}.json", time.monotonic()
        while not record.exists():
            site.alive()
            assert time.monotonic() - began < PATIENCE_S
            time.sleep(0.1)

    try:
        for name in ("nats", "valkey"):
            started = program(brokers, name)
            site.start(one, name, *started.argv, **started.environment)
        site.serve(one, "scheduler", "scheduler", "--recipe", str(recipe), "--port", "0")
        site.serve(one, "reward-0", "reward")
        for host, name in ((one, "trainer-0"), (one, "trainer-1"), (two, "trainer-2")):
            site.serve(host, name, "trainer")
        until(2)
        site.kill("trainer-2")
        until(3)
        site.serve(two, "trainer-2", "trainer")
        until(steps)
    finally:
        for name in list(site.running):
            site.kill(name)
    chain = asyncio.run(commit_chain(ObjectStore(FolderBackend(objects)), RUN))
    assert [len(record.trained) for record in chain] == [0] + [3] * steps
    members = {share.worker.rsplit("-", 1)[0] for record in chain for share in record.shares}
    assert members == {"trainer-0", "trainer-1", "trainer-2"}


def test_hosts_of_a_far_site_train_and_one_sum_of_theirs_crosses(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    changes = SMALL | {
        "run.name": RUN, "run.steps": 3, "schedule.mode": "fluid", "rollout.workers": 0,
        "trainer.devices": 3, "trainer.updates": 1, "trainer.exchange": "store",
    }  # fmt: skip
    recipe, objects = recipe_of(tmp_path, changes), tmp_path / "objects"
    with network([None], [None] * 2, 10.0) as (one, *lab):
        brokers = plan_brokers(tmp_path / "brokers", PASSWORD, at=one.address)
        urls = {
            key: value.replace("127.0.0.1", one.address)
            for key, value in brokers.environment.items()
        }
        urls |= {"DIGENRL_STORE_URL": f"file://{objects}", "DIGENRL_RUN": RUN}
        site = Site(tmp_path, urls)
        try:
            for name in ("nats", "valkey"):
                started = program(brokers, name)
                site.start(one, name, *started.argv, **started.environment)
            site.serve(one, "scheduler", "scheduler", "--recipe", str(recipe), "--port", "0")
            site.serve(one, "reward-0", "reward")
            for number, host in enumerate((one, *lab)):
                site.serve(
                    host, f"trainer-{number}", "trainer",
                    DIGENRL_SITE="home" if host is one else "lab",
                    DIGENRL_SHARE_AT=f"{host.address}:7800",
                    DIGENRL_HOST_CACHE=str(tmp_path / f"cache-{number}"),
                )  # fmt: skip
            record, began = objects / RUN / "commits" / "00000003.json", time.monotonic()
            while not record.exists():
                site.alive()
                assert time.monotonic() - began < PATIENCE_S
                time.sleep(0.1)
        finally:
            for name in list(site.running):
                site.kill(name)
    chain = asyncio.run(commit_chain(ObjectStore(FolderBackend(objects)), RUN))
    members = {share.worker.rsplit("-", 1)[0] for record in chain for share in record.shares}
    assert members == {"trainer-0", "trainer-1", "trainer-2"}
    rounds = list(objects.glob(f"{RUN}/batches/*/exchange/*"))
    added_up = [each for each in rounds if (each / "leaders").is_dir()]
    assert added_up, "of the lab's two hosts"
    for batch in objects.glob(f"{RUN}/batches/*"):
        assert len(list(batch.glob("*.sum.safetensors"))) <= 2, "the lab's sum, and the total"
    assert "exchange_missed" not in "".join(
        (tmp_path / f"trainer-{number}.log").read_text() for number in range(3)
    )
