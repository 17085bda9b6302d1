"""Every pod of the chart's demo as a container: the run comes to its end."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from tests.deploy.chart import documents, render, values_of
from tests.deploy.pods import Cluster, build, running
from tests.hub.mirror import mirror
from tests.paths import ROOT

pytest.importorskip("helm_python", reason="helm-python-sdk is missing")
pytestmark = [pytest.mark.deploy, pytest.mark.run, pytest.mark.usefixtures("needs_docker")]
MAX_RUN_S = 600.0
NAME = "tiny/digits-model"
IMAGES = ("scheduler", "view", "host", "nats", "redis", "s3")


def make_secrets(keys: Path, run: str) -> Mapping[str, Mapping[str, str]]:
    """What docs/deploy/kubernetes.md has a user type."""
    places = {"nats": "digenrl-nats:4222", "redis": "digenrl-redis:6379"}
    options = [word for name, at in places.items() for word in (f"--{name}", at)]
    options += ["--s3", "http://digenrl-s3:8333", "--run", run]
    assert CliRunner().invoke(app, ["keys", "init", str(keys), *options]).exit_code == 0
    printed = CliRunner().invoke(app, ["keys", "secrets", str(keys)])
    listed = json.loads(printed.stdout)
    assert {each["kind"] for each in listed["items"]} == {"Secret"}
    return {each["metadata"]["name"]: each["data"] for each in listed["items"]}


def ask(cluster: Cluster, token: str) -> list[dict[str, Any]]:
    """The state of the run, by each scheduler: one commands, the other passes requests on."""
    schedulers = [pod for pod in cluster.pods if pod.component == "scheduler"]
    assert len(schedulers) == 2
    answers = [cluster.get(each, "/v1/run", token=token)[1] for each in schedulers]
    return [json.loads(each) for each in answers]


def wait_until(is_so: Callable[[], bool], cluster: Cluster) -> None:
    deadline = time.monotonic() + MAX_RUN_S
    while True:
        with suppress(OSError):
            if is_so():
                return
        assert time.monotonic() < deadline, "\n".join(map(cluster.logs, cluster.pods))
        time.sleep(2)


def wait_finished(cluster: Cluster, token: str) -> None:
    wait_until(lambda: {each["phase"] for each in ask(cluster, token)} == {"finished"}, cluster)


def check(cluster: Cluster, keys: Path) -> None:
    """All pods are ready, and no secret is in what Docker shows of them."""
    for pod in cluster.pods:
        wait_until(partial(cluster.probe, pod, "readiness"), cluster)
        assert cluster.probe(pod, "liveness"), cluster.logs(pod)
    shown = cluster.inspect()
    for path in keys.glob("*/secret"):
        assert path.read_text().strip() not in shown


@pytest.fixture(scope="module")
def images() -> None:
    for image in IMAGES:
        build(image)


@pytest.mark.timeout(1500)
def test_the_pods_of_the_demo_train_to_the_end_and_come_back_when_killed(
    images: None, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    secrets = make_secrets(keys, "digits")
    values = {**values_of("demo"), "options": ["--steps", "8"]}
    with running(documents(render(values)), secrets) as cluster:
        cluster.wait_started()
        token = (keys / "viewer.token").read_text().strip()
        wait_until(lambda: ask(cluster, token)[0]["step"] >= 2, cluster)
        assert set(cluster.deaths().values()) == {0}
        commanding = [pod for pod in cluster.pods if cluster.get_or_none(pod, "/readyz")]
        killed = [next(pod for pod in commanding if pod.component == "scheduler")]
        killed.append(next(pod for pod in cluster.pods if pod.role == "rollout"))
        for pod in killed:
            cluster.kill(pod)
        wait_finished(cluster, token)
        check(cluster, keys)
        assert cluster.deaths() == {pod.name: int(pod in killed) for pod in cluster.pods}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_pods_of_the_demo_on_fluid_devices_train_to_the_end(
    images: None, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    secrets = make_secrets(keys, "digits-fluid")
    with running(documents(render(values_of("fluid"))), secrets) as cluster:
        cluster.wait_started()
        wait_finished(cluster, (keys / "viewer.token").read_text().strip())
        check(cluster, keys)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_jobs_fetch_the_model_of_each_pool_before_its_pods_start(
    images: None, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    values = {
        **values_of("demo"),
        "recipe": "/recipe/mine.toml",
        "recipeFiles": {"mine.toml": f'base = "/app/recipes/digits.toml"\nmodel.id = "{NAME}"\n'},
        "models": {"fetch": True},
        "options": ["--steps", "3"],
    }
    with mirror() as hub:
        hub.add(NAME, ROOT / "models/digits")
        secrets = make_secrets(keys, "digits")
        with running(documents(render(values)), secrets, HF_ENDPOINT=hub.url) as cluster:
            cluster.wait_started()
            wait_finished(cluster, (keys / "viewer.token").read_text().strip())
            check(cluster, keys)
            assert len(cluster.jobs) == 3  # rollout, trainer, reward
