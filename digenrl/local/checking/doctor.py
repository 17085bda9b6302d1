"""Finds problems of this machine that prevent runs, with remedies.

Each check returns a finding. Checks delete their probes: an object in the store, and brokers in a
temporary folder.
"""

import asyncio
import difflib
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Literal

import httpx
from packaging.requirements import Requirement
from packaging.version import Version
from redis.exceptions import NoPermissionError

from digenrl.local import limits
from digenrl.local.brokers.embedded import broker_binaries, plan_brokers
from digenrl.local.checking.inputs import check_inputs
from digenrl.local.processes.gpus import VISIBLE, visible_gpus
from digenrl.local.processes.ports import free_ports
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.secrets.keys import load_keys
from shared.errors import DigenRLError, Unavailable, UserError
from shared.process.settings import HttpSettings, ServiceSettings
from shared.process.store_check import check_store
from shared.proxies import proxies
from shared.recipe.recipe import load_recipe
from shared.store import open_store
from shared.telemetry import public

State = Literal["ok", "warning", "fault"]
GPU_TRIAL_CODE = "from shared.diffusion.loading.device import try_gpu; print(try_gpu())"
TIME_LAUNCHES = (
    "from digenrl.trace.device_profile.launch_times import describe_host; print(describe_host())"
)
VARIABLES = frozenset(
    f"DIGENRL_{name.upper()}" for name in (*ServiceSettings.model_fields, "api_token")
) | {
    "DIGENRL_SECRETS_DIR", "DIGENRL_MODELS", "DIGENRL_STARTER", "DIGENRL_PRIVATE_HOSTS",
    "DIGENRL_FAILPOINT", "DIGENRL_EXAMPLES", "DIGENRL_KEYS",
    "DIGENRL_SCHEDULER_URL", "DIGENRL_SHOWN_URL",
}  # fmt: skip
"""Environment variables that DigenRL reads."""
ADDRESSES = {
    "nats": "NATS_URL", "redis": "REDIS_URL", "store": "STORE_URL and DIGENRL_S3_ENDPOINT",
    "clock": "S3_ENDPOINT", "api": "API_TOKENS",
}  # fmt: skip
"""Variables with the address of each checked service, without the prefix `DIGENRL_`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    check: str
    state: State
    found: str
    remedy: str = ""

    def line(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.state:<8} {self.check:<12} {self.found}{remedy}"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def local_findings(runs: Path) -> Iterator[Finding]:
    """Check this machine."""
    yield _python()
    yield from _packages()
    yield from _variables(os.environ)
    yield from secrets_findings(os.environ.get("DIGENRL_SECRETS_DIR"))
    yield disk_finding(runs)
    yield _memory()
    yield _files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _ports()
    yield from (findings := list(_brokers()))
    if all(each.state == "ok" for each in findings):
        yield path_finding(runs)
    yield from proxy_findings()
    yield from gpu_findings()


def _python() -> Finding:
    python = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("python", "ok", python)


def _packages() -> Iterator[Finding]:
    """Compare the installed packages with the requirements of this release."""
    num_checked = 0
    for line in requires("digenrl") or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        num_checked += 1
        try:
            installed = version(wanted.name)
        except PackageNotFoundError:
            yield Finding("packages", "fault", f"{wanted.name} is not installed", "make install")
            continue
        if not wanted.specifier.contains(Version(installed), prereleases=True):
            text = f"{wanted.name} is {installed}, and {wanted.specifier} is needed"
            yield Finding("packages", "fault", text, "make install")
    yield Finding("packages", "ok", f"{num_checked} checked")


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report variables with our prefix that no code reads; most are mistyped."""
    ours = [name for name in environment if name.startswith("DIGENRL_")]
    for name in sorted(set(ours) - VARIABLES):
        [near] = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.6) or [""]
        remedy = f"is {near} meant?" if near else "unset it"
        yield Finding("environment", "fault", f"{name} is unknown", remedy)
    yield Finding("environment", "ok", f"{len(ours)} variables of DigenRL")


