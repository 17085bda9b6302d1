"""`digenrl serve-scorer`: one scorer, or a reward function of the user's own, as an HTTP server."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.commands.options import PlainHttp, Port, http_settings
from shared.errors import UserError

if TYPE_CHECKING:
    from shared.recipe.rewards import ScorerTable

CALL_TIMEOUT_S = 15.0
"""Seconds for a call: a client waits a minute for an answer, in which a few calls may hang."""


OPTIONS = {"type": "TYPE", "source": "TYPE", "folder": "--folder", "scores": "--groups"}
"""Options of the command, by the keys of a recipe's table that they stand for."""


def serve_scorer(
    type: Annotated[
        str,
        typer.Argument(
            help="scorer to serve, docs/rewards.md lists them; or a file of your own, "
            "my_reward.py:score, in the environment that its inline metadata name"
        ),
    ],
    folder: Annotated[Path | None, typer.Option(help="folder with its weights")] = None,
    patience: Annotated[
        float, typer.Option(min=0.01, help="seconds for a call of a function of your own")
    ] = CALL_TIMEOUT_S,
    groups: Annotated[
        bool, typer.Option("--groups", help="all samples of a request are scored in one call")
    ] = False,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Port = 8100,
    plain_http: PlainHttp = False,
) -> None:
    """Serve a scorer over HTTP, for recipes that name it with type "remote"."""
    from services.reward.scorer import build_scorers, check_packages, scorer_kind
    from services.reward.server import UPLOAD_LIMITS, create_app
    from shared.process.outgoing import allow
    from shared.process.service import Health, serve
    from shared.telemetry import configure_logs

    table = _table(type, folder and folder.resolve(), patience=patience, groups=groups)
    with _errors_name_options(table.name):
        scorer_kind(table)
        check_packages(table)
    configure_logs(service="scorer", worker=table.name, run="")
    http = http_settings(plain_http=plain_http)
    listener = http.listen(host, port)
    allow([table.url])
    with _errors_name_options(table.name):
        [scorer] = build_scorers([table])
    # A scorer tells nothing and changes nothing: without tokens, whoever reaches it may ask.
    access = replace(http.access(table.name), is_open=http.open_api or http.api_tokens is None)
    health = Health()
    health.is_ready()
    serving = serve(
        create_app(scorer, health),
        asyncio.Event().wait(),
        listener=listener,
        access=access,
        allowed_hosts=http.allowed_hosts,
        bodies=UPLOAD_LIMITS,
    )
    asyncio.run(serving)


@contextmanager
def _errors_name_options(name: str) -> Iterator[None]:
    """Name the command's options where an error names keys of a recipe's table."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for key, option in OPTIONS.items():
            text = text.replace(f"reward.scorers.{name}.{key}:", f"{option}:", 1)
        raise UserError(text) from error


def _table(type: str, folder: Path | None, *, patience: float, groups: bool) -> "ScorerTable":
    from pydantic import ValidationError

    from services.reward.reward_file import parse_source
    from shared.recipe.rewards import PYTHON, ScorerTable

    path, function = parse_source(type, "TYPE")
    scores = "groups" if groups else "samples"
    try:
        if path.suffix == ".py":
            return ScorerTable.model_validate({
                "name": PYTHON, "type": PYTHON, "source": path.resolve(), "function": function,
                "patience": patience, "scores": scores,
            })  # fmt: skip
        return ScorerTable.model_validate(
            {"name": type, "type": type, "folder": folder, "scores": scores}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if "type" in first["loc"] or "name" in first["loc"]:
            raise UserError(
                f"TYPE: {type!r} is not the name of a scorer; docs/rewards.md lists them"
            ) from error
        text = first["msg"].removeprefix("Value error, ")
        raise UserError(f"TYPE: {type}: {text}") from error
