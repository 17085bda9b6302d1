"""A Slurm cluster of two nodes, as containers, with a folder that both see."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.lab import docker
from tests.paths import ROOT

IMAGE, NETWORK = "digenrl-slurm", "digenrl-slurm"
NODES, GPUS = ("one", "two"), 24
PATIENCE_S = 300.0
CONFIGURATION = f"""ClusterName=test
SlurmctldHost={NODES[0]}
SlurmUser=root
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
StateSaveLocation=/var/lib/slurm/ctld
SlurmdSpoolDir=/var/lib/slurm/node
GresTypes=gpu
NodeName={",".join(NODES)} CPUs={GPUS} Gres=gpu:{GPUS}
PartitionName=all Nodes=ALL Default=YES
"""
"""24 GPUs and processors per node, none of them real. A requeued job starts after 5 s."""
DAEMONS = """set -e
    install -o munge -m 400 /shared/munge.key /etc/munge/munge.key
    cp /shared/*.conf /etc/slurm/
    for gpu in $(seq 0 {last}); do mknod /dev/nvidia$gpu c 195 $gpu; done
    su -s /bin/sh munge -c munged
    {controller}
    slurmd"""


@dataclass(frozen=True)
class Cluster:
    clone: Path
    """The folder in which a user types commands: on all nodes, and here."""

    def type(
        self, command: str, node: str = NODES[0], environment: Mapping[str, object] | None = None
    ) -> str:
        """What a user's shell prints in the clone."""
        given = {"OMP_NUM_THREADS": 1, **(environment or {})}
        variables = " ".join(f"{key}={value}" for key, value in given.items())
        return docker(
            "exec", "--user", "me", "--workdir", str(self.clone), f"slurm-{node}",
            "sh", "-c", f"{variables} {command}",
        )  # fmt: skip

    def submit(self, command: str, **environment: object) -> str:
        """The number of the job that a typed command submits."""
        said = self.type(command, environment=environment)
        assert said.startswith("Submitted batch job "), said
        return said.split()[-1]

    def fields(self, job: str) -> dict[str, str]:
        """What Slurm knows about a job: a job's first component, an array's first element."""
        words = self.type(f"scontrol --oneliner show job {job}").splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self, job: str) -> str:
        path = self.clone / f"digenrl-{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_end(self, job: str) -> None:
        """Return when a job has ended, which has to be with status 0 and before its limit."""
        began = time.monotonic()
        while (state := self.fields(job)["JobState"]) in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() - began < PATIENCE_S, f"{state}: {self.log(job)[-3000:]}"
            time.sleep(0.5)
        assert (state, self.fields(job)["ExitCode"]) == ("COMPLETED", "0:0"), self.log(job)[-3000:]

    def wait_for_log(self, job: str, text: str, count: int = 1) -> None:
        began = time.monotonic()
        while (said := self.log(job)).count(text) < count:
            assert time.monotonic() - began < PATIENCE_S, said[-3000:]
            time.sleep(0.5)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Two nodes on which a clone of the repository is installed."""
    recipe, empty = ROOT / "tests/deploy/slurm.Dockerfile", ROOT / "deploy/empty"
    docker("build", "-q", "--network=host", "-t", IMAGE, "-f", str(recipe), str(empty))
    clone = folder / "digenrl"
    clone.mkdir()
    for name, target in (("deploy", ROOT / "deploy"), ("models", ROOT / "models"),
                         (".venv", Path(sys.prefix))):  # fmt: skip
        (clone / name).symlink_to(target)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "slurm.conf").write_text(CONFIGURATION)
    (folder / "gres.conf").write_text(f"Name=gpu File=/dev/nvidia[0-{GPUS - 1}]\n")
    try:
        docker("network", "create", NETWORK)
        for node in NODES:
            _start(folder, node)
        for node in reversed(NODES):  # the node of the controller is the last
            controller = "slurmctld" if node == NODES[0] else ""
            script = DAEMONS.format(last=GPUS - 1, controller=controller)
            docker("exec", f"slurm-{node}", "sh", "-c", script)
        docker("exec", f"slurm-{NODES[0]}", "chown", "me", str(clone))
        found = Cluster(clone)
        began = time.monotonic()
        while found.type("sinfo --noheader --format=%T").splitlines() != ["idle"]:
            assert time.monotonic() - began < PATIENCE_S, found.type("sinfo --long --Node")
            time.sleep(0.5)
        yield found
    finally:
        with suppress(AssertionError):
            docker("rm", "--force", *(f"slurm-{node}" for node in NODES))
        with suppress(AssertionError):
            docker("network", "rm", NETWORK)


def _start(folder: Path, node: str) -> None:
    python = Path(os.path.realpath(sys.executable)).parents[1]
    docker(
        "run", "--detach", "--init", "--name", f"slurm-{node}", "--hostname", node,
        "--network", NETWORK, "--network-alias", node, "--cap-add", "MKNOD",
        "--volume", f"{python}:{python}:ro", "--volume", f"{ROOT}:{ROOT}:ro",
        "--volume", f"{sys.prefix}:{sys.prefix}:ro", "--volume", f"{folder}:{folder}",
        "--volume", f"{folder}:/shared", IMAGE,
    )  # fmt: skip
    parents = {str(each) for path in (python, ROOT, folder / "x") for each in path.parents}
    script = f"chmod a+rx {' '.join(parents - {'/'})} 2>/dev/null || true"
    docker("exec", f"slurm-{node}", "sh", "-c", script)
