"""The first host of a run: its brokers, its scheduler and its page, at an address for the others.

Their data are in the folder in which the keys are, so that commands of this host find the run there
as one of `digenrl up`.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from digenrl.api.offline_routes import run_view
from digenrl.api.run_history import RunHistory
from digenrl.local.brokers.embedded import LOOPBACK, Ports, plan_brokers
from digenrl.local.brokers.seaweedfs import OWNER, Server
from digenrl.local.limits import BROKER_STOP_S, PROGRESS_POLL_S
from digenrl.local.processes.program import Program
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.running.command_lines import PAGE, command
from digenrl.local.runs import RECIPE_JSON, RunProgress, lock_run, noted_store, write_address
from digenrl.local.secrets.certificates import authority_in
from digenrl.local.secrets.keys import Keys, load_keys
from digenrl.local.secrets.tokens import KEYS, Tokens, load_tokens
from digenrl.local.secrets.tunnel import tunnel
from shared.errors import DigenRLError, UserError
from shared.recipe.recipe import Recipe
from shared.store import open_store

SCHEDULER_PORT, PAGE_PORT = 8000, 8001
HOST_VARIABLES = ("DIGENRL_HOST_CACHE", "DIGENRL_STORE_FOLDER")
"""Settings of brokers that concern their own host alone."""


@dataclass(frozen=True, slots=True)
class FirstHost:
    at: str
    """Address of this host for the others."""
    recipe_file: Path
    recipe: Recipe


@asynccontextmanager
async def lead(first: FirstHost, folder: Path) -> AsyncIterator[Supervisor]:
    """Run what a run has once, for the time of this block; yield its supervisor.

    Args:
        folder: the folder of the keys, which are made where they are missing.

    Raises:
        UserError: if the address is not one of this machine that others can use, or another process
            has the run.
    """
    if folder.name != KEYS:
        raise UserError(
            f"--keys: {folder} has to be called {KEYS}; the run's data are in the folder around it"
        )
    with lock_run(folder.parent.parent, folder.parent.name):
        async with _brokers(first, folder.parent) as supervisor:
            for program in (_page(first, folder), _scheduler(first, folder)):
                await supervisor.start(program, wait=False)
            yield supervisor
            await supervisor.stop(["scheduler", PAGE])


def check_address(at: str, key: str) -> None:
    """Raises UserError, which begins with the key, if other hosts cannot use an address."""
    try:
        address = ipaddress.ip_address(at)
    except ValueError as error:
        raise UserError(
            f"{key}: {at!r} is no address; give the first host's own, as 10.0.0.1"
        ) from error
    is_none = address.is_unspecified or address.is_multicast or address.is_reserved
    if is_none or at == LOOPBACK or address.version != 4:
        raise UserError(
            f"{key}: {at} is no IPv4 address of a private network; `digenrl up` is for one host"
        )


def _prepare(at: str, data: Path) -> None:
    """Make the run's folders, and delete certificates, which may be of an earlier address."""
    check_address(at, "--at")
    with socket.socket() as probe:
        try:
            probe.bind((at, 0))
        except OSError as error:
            raise UserError(f"--at: {at} is no address of this machine") from error
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    (data / "logs").mkdir(exist_ok=True)
    for folder in (data / "tls", data / KEYS / "scheduler"):
        (folder / "cert.pem").unlink(missing_ok=True)


@asynccontextmanager
async def _brokers(first: FirstHost, data: Path) -> AsyncIterator[Supervisor]:
    """Run NATS, Valkey and SeaweedFS, with TLS, and yield their supervisor."""
    _prepare(first.at, data)
    at, run, ports, keys = first.at, first.recipe.run.name, Ports(), load_keys(data)
    authority = authority_in(keys.folder / "ca")
    brokers = plan_brokers(data, keys, at=at, ports=ports, authority=authority, runs=[run])
    keys.write(brokers.secrets)
    authority.certificate(keys.folder / "scheduler", [at])
    load_tokens(data)
    supervisor, names = Supervisor(data / "logs", {}), [each.name for each in brokers.programs]
    async with AsyncExitStack() as stack:
        tls = authority.certificate(data / "tls", [at])
        stack.push_async_callback(supervisor.stop, names, seconds=BROKER_STOP_S)
        await asyncio.gather(*(supervisor.start(program) for program in brokers.programs))
        await stack.enter_async_context(tunnel(at, ports.redis, brokers.redis_inner, tls))
        stack.enter_context(noted_store(data, brokers.environment | brokers.secrets["client"]))
        shared = brokers.environment.items()
        settings = {name: value for name, value in shared if name not in HOST_VARIABLES}
        keys.write_settings({**settings, "DIGENRL_RUN": run})
        store = open_store(Server(at, ports.s3, OWNER, keys.store, authority.pem).settings)
        history = RunHistory(store, run)
        noting = asyncio.create_task(_note_repeatedly(data, history))
        try:
            yield supervisor
        finally:
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)
            await _note(data, history)


async def _note_repeatedly(data: Path, history: RunHistory) -> None:
    while True:
        await _note(data, history)
        await asyncio.sleep(PROGRESS_POLL_S)


async def _note(data: Path, history: RunHistory) -> None:
    """Note a run's recipe and progress in its folder, where commands find them."""
    with suppress(DigenRLError, OSError):
        now = await run_view(history)
        if history.recipe is not None:
            file, recipe = data / RECIPE_JSON, history.recipe.model_dump_json(indent=1)
            if not file.is_file() or file.read_text() != recipe:  # its age shows the run's age
                file.write_text(recipe)
            state = now.phase if now.phase in ("finished", "failed") else "running"
            RunProgress(state, now.step, now.steps, now.reward_mean, now.failure).write(data)


def _scheduler(first: FirstHost, keys: Path) -> Program:
    secrets = keys / "scheduler"
    write_address(keys.parent, f"http://127.0.0.1:{PAGE_PORT}")  # where commands ask: it has tokens
    return Program(
        name="scheduler",
        argv=command(
            "serve", "scheduler", "--recipe", str(first.recipe_file),
            "--run", first.recipe.run.name, "--host", first.at, "--port", str(SCHEDULER_PORT),
        ),
        environment={
            **Keys(keys).environment("scheduler"), **Tokens(keys).environment,
            "DIGENRL_TLS_CERT": str(secrets / "cert.pem"),
            "DIGENRL_TLS_KEY": str(secrets / "key.pem"),
        },
    )  # fmt: skip


def _page(first: FirstHost, keys: Path) -> Program:
    write_address(keys.parent, f"http://127.0.0.1:{PAGE_PORT}", "page")
    return Program(
        name=PAGE,
        argv=command(
            "view", "--scheduler", f"https://{first.at}:{SCHEDULER_PORT}",
            "--token-file", str(keys / "operator.token"), "--port", str(PAGE_PORT),
        ),
        environment={
            **Keys(keys).environment("client"), **Tokens(keys).environment,
            "DIGENRL_RUN": first.recipe.run.name,
        },
        optional=True,
    )  # fmt: skip
