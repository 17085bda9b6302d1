"""A small emulated cluster of real services and brokers whose processes may be killed and stopped.

Every service is a process of its own, and whatever dies is started again, as under a supervisor.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import httpx

from bench.cluster.build import member_hosts
from bench.cluster.processes import SETTING, joined_key
from bench.cluster.setting import Setting, recipe_of, write_prompts
from digenrl.local.brokers.embedded import Program, plan_brokers, wait_ready
from digenrl.local.processes.ports import free_ports
from digenrl.local.secrets.keys import load_keys
from digenrl.local.secrets.tokens import Tokens, load_tokens
from shared.errors import Unavailable
from shared.messages.rights import ROLES, Role
from shared.process.linux import die_with_parent
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe, override
from shared.run.commits import CommitRecord, commit_chain
from shared.store import ObjectStore, open_store
from tests.storm.disks import small_disks
from tests.storm.service import run_service

AGAIN_S = 0.1
"""Seconds before a dead process is restarted."""
LOOK_S = 0.03
PATIENCE_S = 60.0

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["tests.storm.service"])


@dataclass(slots=True)
class Child:
    """A process that is kept running."""

    name: str
    start: Callable[[], "ForkServerProcess | subprocess.Popen[bytes]"]
    process: "ForkServerProcess | subprocess.Popen[bytes]"
    kept: bool = True
    num_deaths: int = 0
    num_starts: int = 0
    """How often it was started again."""

    @property
    def is_alive(self) -> bool:
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll() is None
        return self.process.is_alive()

    def send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive and self.process.pid is not None:
                os.kill(self.process.pid, signum)


@dataclass(slots=True)
class Cluster:
    """One run on it."""

    folder: Path
    setting: Setting
    recipe: Recipe
    environment: dict[str, str]
    port: int
    second_port: int
    """Port of the API of `scheduler-1`, the scheduler that may stand by."""
    tokens: Tokens
    secrets: Mapping[Role, Mapping[str, str]]
    """What each role proves itself with."""
    owner: Mapping[str, str]
    children: dict[str, Child] = field(default_factory=dict)

    @property
    def store(self) -> ObjectStore:
        return open_store(self.settings.store)

    @property
    def settings(self) -> ServiceSettings:
        environment = {**self.environment, **self.secrets["scheduler"], **self.owner}
        given = {key.removeprefix("DIGENRL_").lower(): v for key, v in environment.items()}
        return ServiceSettings(run=self.recipe.run.name, worker="tests", **given)  # type: ignore[arg-type]

    def add(self, name: str) -> None:
        """Start a service and keep it running: rollout-2 is the third of the setting's devices."""

        def start() -> ForkServerProcess:
            port = self.second_port if name == "scheduler-1" else self.port
            arguments = (name, self.folder, self._environment(name), port)
            process = _forked.Process(target=run_service, args=arguments, daemon=True)
            process.start()
            return process

        self.children[name] = Child(name, start, start())

    def _environment(self, name: str) -> dict[str, str]:
        role = next(role for role in ROLES if name.startswith(role))
        return {**self.environment, **self.secrets[role]}

    async def add_broker(self, program: Program) -> None:
        def start() -> "subprocess.Popen[bytes]":
            with (self.folder / f"{program.name}.log").open("ab") as log:
                return subprocess.Popen(
                    program.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **program.environment},
                    start_new_session=True,
                    preexec_fn=die_with_parent if sys.platform == "linux" else None,
                )

        self.children[program.name] = Child(program.name, start, start())
        await wait_ready(program)

    async def keep(self) -> None:
        """Start again whatever dies, for ever."""
        while True:
            for child in list(self.children.values()):
                if child.kept and not child.is_alive:
                    child.num_deaths += 1
                    await asyncio.sleep(AGAIN_S)
                    if child.kept:  # it may have been removed meanwhile
                        child.process = child.start()
                        child.num_starts += 1
            await asyncio.sleep(LOOK_S)

    def send(self, name: str, signum: int) -> None:
        """A signal to one process: SIGKILL, SIGTERM, SIGSTOP, SIGCONT."""
        self.children[name].send(signum)

    async def remove(self, name: str, signum: int = signal.SIGKILL) -> None:
        """End a process, for good."""
        child = self.children.pop(name)
        child.kept = False
        child.send(signum)
        await until(lambda: not child.is_alive)

    async def get(self, path: str) -> Any:
        """None while no scheduler answers that commands."""
        headers = self.tokens.headers("viewer")
        async with httpx.AsyncClient(verify=False, timeout=5, headers=headers) as client:
            for port in (self.port, self.second_port):
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.get(f"http://127.0.0.1:{port}{path}")
                    return answer.raise_for_status().json()
        return None

    async def status(self, name: str, probe: str = "readyz") -> tuple[int, str]:
        """Return what a probe of a scheduler says; 0 while it does not answer."""
        port = self.second_port if name == "scheduler-1" else self.port
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(verify=False, timeout=1) as client:
                answer = await client.get(f"http://127.0.0.1:{port}/{probe}")
                return answer.status_code, answer.json()["status"]
        return 0, ""

    async def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        headers = self.tokens.headers("operator")
        async with httpx.AsyncClient(verify=False, timeout=5, headers=headers) as client:
            ready, _ = await self.status("scheduler")
            port = self.port if ready == 200 else self.second_port
            answer = await client.post(f"http://127.0.0.1:{port}{path}", json=body)
            answer.raise_for_status()

    async def until_run(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The run's view, as soon as it fulfils this."""
        found: dict[str, Any] = {}

        async def look() -> bool:
            nonlocal found
            found = await self.get("/v1/run") or {}
            return bool(found) and holds(found)

        await self.until(look, "a view of the run that fulfils what was asked")
        return found

    async def until_step(self, step: int, *, seconds: float = PATIENCE_S) -> None:
        """Wait until the store holds the commit of that version."""

        async def look() -> bool:
            return await self.num_commits() > step

        await self.until(look, f"version {step}", seconds=seconds)

    async def until(
        self, look: Callable[[], Awaitable[bool]], what: str, *, seconds: float = PATIENCE_S
    ) -> None:
        """Wait for something that the run does; the error says what, and where the run is."""
        try:
            await until_true(look, seconds=seconds)
        except AssertionError:
            view, deaths = await self.get("/v1/run"), self.num_deaths
            dead = [child.name for child in self.children.values() if not child.is_alive]
            raise AssertionError(
                f"not within {seconds:.0f} s: {what}; {await self.num_commits()} versions, {view}, "
                f"not alive: {dead}, started again: {deaths}"
            ) from None

    @property
    def num_deaths(self) -> dict[str, int]:
        """How often each process was restarted."""
        return {child.name: child.num_deaths for child in self.children.values()}

    async def num_commits(self) -> int:
        """Versions, with the first one; 0 while the store is away."""
        with contextlib.suppress(Unavailable, OSError):
            return len(await self.store.keys(f"{self.recipe.run.name}/commits"))
        return 0

    async def commits(self) -> list[CommitRecord]:
        return await commit_chain(self.store, self.recipe.run.name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    @property
    def members(self) -> list[str]:
        return members_of(self.setting)

    def check_roles(self) -> None:
        """Check that nobody wanted to do what its role may not."""
        refused = [name for name in self.children if "permissions violation" in self.log(name)]
        assert not refused, refused

    def end(self) -> None:
        for child in self.children.values():
            child.kept = False
            child.send(signal.SIGKILL)
        for child in self.children.values():
            if isinstance(child.process, subprocess.Popen):
                child.process.wait()
            else:
                child.process.join()


@contextlib.asynccontextmanager
async def cluster(
    folder: Path,
    setting: Setting,
    *,
    changes: dict[str, Any] | None = None,
    services: Sequence[str] = (),
    stores_in: Literal["folder", "s3"] = "folder",
    disks: Mapping[str, str] | None = None,
    more: Mapping[str, str] | None = None,
) -> AsyncIterator[Cluster]:
    """A run whose first version may be published: every worker has joined.

    ``changes``: to its recipe. ``services``: by default all rollout devices of the setting, two
    reward workers, its members and the scheduler. ``stores_in``: a folder, or SeaweedFS.
    ``disks``: size of the disk that a
    broker has to itself, such as 256m, by its name; root alone can mount one. ``more``: environment
    of all services.
    """
    recipe = _prepare(folder, setting, changes or {})
    with small_disks(folder, disks or {}):
        plan = plan_brokers(folder, load_keys(folder), runs=[recipe.run.name])
        tokens = load_tokens(folder)
        environment = {**plan.environment, **tokens.environment, **(more or {})}
        if stores_in == "folder":
            environment["DIGENRL_STORE_URL"] = f"file://{folder / 'objects'}"
        first, second = free_ports(2)
        run = Cluster(
            folder, setting, recipe, environment, first, second, tokens, plan.secrets, plan.owner,
        )  # fmt: skip
        brokers = [p for p in plan.programs if p.name != "objects" or stores_in == "s3"]
        keeping = asyncio.create_task(asyncio.sleep(0))
        try:
            await asyncio.gather(*(run.add_broker(program) for program in brokers))
            for name in services or every_service(setting):
                run.add(name)
            keeping = asyncio.create_task(run.keep())
            await _until_joined(run)
            await run.store.create(joined_key(recipe.run.name), b"")
            yield run
            run.check_roles()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            run.end()


def _prepare(folder: Path, setting: Setting, changes: dict[str, Any]) -> Recipe:
    folder.mkdir(parents=True)
    (folder / SETTING).write_text(setting.model_dump_json())
    # With encoders more than the run gets to, so that there is always something to encode.
    epochs = 1000 if setting.encoders else 8
    write_prompts(folder, setting.load_profile().shape.groups * epochs)
    recipe = override(recipe_of(setting, folder), changes)
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    return recipe


def every_service(setting: Setting) -> list[str]:
    rollout = [f"rollout-{number}" for number in range(setting.num_rollout)]
    encoders = [f"encoder-{number}" for number in range(setting.encoders)]
    return ["scheduler", *rollout, *encoders, "reward-0", "reward-1", *members_of(setting)]


def members_of(setting: Setting) -> list[str]:
    return [each.name for host in member_hosts(setting) for each in host]


async def _until_joined(run: Cluster) -> None:
    services = [name.split("-")[0] for name in run.children]
    wanted = {name: services.count(name) for name in ("rollout", "reward")}
    await run.until_run(
        lambda view: all(view["num_workers"][name] == wanted[name] for name in wanted)
    )


async def until(holds: Callable[[], bool], *, seconds: float = PATIENCE_S) -> None:
    async def look() -> bool:
        return holds()

    await until_true(look, seconds=seconds)


async def until_true(look: Callable[[], Awaitable[bool]], *, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not await look():
        assert time.monotonic() < deadline, "it did not get there"
        await asyncio.sleep(LOOK_S)
