"""Brokers for several hosts of a private network: `digenrl brokers`."""

import asyncio
import ipaddress
import shlex
import signal
from pathlib import Path
from typing import Any

from digenrl.local.brokers import LOOPBACK, Brokers, Ports, password_of, plan_brokers
from digenrl.local.supervisor import Supervisor
from digenrl.local.tokens import tokens_of
from shared.errors import UserError

SETTINGS = "hosts.env"
OF_ONE_HOST = "DIGENRL_HOST_CACHE"


async def run_brokers(at: str, data: Path, ports: Ports) -> None:
    """Run NATS, Valkey and SeaweedFS until SIGINT or SIGTERM.

    Raises:
        UserError: if ``at`` is no address of this machine that others can use.
        ChildFailed: if a broker keeps failing.
    """
    _check(at)
    data = _made(data)
    brokers = plan_brokers(data, password_of(data), at=at, ports=ports)
    tokens_of(data)
    supervisor, ended = Supervisor(data / "logs", {}), asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    try:
        await asyncio.gather(*(supervisor.start(program) for program in brokers.programs))
        file = _write_settings(data, brokers)
        print(f"brokers answer at {at}; every host reads {file}, which holds their password")  # noqa: T201
        waiting: asyncio.Future[Any] = asyncio.ensure_future(ended.wait())
        await asyncio.wait({waiting, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if supervisor.failed.done():
            supervisor.failed.result()
    finally:
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
    """Write what services on every host need, so that only this user can read it."""
    lines = [
        f"export {name}={shlex.quote(value)}\n"
        for name, value in brokers.environment.items()
        if name != OF_ONE_HOST
    ]
    file = data / SETTINGS
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text("".join(lines))
    return file
