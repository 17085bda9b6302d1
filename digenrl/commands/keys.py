"""`digenrl keys`: the secrets of a deployment, what brokers need to know of them, and what people
prove themselves with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from digenrl.commands.options import RunsToWrite
from shared.errors import UserError

if TYPE_CHECKING:
    import ssl

    from digenrl.local.secrets.tokens import Tokens

keys = typer.Typer(help="Keys of a deployment: one secret per role.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="folder of the keys", envvar="DIGENRL_KEYS")]
Person = Annotated[Literal["viewer", "operator", "admin"], typer.Option(help="rights of the role")]
KEYS = Path("keys")


@keys.command()
def init(
    runs: RunsToWrite,
    folder: Folder = KEYS,
    nats: Annotated[str, typer.Option(help="host and port of NATS")] = "nats:4222",
    redis: Annotated[str, typer.Option(help="host and port of Redis")] = "redis:6379",
    s3: Annotated[str, typer.Option(help="address of the object store")] = "http://s3:8333",
    tls: Annotated[
        list[str] | None,
        typer.Option(
            help="name of the scheduler's host: makes certificates for it and for the brokers; "
            "may be repeated"
        ),
    ] = None,
) -> None:
    """Make all secrets of a deployment and the configuration of its brokers; keep old secrets."""
    from digenrl.local.brokers.deployment import BrokerAddresses, make_deployment

    try:
        lines = make_deployment(
            folder, BrokerAddresses(nats=nats, redis=redis, s3=s3, tls=tls or ()), runs
        )
    except OSError as error:
        raise UserError(
            f"{folder}: {error.filename or folder} cannot be written: {error.strerror}; name a "
            "folder that is yours, on a disk with room"
        ) from error
    for line in lines:
        typer.echo(line)


@keys.command()
def token(folder: Folder = KEYS, role: Person = "viewer") -> None:
    """Print the token of a role, for `Authorization: Bearer`."""
    typer.echo(_tokens(folder).token(role))


@keys.command()
def link(
    folder: Folder = KEYS,
    role: Person = "operator",
    scheduler: Annotated[
        str, typer.Option(help="scheduler's API", envvar="DIGENRL_SCHEDULER_URL")
    ] = "http://127.0.0.1:8000",
    shown: Annotated[
        str,
        typer.Option(
            help="its address for the browser, where that is another", envvar="DIGENRL_SHOWN_URL"
        ),
    ] = "",
) -> None:
    """Print a link that signs a browser in; it works once, for ten minutes."""
    from digenrl.api.checked_client import CheckedClient

    headers = _tokens(folder).headers(role)
    with CheckedClient.of(scheduler, headers, _trusted(folder)) as client:
        typer.echo(f"{(shown or scheduler).rstrip('/')}{client.make_code().path}")


@keys.command()
def secrets(
    folder: Folder = KEYS,
    name: Annotated[str, typer.Option(help="existingSecret of the chart")] = "digenrl",
) -> None:
    """Print the keys as Secrets of Kubernetes, for `kubectl apply --filename -`."""
    import json

    from digenrl.local.brokers.deployment import kubernetes_secrets

    _tokens(folder)
    typer.echo(json.dumps(kubernetes_secrets(folder, name), indent=1))


def _trusted(folder: Path) -> "ssl.SSLContext":
    """Return what verifies the scheduler: also the authority of these keys, unless another one is
    named."""
    from shared.process.settings import ClientSettings
    from shared.process.trust import trusted_with

    settings, own = ClientSettings(), folder / "ca" / "cert.pem"
    if settings.ca is None and own.exists():
        return trusted_with(own.read_text())
    return settings.trusted


def _tokens(folder: Path) -> "Tokens":
    """Return the tokens in ``folder``; raises UserError without any."""
    from digenrl.local.secrets.tokens import Tokens

    if not (folder / "api_tokens.json").exists():
        raise UserError(
            f"{folder}: no tokens are here; name the folder of `digenrl keys init`, or "
            "runs/<run>/keys of a run of `digenrl up`"
        )
    return Tokens(folder)
