"""Brokers for several hosts of a private network: `digenrl brokers`."""

import asyncio
import contextlib
import ipaddress
import shlex
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from digenrl.api.offline_routes import run_view
from digenrl.api.run_history import RunHistory
from digenrl.local.brokers.embedded import LOOPBACK, Brokers, Ports, plan_brokers
from digenrl.local.brokers.seaweedfs import OWNER, Server
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.runs import RECIPE_JSON, RunProgress, noted_store
from digenrl.local.secrets.certificates import authority_in
from digenrl.local.secrets.keys import load_keys
from digenrl.local.secrets.tokens import KEYS, load_tokens, write_secret
from digenrl.local.secrets.tunnel import tunnel
from shared.errors import DigenRLError, UserError
from shared.messages.rights import WORKERS
from shared.store import ObjectStore, open_store

SETTINGS = "hosts.env"
HOST_FILE = "here.env"
PROGRESS_POLL_S = 2.0
"""Seconds between two looks at how far the run is."""
HOST_VARIABLES = ("DIGENRL_HOST_CACHE", "DIGENRL_STORE_FOLDER")


async def run_brokers(
    at: str, data: Path, ports: Ports, runs: Collection[str], *, is_encrypted: bool = False
) -> None:
    """Run NATS, Valkey and SeaweedFS until SIGINT or SIGTERM, with TLS on request. Commands of this
    host find the first of the runs in the folder, as one of `digenrl up`.

    Raises:
        UserError: if ``at`` is no address of this machine that others can use.
        ChildFailed: if a broker keeps failing.
    """
    _check(at)
    data, run = _made(data), next(iter(runs))
    keys = load_keys(data)
    authority = authority_in(keys.folder / "ca") if is_encrypted else None
    brokers = plan_brokers(data, keys, at=at, ports=ports, authority=authority, runs=runs)
    keys.write(brokers.secrets)
    if authority is not None:
        authority.certificate(keys.folder / "scheduler", [at])
    load_tokens(data)
    supervisor, ended = Supervisor(data / "logs", {}), asyncio.Event()
    stack = contextlib.AsyncExitStack()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    try:
        await asyncio.gather(*(supervisor.start(program) for program in brokers.programs))
        if authority is not None:
            tls = authority.certificate(data / "tls", [at])
            await stack.enter_async_context(tunnel(at, ports.redis, brokers.redis_inner, tls))
        stack.enter_context(noted_store(data, brokers.environment | brokers.secrets["client"]))
        file = _write_settings(data, brokers, run)
        print(f"brokers answer at {at}; hosts that generate read {file}, which holds their secrets")  # noqa: T201
        ca = None if authority is None else authority.pem
        store = open_store(Server(at, ports.s3, OWNER, keys.store, ca).settings)
        noting: asyncio.Future[Any] = asyncio.ensure_future(_note_until(ended, data, store, run))
        done, _ = await asyncio.wait({noting, supervisor.failed}, return_when="FIRST_COMPLETED")
        noting.cancel()
        done.pop().result()
    finally:
        await stack.aclose()
        await supervisor.stop([program.name for program in brokers.programs])


async def _note_until(ended: asyncio.Event, data: Path, store: ObjectStore, run: str) -> None:
    """Note a run's recipe and progress in its folder, where commands find them."""
    history = RunHistory(store, run)
    while not ended.is_set():
        await _note(data, history)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), PROGRESS_POLL_S)
    await _note(data, RunHistory(store, run))  # the other may have looked a moment ago


async def _note(data: Path, history: RunHistory) -> None:
    with contextlib.suppress(DigenRLError, OSError):
        now = await run_view(history)
        if history.recipe is not None:
            file, recipe = data / RECIPE_JSON, history.recipe.model_dump_json(indent=1)
            if not file.is_file() or file.read_text() != recipe:  # its age shows the run's age
                file.write_text(recipe)
            state = now.phase if now.phase in ("finished", "failed") else "running"
            RunProgress(state, now.step, now.steps, now.reward_mean).write(data)


def _made(data: Path) -> Path:
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    (data / "logs").mkdir(exist_ok=True)
    return data.resolve()


def _check(at: str) -> None:
    try:
        address = ipaddress.ip_address(at)
    except ValueError as error:
        raise UserError(f"--at: {at!r} is no address; give this host's own, as 10.0.0.1") from error
    if address.is_unspecified or at == LOOPBACK or address.version != 4:
        raise UserError(
            f"--at: {at} is no IPv4 address of a private network; `digenrl up` is for one host"
        )


def _write_settings(data: Path, brokers: Brokers, run: str) -> Path:
    """Write what services need, so that only this user can read it: for this host, where secrets
    are in files of their own, and for hosts that generate, with the secrets of that role.

    Returns the file for the other hosts, which is written last.
    """
    shared = {
        name: value for name, value in brokers.environment.items() if name not in HOST_VARIABLES
    }
    shared["DIGENRL_RUN"] = run
    write_secret(data / HOST_FILE, _exports(shared))
    for role in WORKERS:
        write_secret(data / KEYS / f"{role}.env", _exports(shared | brokers.secrets[role]))
    file = data / SETTINGS
    write_secret(file, _exports(shared | brokers.secrets["rollout"]))
    return file


def _exports(variables: Mapping[str, str]) -> str:
    """Return lines for a shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
