"""Every pod of the chart's demo as a container: the run comes to its end."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from tests.deploy.chart import documents, render, values_of
from tests.deploy.pods import Cluster, build, running

pytest.importorskip("helm_python", reason="helm-python-sdk is missing")
pytestmark = [pytest.mark.deploy, pytest.mark.run, pytest.mark.usefixtures("needs_docker")]
MAX_RUN_S = 600.0
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


def wait_finished(cluster: Cluster, token: str) -> None:
    """Ask all schedulers: one commands, and the other passes requests on."""
    schedulers = [pod for pod in cluster.pods if pod.component == "scheduler"]
    assert len(schedulers) == 2
    deadline = time.monotonic() + MAX_RUN_S
    phases: set[str] = set()
    while phases != {"finished"}:
        assert time.monotonic() < deadline, "\n".join(map(cluster.logs, cluster.pods))
        time.sleep(2)
        answers = [cluster.get(each, "/v1/run", token=token)[1] for each in schedulers]
        phases = {json.loads(each)["phase"] for each in answers}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["demo", "fluid"])
def test_the_pods_of_the_demo_train_to_the_end(name: str, tmp_path: Path) -> None:
    for image in IMAGES:
        build(image)
    values = values_of(name)
    secrets = make_secrets(tmp_path / "keys", values.get("run", "digits"))
    with running(documents(render(values)), secrets) as cluster:
        cluster.wait_started()
        wait_finished(cluster, (tmp_path / "keys/viewer.token").read_text().strip())
        for pod in cluster.pods:
            assert cluster.probe(pod, "readiness"), cluster.logs(pod)
            assert cluster.probe(pod, "liveness"), cluster.logs(pod)
        shown = cluster.inspect()
        for path in (tmp_path / "keys").glob("*/secret"):
            assert path.read_text().strip() not in shown
        assert set(cluster.deaths().values()) == {0}
