"""`digenrl brokers`: NATS, Valkey and SeaweedFS for several hosts."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import RunsToWrite


def brokers(
    runs: RunsToWrite,
    at: Annotated[str, typer.Option(help="this host's address in the private network")],
    data: Annotated[Path, typer.Option(help="folder for everything that is stored")],
    nats_port: Annotated[int, typer.Option(help="port of NATS")] = 4222,
    redis_port: Annotated[int, typer.Option(help="port of Valkey")] = 6379,
    s3_port: Annotated[int, typer.Option(help="port of the object store")] = 8333,
    tls: Annotated[
        bool, typer.Option("--tls", help="with certificates of an own authority")
    ] = False,
) -> None:
    """Run the brokers of `digenrl up` for a run on several hosts, until Ctrl-C.

    On this host, commands such as `digenrl status` take the folder for the first --run's.
    """
    from digenrl.local.brokers.embedded import Ports
    from digenrl.local.brokers.private_network import run_brokers
    from digenrl.local.runs import lock_run

    ports = Ports(nats_port, redis_port, s3_port)
    folder = data.resolve()
    with lock_run(folder.parent, folder.name):
        asyncio.run(run_brokers(at, folder, ports, runs, is_encrypted=tls))
