"""Finds problems of this machine that would keep a run from working, with remedies.

Each check looks at one thing and returns a finding. It deletes its probes again, an object in the
store and brokers in a folder of their own.
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

from digenrl.local.brokers.embedded import broker_binaries, plan_brokers
from digenrl.local.checking.inputs import check_inputs
from digenrl.local.limits import (
    BROKER_STOP_S,
    GPU_TRIAL_TIMEOUT_S,
    MAX_SKEW_S,
    MIN_DISK_BYTES,
    MIN_MEMORY_BYTES,
    MIN_OPEN_FILES,
    SERVICE_TIMEOUT_S,
)
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
GPU_TRIAL_CODE = "from shared.diffusion.loading.device import tried_gpu; print(tried_gpu())"
TIME_LAUNCHES = (
    "from digenrl.trace.device_profile.launch_times import described_host; print(described_host())"
)
VARIABLES = frozenset(
    f"DIGENRL_{name.upper()}" for name in (*ServiceSettings.model_fields, "api_token")
) | {
    "DIGENRL_SECRETS_DIR", "DIGENRL_MODELS", "DIGENRL_STARTER", "DIGENRL_PRIVATE_HOSTS",
    "DIGENRL_FAILPOINT", "DIGENRL_EXAMPLES", "DIGENRL_KEYS",
    "DIGENRL_SCHEDULER_URL", "DIGENRL_SHOWN_URL",
}  # fmt: skip
"""Variables that some program of DigenRL reads."""
ADDRESSES = {
    "nats": "NATS_URL", "redis": "REDIS_URL", "store": "STORE_URL and DIGENRL_S3_ENDPOINT",
    "clock": "S3_ENDPOINT", "api": "API_TOKENS",
}  # fmt: skip
"""Settings with their addresses."""


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
    """Look at this machine."""
    yield _python()
    yield from _packages()
    yield from _variables(os.environ)
    yield from secrets_findings(os.environ.get("DIGENRL_SECRETS_DIR"))
    yield _disk(runs)
    yield _memory()
    yield _files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _ports()
    yield from (found := list(_brokers()))
    if all(each.state == "ok" for each in found):
        yield path_finding(runs)
    yield from proxy_findings()
    yield from gpu_findings()


def _python() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("python", "ok", found)


def _packages() -> Iterator[Finding]:
    """Compare what is installed with what this version of DigenRL needs."""
    num_checked = 0
    for line in requires("digenrl") or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        num_checked += 1
        try:
            there = version(wanted.name)
        except PackageNotFoundError:
            yield Finding("packages", "fault", f"{wanted.name} is not installed", "make install")
            continue
        if not wanted.specifier.contains(Version(there), prereleases=True):
            found = f"{wanted.name} is {there}, and {wanted.specifier} is needed"
            yield Finding("packages", "fault", found, "make install")
    yield Finding("packages", "ok", f"{num_checked} looked at")


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Name variables of ours that no code reads: most are mistyped."""
    ours = [name for name in environment if name.startswith("DIGENRL_")]
    for name in sorted(set(ours) - VARIABLES):
        [near] = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.6) or [""]
        remedy = f"is {near} meant?" if near else "unset it"
        yield Finding("environment", "fault", f"{name} is read by nobody", remedy)
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
    for each in sorted(path.iterdir()):
        if not os.access(each, os.R_OK):
            yield Finding(
                "secrets", "fault", f"{each} cannot be read", f"chown it to {os.getuid()}"
            )
        elif each.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            remedy = f"chmod 600 {quote(str(each))}"
            yield Finding("secrets", "fault", f"others may read {each}", remedy)
    yield Finding("secrets", "ok", f"{path}")


def _existing(runs: Path) -> Path:
    return next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())


def _disk(runs: Path) -> Finding:
    there = _existing(runs)
    if not os.access(there, os.W_OK):
        return Finding("disk", "fault", f"{there} cannot be written", "choose another --runs")
    free = shutil.disk_usage(there).free
    if free < MIN_DISK_BYTES:
        found = f"{there} has {free >> 20} MiB free"
        return Finding("disk", "fault", found, "free some space, or choose another --runs")
    return Finding("disk", "ok", f"{there} has {free >> 30} GiB free")


def _memory() -> Finding:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    state: State = "warning" if free < MIN_MEMORY_BYTES else "ok"
    remedy = "end other programs: the demo needs 2 GiB" if state == "warning" else ""
    return Finding("memory", state, f"{free / 2**30:.1f} GiB free", remedy)


def _files(limit: int) -> Finding:
    if 0 <= limit < MIN_OPEN_FILES:
        found = f"a process may open {limit} files"
        return Finding("open files", "fault", found, f"ulimit -n {4 * MIN_OPEN_FILES}")
    return Finding("open files", "ok", f"{limit}")


def _ports() -> Finding:
    try:
        return Finding("ports", "ok", f"{free_ports(1)[0]} is free on 127.0.0.1")
    except OSError as error:
        return Finding("ports", "fault", f"none is free on 127.0.0.1: {error}", "end programs")


def _brokers() -> Iterator[Finding]:
    for name, found in broker_binaries().items():
        if isinstance(found, UserError):
            remedy = "needed by `digenrl up` alone"
            yield Finding("brokers", "warning", f"{name}: {found}", remedy)
        else:
            yield Finding("brokers", "ok", f"{name}: {found}")


def path_finding(runs: Path) -> Finding:
    """Start brokers below the folder of runs, and end them."""
    there = _existing(runs)
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".doctor-") as folder:
            asyncio.run(_start_brokers(Path(folder)))
    except (DigenRLError, OSError) as error:
        return Finding("path", "fault", str(error), "choose another --runs")
    return Finding("path", "ok", f"brokers start below {there}")