def secrets_findings(folder: str | None) -> Iterator[Finding]:
    if folder is None:
        return
    path = Path(folder)
    if not path.is_dir():
        yield Finding(
            "secrets", "fault", f"DIGENRL_SECRETS_DIR: {path} is no folder",
            "`digenrl keys init` makes one per role",
        )  # fmt: skip
        return
    for each in sorted(file for file in path.iterdir() if file.is_file()):
        status = each.stat()
        # A volume of Kubernetes has files of root, and gives them to the group of a pod.
        others = stat.S_IRWXO | (stat.S_IRWXG if status.st_uid == os.getuid() else stat.S_IWGRP)
        if not os.access(each, os.R_OK):
            yield Finding(
                "secrets", "fault", f"{each} cannot be read", f"chown it to {os.getuid()}"
            )
        elif status.st_mode & others:
            remedy = f"chmod 600 {quote(str(each))}"
            yield Finding("secrets", "fault", f"others may read {each}", remedy)
    yield Finding("secrets", "ok", f"{path}")


def _existing(runs: Path) -> Path:
    return next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())


def disk_finding(folder: Path, setting: str = "--runs") -> Finding:
    existing = _existing(folder)
    if not os.access(existing, os.W_OK):
        return Finding(
            "disk", "fault", f"{existing} cannot be written", f"choose another {setting}"
        )
    free = shutil.disk_usage(existing).free
    if free < limits.MIN_DISK_BYTES:
        text = f"{existing} has {free >> 20} MiB free"
        return Finding("disk", "fault", text, f"free some space, or choose another {setting}")
    return Finding("disk", "ok", f"{existing} has {free >> 30} GiB free")


def _memory() -> Finding:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    state: State = "warning" if free < limits.MIN_MEMORY_BYTES else "ok"
    remedy = "stop other programs: the demo needs 2 GiB" if state == "warning" else ""
    return Finding("memory", state, f"{free / 2**30:.1f} GiB free", remedy)


def _files(limit: int) -> Finding:
    if 0 <= limit < limits.MIN_OPEN_FILES:
        text = f"a process may open {limit} files"
        return Finding("open files", "fault", text, f"ulimit -n {4 * limits.MIN_OPEN_FILES}")
    return Finding("open files", "ok", f"{limit}")


def _ports() -> Finding:
    try:
        return Finding("ports", "ok", f"{free_ports(1)[0]} is free on 127.0.0.1")
    except OSError as error:
        text = f"no port is free on 127.0.0.1: {error}"
        return Finding("ports", "fault", text, "stop other programs")


def _brokers() -> Iterator[Finding]:
    for name, binary in broker_binaries().items():
        if isinstance(binary, UserError):
            remedy = "only `digenrl up` needs it"
            yield Finding("brokers", "warning", f"{name}: {binary}", remedy)
        else:
            yield Finding("brokers", "ok", f"{name}: {binary}")


def path_finding(runs: Path) -> Finding:
    """Check that brokers start in a folder below the folder of runs."""
    existing = _existing(runs)
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".doctor-") as folder:
            asyncio.run(_start_brokers(Path(folder)))
    except (DigenRLError, OSError) as error:
        return Finding("path", "fault", str(error), "choose another --runs")
    return Finding("path", "ok", f"brokers start below {existing}")


async def _start_brokers(folder: Path) -> None:
    plan, supervisor = plan_brokers(folder, load_keys(folder)), Supervisor(folder, {})
    try:
        await asyncio.gather(*(supervisor.start(program) for program in plan.programs))
    finally:
        await supervisor.stop(list(supervisor.children), seconds=limits.BROKER_STOP_S)


def proxy_findings() -> Iterator[Finding]:
    for kind, proxy in proxies().items():
        text = f"{kind.upper()}_PROXY={public(proxy)}, except for loopback and the hosts of a run"
        yield Finding("proxy", "ok", text)


def gpu_findings() -> list[Finding]:
    try:
        gpus = visible_gpus()
    except UserError as error:
        return [Finding("gpus", "fault", str(error))]
    if not gpus:
        hidden = f" ({VISIBLE}={os.environ[VISIBLE]})" if VISIBLE in os.environ else ""
        remedy = "the time of kernel launches is measured only with a GPU"
        return [
            Finding("gpus", "warning", f"no GPU{hidden}: the CPU can run only tiny models", remedy)
        ]
    if find_spec("torch") is None:
        return [Finding("gpus", "ok", f"{len(gpus)}, not tested: torch is not installed")]
    findings = try_gpus(gpus)
    if findings[0].state == "ok":
        findings.append(_try_gpu(gpus[0], TIME_LAUNCHES))
    return findings


