"""`digenrl keys`: the secrets of a deployment, and what brokers need to know of them."""

from pathlib import Path
from typing import Annotated

import typer

keys = typer.Typer(help="Keys of a deployment: one secret per role.", no_args_is_help=True)


@keys.callback()
def _keys() -> None:
    """Make the subcommand a word of its own, although there is one."""


@keys.command()
def init(
    folder: Annotated[Path, typer.Argument(help="folder for them")] = Path("keys"),
    nats: Annotated[str, typer.Option(help="host and port of NATS")] = "nats:4222",
    redis: Annotated[str, typer.Option(help="host and port of Redis")] = "redis:6379",
    s3: Annotated[str, typer.Option(help="address of the object store")] = "http://s3:8333",
    tls: Annotated[
        list[str] | None,
        typer.Option(help="name of the scheduler's host, for a certificate; may be repeated"),
    ] = None,
) -> None:
    """Make all secrets of a deployment and the configuration of its brokers; keep old secrets."""
    from digenrl.local.deployment import make_deployment
    from shared.errors import UserError

    try:
        made = make_deployment(folder, nats=nats, redis=redis, s3=s3, names=tls or ())
    except OSError as error:
        raise UserError(
            f"{folder}: {error.filename or folder} cannot be written: {error.strerror}; name a "
            "folder that is yours, on a disk with room"
        ) from error
    for line in made:
        typer.echo(line)
