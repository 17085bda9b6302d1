"""Brokers for several hosts of a private network: `digenrl brokers`."""

import asyncio
import contextlib
import ipaddress
import shlex
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from digenrl.local.brokers import LOOPBACK, Brokers, Ports, plan_brokers
from digenrl.local.certificates import authority_in
from digenrl.local.keys import keys_of
from digenrl.local.supervisor import Supervisor
from digenrl.local.tokens import KEYS, tokens_of, write_secret
from digenrl.local.tunnel import tunnel
from shared.errors import UserError
from shared.messages.rights import WORKERS

SETTINGS = "hosts.env"
HERE = "here.env"
OF_ONE_HOST = ("DIGENRL_HOST_CACHE", "DIGENRL_STORE_FOLDER")


async def run_brokers(
    at: str, data: Path, ports: Ports, runs: Collection[str], *, is_encrypted: bool = False
) -> None:
    """Run NATS, Valkey and SeaweedFS until SIGINT or SIGTERM, with TLS if it is asked for.

    Raises:
        UserError: if ``at`` is no address of this machine that others can use.
        ChildFailed: if a broker keeps failing.
    """
    _check(at)
    data = _made(data)
    keys = keys_of(data)
    authority = authority_in(keys.folder / "ca") if is_encrypted else None
    brokers = plan_brokers(data, keys, at=at, ports=ports, authority=authority, runs=runs)
    keys.write(brokers.secrets)
    if authority is not None:
        authority.certificate(keys.folder / "scheduler", [at])
    tokens_of(data)
    supervisor, ended = Supervisor(data / "logs", {}), asyncio.Event()
    stack = contextlib.AsyncExitStack()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    try:
        await asyncio.gather(*(supervisor.start(program) for program in brokers.programs))
        if authority is not None:
            tls = authority.certificate(data / "tls", [at])
            await stack.enter_async_context(tunnel(at, ports.redis, brokers.redis_inner, tls))
        file = _write_settings(data, brokers)
        print(f"brokers answer at {at}; hosts that generate read {file}, which holds their secrets")  # noqa: T201
        waiting: asyncio.Future[Any] = asyncio.ensure_future(ended.wait())
        await asyncio.wait({waiting, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if supervisor.failed.done():
            supervisor.failed.result()
    finally:
        await stack.aclose()
        await supervisor.stop([program.name for program in brokers.programs])


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


def _write_settings(data: Path, brokers: Brokers) -> Path:
    """Write what services need, so that only this user can read it: for this host, where secrets
    are in files of their own, and for hosts that generate, with the secrets of that role.

    Returns the file for the other hosts, which is written last.
    """
    shared = {name: value for name, value in brokers.environment.items() if name not in OF_ONE_HOST}
    write_secret(data / HERE, _exports(shared))
    for role in WORKERS:
        write_secret(data / KEYS / f"{role}.env", _exports(shared | brokers.secrets[role]))
    file = data / SETTINGS
    write_secret(file, _exports(shared | brokers.secrets["rollout"]))
    return file


def _exports(variables: Mapping[str, str]) -> str:
    """Return lines for a shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