def try_gpus(gpus: Sequence[str]) -> list[Finding]:
    """Run a small computation on each of these GPUs."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_try_gpu, gpus))


def _try_gpu(gpu: str, program: str = GPU_TRIAL_CODE) -> Finding:
    """Run a small computation on a GPU in a child process, which alone initialises CUDA."""
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", program], env={**os.environ, VISIBLE: gpu},
            capture_output=True, text=True, timeout=limits.GPU_TRIAL_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding("gpus", "fault", f"GPU {gpu} does not respond", "restart the machine")
    if result.returncode == 0:
        return Finding("gpus", "ok", f"GPU {gpu}: {result.stdout.strip()}")
    last = result.stderr.strip().rpartition("\n")[2] or f"exit code {result.returncode}"
    return Finding("gpus", "fault", f"GPU {gpu}: {last.rpartition(f'{VISIBLE}={gpu}: ')[2]}")


def recipe_finding(path: Path) -> Finding:
    """Check whether a recipe can run here, as `digenrl up` does before it starts processes."""
    try:
        check_inputs(load_recipe(path))
    except DigenRLError as error:
        return Finding("recipe", "fault", str(error), "`digenrl check` reports details")
    return Finding("recipe", "ok", str(path))


async def service_findings(settings: ServiceSettings) -> list[Finding]:
    """Check the brokers and the store of the settings, as a service does at its start."""
    checks: dict[str, Callable[[ServiceSettings], Awaitable[str]]] = {
        "nats": _nats, "redis": _redis, "store": _store, "clock": _clock, "api": _api,
    }  # fmt: skip
    findings = []
    for name, check in checks.items():
        try:
            async with asyncio.timeout(limits.SERVICE_TIMEOUT_S):
                if text := await check(settings):
                    findings.append(Finding(name, "ok", text))
        except DigenRLError as error:
            findings.append(Finding(name, "fault", str(error)))
        except TimeoutError:
            text = f"does not respond within {limits.SERVICE_TIMEOUT_S:.0f} s"
            remedy = f"check DIGENRL_{ADDRESSES[name]}, and whether the service runs"
            findings.append(Finding(name, "fault", text, remedy))
    return findings


async def _nats(settings: ServiceSettings) -> str:
    if "nats_url" not in settings.model_fields_set:
        return ""
    async with settings.connect_bus() as bus:
        await bus.check()
    return "responds, stores messages, and accepts this user"


async def _redis(settings: ServiceSettings) -> str:
    if "redis_url" not in settings.model_fields_set:
        return ""
    async with settings.connect_index() as index:
        try:
            await index.lookup(0)
        except Unavailable as error:
            raise UserError(f"DIGENRL_REDIS_URL: {error}") from error
        except NoPermissionError:
            pass  # most roles have no read access
        return "responds, and accepts this user"


async def _store(settings: ServiceSettings) -> str:
    if "store_url" not in settings.model_fields_set:
        return ""
    store, key = open_store(settings.store), f"{settings.run}/files/doctor.json"
    await check_store(settings.store, store, key, may_be_open=settings.open_brokers)
    await store.create(key, b"{}")
    await store.delete([key])
    return f"{settings.store_place} stores objects, and supports exclusive create"


async def _clock(settings: ServiceSettings) -> str:
    """Compare this machine's clock with the clock of the store.

    Raises:
        UserError: if the clocks differ by more than `MAX_SKEW_S`.
    """
    if settings.s3_endpoint is None:
        return ""
    try:
        async with httpx.AsyncClient(
            verify=settings.trusted, timeout=limits.SERVICE_TIMEOUT_S, trust_env=False
        ) as client:
            response = await client.head(settings.s3_endpoint)
        store_time = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError):
        return ""  # the check of the store reports the error
    skew = time.time() - store_time
    if abs(skew) > limits.MAX_SKEW_S:
        raise UserError(f"this clock differs by {skew:+.0f} s from the store's; run an NTP client")
    return f"{abs(skew):.0f} s from the store's"


async def _api(settings: ServiceSettings) -> str:
    """Check the file of tokens by which an HTTP API of this host identifies its callers."""
    if settings.api_tokens is None:
        return ""
    HttpSettings(api_tokens=settings.api_tokens).access(settings.run)
    return f"{settings.api_tokens} has tokens"
