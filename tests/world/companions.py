"""What runs beside the services of a run: the page's events and the evaluator; and their
applications, built once for all worlds, since to build one takes as long as to run a world."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from digenrl.api.events import event_routes
from digenrl.api.feed import Feed
from digenrl.api.live import LiveRun, client_of
from digenrl.api.run_history import RunHistory
from digenrl.evaluation.records import Quality
from digenrl.evaluation.run import JudgedSamples, RunEvaluator
from services.scheduler.shell import api
from services.scheduler.shell.load import BatchForecasts
from services.scheduler.shell.standby import standby_app
from shared.learning.prompts import read_rows
from shared.process.http_api import add_problems
from shared.process.service import worker_app
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe
from shared.run import files, run_recipe
from shared.run.commits import CommitRecord
from shared.run.log import Log
from shared.store import ObjectStore
from shared.store.settings import StoreSettings
from tests.world.web import Web

OpenStore = Callable[[StoreSettings], ObjectStore]

_parsed_recipe = lru_cache(64)(run_recipe.parsed_recipe)
_digest_of = lru_cache(64)(files.file_digest)
_read_rows = lru_cache(64)(read_rows)
_served: ContextVar[dict[str, Any]] = ContextVar("served")
"""What the process that answers has, by name."""


class StandIn:
    """Is what the process that answers has under a name, for an application that all share."""

    def __init__(self, *names: str, **parts: "StandIn") -> None:
        self._names = names
        self.__dict__.update(parts)

    def __getattr__(self, name: str) -> Any:
        first, *others = self._names
        found = _served.get()[first]
        for each in others:
            found = getattr(found, each)
        return getattr(found, name)


@cache
def _scheduler_app() -> FastAPI:
    scheduler: Any = StandIn("scheduler", health=StandIn("scheduler", "health"))
    access: Any = StandIn("access")
    with patch.object(api, "BatchForecasts", lambda: StandIn("forecasts")):
        return api.create_app(scheduler, access)


@cache
def _worker_app(service: str) -> FastAPI:
    health: Any = StandIn("health")
    return worker_app(service, health)


@cache
def _standby_app() -> FastAPI:
    health: Any = StandIn("health")
    return standby_app(health, lambda: _served.get()["commander"]())


@cache
def _events_app() -> FastAPI:
    feed: Any = StandIn("feed")
    app = FastAPI(openapi_url=None)
    add_problems(app)
    app.include_router(event_routes(feed, lambda: _served.get()["live"].get("/v1/run")))
    return app


def _serving(app: ASGIApp, **served: Any) -> Any:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        _served.set(served)
        await app(scope, receive, send)

    return answer


def create_scheduler_app(scheduler: Any, access: Any = None) -> Any:
    """Have the signature of `services.scheduler.shell.api.create_app`."""
    return _serving(
        _scheduler_app(), scheduler=scheduler, access=access, forecasts=BatchForecasts()
    )


def create_worker_app(service: str, health: Any) -> Any:
    """Have the signature of `shared.process.service.worker_app`."""
    return _serving(_worker_app(service), health=health)


def create_standby_app(health: Any, commander: Callable[[], str], _: Any = True) -> Any:
    """Have the signature of `services.scheduler.shell.standby.standby_app`."""
    return _serving(_standby_app(), health=health, commander=commander)


async def serve_events(
    web: Web, settings: ServiceSettings, store: ObjectStore, scheduler: str
) -> None:
    """Serve the events of a run as its page does, and none of the page's other routes.

    Args:
        scheduler: address of the scheduler that the page asks.
    """
    listener = settings.listen(settings.host, settings.port)
    feed = Feed(RunHistory(store, settings.run), Log.of_evaluations(store, settings.run))
    async with client_of(scheduler, None) as client:
        app = _serving(_events_app(), feed=feed, live=LiveRun(scheduler, client))
        access = settings.access(settings.run)
        await web.serve(app, _for_ever(), listener=listener, access=access)


async def _for_ever() -> None:
    await asyncio.Event().wait()


class EmulatedEvaluator(RunEvaluator):
    """Takes its figures from the digest of the weights; everything else is the product's."""

    def _measure(self, weights: Any) -> JudgedSamples:
        none = np.empty((0, 3, 1, 1), np.uint8)
        quality = Quality(reward=int(weights["digest"][:8], 16) / 2**32, num_samples=0)
        samples: Any = SimpleNamespace(images=none, prompts=())
        return JudgedSamples(samples, quality, {}, None)


async def _stored_weights(store: ObjectStore, _: Recipe, record: CommitRecord) -> dict[str, str]:
    """Read the weights of a version, which are tensors of no network.

    Raises:
        IntegrityError: if the store has deleted them.
    """
    await store.get(record.learned.ref)
    return {"digest": record.learned.digest}


@contextmanager
def companions_installed(open_store: OpenStore, *, poll_s: float = 2.0) -> Iterator[None]:
    """Have the evaluator read this store without a network, services share applications, and `up`
    see a disk with room.

    Args:
        poll_s: seconds between two looks of `up` and `watch`; a request takes .4 ms of CPU time.
    """
    room = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1 << 40))
    patches: dict[str, Any] = {
        "digenrl.evaluation.follower.RunEvaluator": EmulatedEvaluator,
        "digenrl.evaluation.run.weights_to_use": _stored_weights,
        "digenrl.evaluation.process.open_store": open_store,
        "digenrl.evaluation.process.prepare_libraries": lambda *_, **__: None,
        "digenrl.local.running.alarms.shutil": room,
        "digenrl.local.limits.WATCH_POLL_S": poll_s,
        "digenrl.commands.status.POLL_S": poll_s,
        "services.scheduler.shell.service.create_app": create_scheduler_app,
        "services.scheduler.shell.service.standby_app": create_standby_app,
        "shared.process.worker_process.worker_app": create_worker_app,
        # Every start reads the same recipe, prompts and files.
        "shared.run.files.file_digest": _digest_of,
        "shared.run.run_recipe.parsed_recipe": _parsed_recipe,
        "shared.run.run_recipe.read_rows": _read_rows,
        "shared.learning.prompts.read_rows": _read_rows,
    }
    with ExitStack() as stack:
        for name, replacement in patches.items():
            stack.enter_context(patch(name, replacement))
        yield
