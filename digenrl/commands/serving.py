"""One service in this process."""

import asyncio
import os
from pathlib import Path
from typing import Any

import uvloop
from pydantic import ValidationError

from shared.errors import UserError
from shared.process.settings import HttpSettings, ServiceSettings
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.telemetry import configure_logs

SCHEDULER_PORT = 8000
"""Where people look for its API; workers, of which there may be many on a host, take free ports."""


def serve_scheduler(
    recipe_file: Path | None, *, run: str, steps: int | None, host: str, port: int | None
) -> None:
    if recipe_file is None:
        raise UserError("--recipe: the scheduler needs the run's recipe")
    changes = {"run.steps": steps, "run.name": run or None}
    recipe: Recipe = override(load_recipe(recipe_file), changes)
    settings = settings_of(
        run=recipe.run.name,
        worker="scheduler",
        host=host,
        port=SCHEDULER_PORT if port is None else port,
    )
    configure_logs(service="scheduler", worker="scheduler", run=settings.run)

    from services.scheduler.shell.service import run as run_scheduler

    uvloop.run(run_scheduler(settings, recipe, beside=recipe_file.resolve().parent))


def serve_worker(
    service: str, *, run: str, worker: str, host: str, port: int | None, stay: bool
) -> None:
    settings = settings_of(run=run, worker=worker, host=host, port=port, stay=stay or None)
    configure_logs(service=service, worker=settings.worker, run=settings.run)
    match service:
        case "rollout":
            from services.rollout.service import run as run_service
        case "reward":
            from services.reward.service import run as run_service
        case _:
            from services.trainer.service import run as run_service
    uvloop.run(run_service(settings))


def evaluate_run(settings: ServiceSettings, *, once: bool, every: int | None, nice: int) -> None:
    configure_logs(service="evaluation", worker=settings.worker, run=settings.run)
    os.nice(nice)
    from digenrl.evaluation import service

    if once:
        asyncio.run(service.catch_up(settings, every=every))
    else:
        asyncio.run(service.follow(settings, every=every))


def serve_one_scorer(kind: str, folder: Path | None, *, host: str, port: int) -> None:
    """Raises UserError if there is no such scorer, or it cannot be loaded."""
    from services.reward.scorer import build_scorers
    from services.reward.server import BODIES, create_app
    from shared.process.service import Health, listen, serve
    from shared.recipe.rewards import Scorer

    configure_logs(service="scorer", worker=kind, run="")
    listener = listen(host, port)
    try:
        table = Scorer(name=kind, type=kind, folder=folder and folder.resolve())
    except ValidationError as error:
        raise UserError(f"TYPE: {kind!r} is no name of a scorer") from error
    [scorer] = build_scorers([table])
    health = Health()
    health.is_ready()
    serving = serve(
        create_app(scorer, health),
        _for_ever(),
        listener=listener,
        allowed_hosts=HttpSettings().allowed_hosts,
        bodies=BODIES,
    )
    asyncio.run(serving)


async def _for_ever() -> None:
    await asyncio.Event().wait()


def settings_of(**given: Any) -> ServiceSettings:
    """Raises UserError, which names the option and the variable, if a value will not do."""
    try:
        return ServiceSettings(
            **{key: value for key, value in given.items() if value not in ("", None)}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        fault = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"--{name} or DIGENRL_{name.upper()}: {fault}") from error
