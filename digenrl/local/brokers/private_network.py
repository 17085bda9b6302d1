"""Brokers for the hosts of a private network."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from digenrl.api.offline_routes import run_view
from digenrl.api.run_history import RunHistory
from digenrl.local.brokers.embedded import LOOPBACK, Brokers, Ports, plan_brokers
from digenrl.local.brokers.seaweedfs import OWNER, Server
from digenrl.local.limits import BROKER_STOP_S, PROGRESS_POLL_S
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.runs import RECIPE_JSON, RunProgress, noted_store
from digenrl.local.secrets.certificates import authority_in
from digenrl.local.secrets.keys import Keys, load_keys
from digenrl.local.secrets.tokens import load_tokens
from digenrl.local.secrets.tunnel import tunnel
from shared.errors import DigenRLError, UserError
from shared.store import ObjectStore, open_store

HOST_VARIABLES = ("DIGENRL_HOST_CACHE", "DIGENRL_STORE_FOLDER")


@contextlib.asynccontextmanager
async def private_network(at: str, data: Path, run: str) -> AsyncIterator[Supervisor]:
    """Run NATS, Valkey and SeaweedFS, with TLS, and yield their supervisor. Commands of this host
    find the run in the folder, as one of `digenrl up`.

    Raises:
        UserError: if ``at`` is no address of this machine that others can use.
    """
    check_address(at, "--at")
    with socket.socket() as probe:
        try:
            probe.bind((at, 0))
        except OSError as error:
            raise UserError(f"--at: {at} is no address of this machine") from error
    data, ports = _made(data), Ports()
    keys = load_keys(data)
    authority = authority_in(keys.folder / "ca")
    brokers = plan_brokers(data, keys, at=at, ports=ports, authority=authority, runs=[run])
    keys.write(brokers.secrets)
    authority.certificate(keys.folder / "scheduler", [at])
    load_tokens(data)
    supervisor = Supervisor(data / "logs", {})
    async with contextlib.AsyncExitStack() as stack:
        names = [each.name for each in brokers.programs]
        stack.push_async_callback(supervisor.stop, names, seconds=BROKER_STOP_S)
        await asyncio.gather(*(supervisor.start(program) for program in brokers.programs))
        tls = authority.certificate(data / "tls", [at])
        await stack.enter_async_context(tunnel(at, ports.redis, brokers.redis_inner, tls))
        stack.enter_context(noted_store(data, brokers.environment | brokers.secrets["client"]))
        _write_settings(keys, brokers, run)
        store = open_store(Server(at, ports.s3, OWNER, keys.store, authority.pem).settings)
        noting = asyncio.create_task(_note_for_ever(data, store, run))
        try:
            yield supervisor
        finally:
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)
            await _note(data, RunHistory(store, run))


async def _note_for_ever(data: Path, store: ObjectStore, run: str) -> None:
    """Note a run's recipe and progress in its folder, where commands find them."""
    history = RunHistory(store, run)
    while True:
        await _note(data, history)
        await asyncio.sleep(PROGRESS_POLL_S)


async def _note(data: Path, history: RunHistory) -> None:
    with contextlib.suppress(DigenRLError, OSError):
        now = await run_view(history)
        if history.recipe is not None:
            file, recipe = data / RECIPE_JSON, history.recipe.model_dump_json(indent=1)
            if not file.is_file() or file.read_text() != recipe:  # its age shows the run's age
                file.write_text(recipe)
            state = now.phase if now.phase in ("finished", "failed") else "running"
            RunProgress(state, now.step, now.steps, now.reward_mean, now.failure).write(data)


def _made(data: Path) -> Path:
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    (data / "logs").mkdir(exist_ok=True)
    return data.resolve()


def check_address(at: str, key: str) -> None:
    """Raises UserError, which begins with the key, if other hosts cannot use an address."""
    try:
        address = ipaddress.ip_address(at)
    except ValueError as error:
        raise UserError(
            f"{key}: {at!r} is no address; give the first host's own, as 10.0.0.1"
        ) from error
    if address.is_unspecified or at == LOOPBACK or address.version != 4:
        raise UserError(
            f"{key}: {at} is no IPv4 address of a private network; `digenrl up` is for one host"
        )


def _write_settings(keys: Keys, brokers: Brokers, run: str) -> None:
    """Write what all hosts of the run share, without secrets."""
    shared = {
        name: value for name, value in brokers.environment.items() if name not in HOST_VARIABLES
    }
    keys.write_settings({**shared, "DIGENRL_RUN": run})