async def _start_brokers(folder: Path) -> None:
    plan, supervisor = plan_brokers(folder, load_keys(folder)), Supervisor(folder, {})
    try:
        await asyncio.gather(*(supervisor.start(program) for program in plan.programs))
    finally:
        await supervisor.stop(list(supervisor.children), seconds=BROKER_STOP_S)


def proxy_findings() -> Iterator[Finding]:
    for kind, proxy in proxies().items():
        found = f"{kind.upper()}_PROXY={public(proxy)}, but not for loopback and a run's own hosts"
        yield Finding("proxy", "ok", found)


def gpu_findings() -> list[Finding]:
    try:
        gpus = visible_gpus()
    except UserError as error:
        return [Finding("gpus", "fault", str(error))]
    if not gpus:
        hidden = f" ({VISIBLE}={os.environ[VISIBLE]})" if VISIBLE in os.environ else ""
        remedy = "what a host takes to launch kernels is measured with a GPU"
        return [
            Finding("gpus", "warning", f"none{hidden}: tiny models alone run on the CPU", remedy)
        ]
    if find_spec("torch") is None:
        return [Finding("gpus", "ok", f"{len(gpus)}, not tried: torch is not installed")]
    found = try_gpus(gpus)
    if found[0].state == "ok":
        found.append(_try_gpu(gpus[0], TIME_LAUNCHES))
    return found


def try_gpus(gpus: Sequence[str]) -> list[Finding]:
    """Compute on each of these GPUs."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_try_gpu, gpus))


def _try_gpu(gpu: str, program: str = GPU_TRIAL_CODE) -> Finding:
    """Have a child compute on a GPU: what CUDA begins in a process stays there."""
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", program], env={**os.environ, VISIBLE: gpu},
            capture_output=True, text=True, timeout=GPU_TRIAL_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding("gpus", "fault", f"GPU {gpu} does not answer", "restart the machine")
    if ended.returncode == 0:
        return Finding("gpus", "ok", f"GPU {gpu}: {ended.stdout.strip()}")
    last = ended.stderr.strip().rpartition("\n")[2] or f"a child ended with {ended.returncode}"
    return Finding("gpus", "fault", f"GPU {gpu}: {last.rpartition(f'{VISIBLE}={gpu}: ')[2]}")


def recipe_finding(path: Path) -> Finding:
    """Look whether a recipe can run here, as `digenrl up` does before it starts anything."""
    try:
        check_inputs(load_recipe(path))
    except DigenRLError as error:
        return Finding("recipe", "fault", str(error), "`digenrl check` has more")
    return Finding("recipe", "ok", str(path))


async def service_findings(settings: ServiceSettings) -> list[Finding]:
    """Look at the brokers and the store that the settings name, as a service's start does."""
    checks: dict[str, Callable[[ServiceSettings], Awaitable[str]]] = {
        "nats": _nats, "redis": _redis, "store": _store, "clock": _clock, "api": _api,
    }  # fmt: skip
    found = []
    for name, check in checks.items():
        try:
            async with asyncio.timeout(SERVICE_TIMEOUT_S):
                if said := await check(settings):
                    found.append(Finding(name, "ok", said))
        except DigenRLError as error:
            found.append(Finding(name, "fault", str(error)))
        except TimeoutError:
            said = f"does not answer within {SERVICE_TIMEOUT_S:.0f} s"
            remedy = f"look at DIGENRL_{ADDRESSES[name]}, and whether it runs"
            found.append(Finding(name, "fault", said, remedy))
    return found


async def _nats(settings: ServiceSettings) -> str:
    if "nats_url" not in settings.model_fields_set:
        return ""
    async with settings.connect_bus() as bus:
        await bus.check()
    return "answers, stores, and knows this user"


async def _redis(settings: ServiceSettings) -> str:
    if "redis_url" not in settings.model_fields_set:
        return ""
    async with settings.connect_index() as index:
        try:
            await index.lookup(0)
        except Unavailable as error:
            raise UserError(f"DIGENRL_REDIS_URL: {error}") from error
        except NoPermissionError:
            pass  # most roles read nothing there
        return "answers, and knows this user"


async def _store(settings: ServiceSettings) -> str:
    if "store_url" not in settings.model_fields_set:
        return ""
    store, key = open_store(settings.store), f"{settings.run}/files/doctor.json"
    await check_store(settings.store, store, key, may_be_open=settings.open_brokers)
    await store.create(key, b"{}")
    await store.delete([key])
    return f"{settings.store_place} keeps what is written, and creates once"


async def _clock(settings: ServiceSettings) -> str:
    """Compare this clock with the store's.

    Raises:
        UserError: if they differ by more than some seconds.
    """
    if settings.s3_endpoint is None:
        return ""
    try:
        async with httpx.AsyncClient(
            verify=settings.trusted, timeout=SERVICE_TIMEOUT_S, trust_env=False
        ) as client:
            answer = await client.head(settings.s3_endpoint)
        there = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (httpx.HTTPError, KeyError, ValueError):
        return ""  # the store's own check says more
    skew = time.time() - there
    if abs(skew) > MAX_SKEW_S:
        raise UserError(f"this clock differs by {skew:+.0f} s from the store's; run an NTP client")
    return f"{abs(skew):.0f} s from the store's"


async def _api(settings: ServiceSettings) -> str:
    """Look at the files by which an HTTP API of this host knows its callers."""
    if settings.api_tokens is None:
        return ""
    HttpSettings(api_tokens=settings.api_tokens).access(settings.run)
    return f"{settings.api_tokens} has tokens"
