"""`digenrl serve`: one service in this process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from digenrl.commands.options import OpenApi, PlainHttp, recipe_file, settings_from_options
from digenrl.commands.recipe_options import given_keys
from shared.errors import UserError

SCHEDULER_PORT = 8000
"""Default port of the scheduler's API. Workers take free ports: a host may run many of them."""


ServiceName = Literal["scheduler", "rollout", "encoder", "reward", "trainer"]


def serve(
    context: typer.Context,
    service: Annotated[ServiceName, typer.Argument(help="the service to run")],
    run: Annotated[str, typer.Option(envvar="DIGENRL_RUN", help="name of the run")] = "",
    worker: Annotated[
        str, typer.Option(help="name of this worker; by default host and process")
    ] = "",
    recipe: Annotated[
        Path | None, typer.Option(help="scheduler only: the run's recipe", callback=recipe_file)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="scheduler only: optimizer steps")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            help="port to listen on; by default 8000 for the scheduler, a free one for workers"
        ),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay", help="workers only: keep running after the run, in case it is resumed"
        ),
    ] = False,
    open_api: OpenApi = False,
    plain_http: PlainHttp = False,
) -> None:
    """Run one service in this process, with the endpoints in the DIGENRL_* variables."""
    http = {"host": host, "open_api": open_api, "plain_http": plain_http}
    if service == "scheduler":
        options = given_keys(context, run__steps=steps, run__name=run or None)
        _serve_scheduler(recipe, options, port=port, **http)
    else:
        if keys := given_keys(context):
            raise UserError(f"--{next(iter(keys))}: workers take the recipe from the scheduler")
        _serve_worker(service, run=run, worker=worker, port=port, stay=stay, **http)


def _serve_scheduler(
    file: Path | None, options: Mapping[str, Any], *, port: int | None, **http: Any
) -> None:
    if file is None:
        raise UserError("--recipe: the scheduler needs the run's recipe")
    import uvloop

    from shared.recipe.recipe import load_recipe
    from shared.telemetry import configure_logs

    recipe = load_recipe(file, options)
    settings = settings_from_options(
        run=recipe.run.name,
        worker="scheduler",
        port=SCHEDULER_PORT if port is None else port,
        **http,
    )
    configure_logs(service="scheduler", worker="scheduler", run=settings.run)
    from services.scheduler.shell.service import run as run_scheduler

    uvloop.run(run_scheduler(settings, recipe, recipe_folder=file.resolve().parent))


def _serve_worker(
    service: ServiceName, *, run: str, worker: str, port: int | None, stay: bool, **http: Any
) -> None:
    import uvloop

    from shared.telemetry import configure_logs

    settings = settings_from_options(run=run, worker=worker, port=port, stay=stay, **http)
    configure_logs(service=service, worker=settings.worker, run=settings.run)
    match service:
        case "rollout":
            from services.rollout.service import run as run_service
        case "encoder":
            from services.rollout.service import run_encoder as run_service
        case "reward":
            from services.reward.service import run as run_service
        case _:
            from services.trainer.service import run as run_service
    uvloop.run(run_service(settings))
