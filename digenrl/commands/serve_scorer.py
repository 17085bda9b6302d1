"""`digenrl serve-scorer`: one scorer as an HTTP server."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from digenrl.commands.options import PlainHttp, http_settings
from shared.errors import UserError


def serve_scorer(
    type: Annotated[str, typer.Argument(help="scorer to serve; docs/rewards.md lists them")],
    folder: Annotated[Path | None, typer.Option(help="folder with its weights")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8100,
    plain_http: PlainHttp = False,
) -> None:
    """Serve a scorer over HTTP, for recipes that name it with type "remote"."""
    from pydantic import ValidationError

    from services.reward.scorer import build_scorers
    from services.reward.server import BODIES, create_app
    from shared.process.service import Health, serve
    from shared.recipe.rewards import ScorerTable
    from shared.telemetry import configure_logs

    configure_logs(service="scorer", worker=type, run="")
    http = http_settings(plain_http=plain_http)
    listener = http.listen(host, port)
    try:
        table = ScorerTable(name=type, type=type, folder=folder and folder.resolve())
    except ValidationError as error:
        raise UserError(
            f"TYPE: {type!r} is not the name of a scorer; docs/rewards.md lists them"
        ) from error
    [scorer] = build_scorers([table])
    # A scorer tells nothing and changes nothing: without tokens, whoever reaches it may ask.
    access = replace(http.access(type), is_open=http.open_api or http.api_tokens is None)
    health = Health()
    health.is_ready()
    serving = serve(
        create_app(scorer, health),
        _for_ever(),
        listener=listener,
        access=access,
        allowed_hosts=http.allowed_hosts,
        bodies=BODIES,
    )
    asyncio.run(serving)


async def _for_ever() -> None:
    await asyncio.Event().wait()
