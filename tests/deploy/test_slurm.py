"""A run on two nodes of Slurm, with the commands of the page as they are typed there."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from tests.deploy.judged import faults_of_run
from tests.deploy.slurm import GPUS, NODES, Cluster, cluster
from tests.paths import ROOT

pytestmark = [
    pytest.mark.deploy, pytest.mark.run, pytest.mark.timeout(1200),
    pytest.mark.usefixtures("needs_docker"),
]  # fmt: skip
LIMIT_MINUTES = 3
"""Slurm sends TERM two minutes before, or up to a minute earlier."""
END_S = 30.0


def typed_commands() -> list[str]:
    """What the page types, in its order: to start a run, to continue it, and to join it."""
    page = (ROOT / "docs/deploy/slurm.md").read_text()
    return re.findall(r"^(sbatch .*?)(?: +#.*)?$", page, re.MULTILINE)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def devices(nodes: Cluster, node: str) -> str:
    """The devices that Slurm gives to `digenrl host`."""
    found = "tr '\\0' '\\n' < /proc/$(pgrep -of 'digenrl host')/environ"
    return nodes.type(f'sh -c "{found}" | sed -n s/^CUDA_VISIBLE_DEVICES=//p', node)


def test_a_run_drains_at_its_limit_continues_and_is_joined_and_requeued(nodes: Cluster) -> None:
    start, again, join = typed_commands()
    drained = nodes.submit(start, TRAINER_ROLES="reward", SBATCH_TIMELIMIT=LIMIT_MINUTES)
    nodes.wait_for_log(drained, '"event": "host_begins"', count=2)
    for node in NODES:
        assert len(devices(nodes, node).split(",")) == GPUS // 3
    nodes.wait_for_end(drained)  # long before its work is done: nobody trains

    job = nodes.submit(again)
    nodes.wait_for_log(job, '"event": "stepped"')
    array = nodes.submit(join, SBATCH_TIMELIMIT=LIMIT_MINUTES)
    nodes.wait_for_log(f"join-{array}-0", '"event": "ready"')
    nodes.type(f"scontrol requeue {job}")
    nodes.wait_for_end(job)
    end = datetime.fromisoformat(nodes.fields(job)["EndTime"]).replace(tzinfo=UTC)
    [finish] = re.findall(r'"phase": "finished".*"ts": "(.*?)"', nodes.log(job))
    assert (end - datetime.fromisoformat(finish)).total_seconds() < END_S
    nodes.wait_for_end(array)
    assert faults_of_run(nodes.clone / "runs" / f"job-{drained}") == []
    for node in NODES:
        assert nodes.type("pgrep -fa '[d]igenrl|[n]ats-server|[w]eed|[v]alkey' || true", node) == ""
