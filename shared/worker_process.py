"""The process around a worker: probes from the start, the run's recipe, then its work."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from shared.bus import Bus
from shared.recipe import Recipe
from shared.run_store import wait_for_recipe
from shared.service import Health, serve, worker_app
from shared.settings import ServiceSettings
from shared.store import ObjectStore, open_store
from shared.worker import Worker

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """What the work of a worker begins with."""

    settings: ServiceSettings
    recipe: Recipe
    store: ObjectStore
    health: Health

    async def refuse_or_go_on(self, worker: Worker, bus: Bus) -> None:
        """A device that cannot hold the model is never used: it says why until it is stopped."""
        reason = worker.device.refusal
        if reason is None:
            return
        log.error("refused", reason=reason)
        worker.activity = "refused"
        await worker.report(bus)


async def run_worker(
    service: Literal["rollout", "reward", "trainer"],
    settings: ServiceSettings,
    work: Callable[[WorkerProcess], Awaitable[None]],
) -> None:
    """Answer probes while ``work`` goes on; end when it ends, or when asked to."""
    health = Health()

    async def begin() -> None:
        store = open_store(settings.store)
        recipe = await wait_for_recipe(store, settings.run)
        # Read by the numerical libraries when they are imported, which is later.
        os.environ["OMP_NUM_THREADS"] = str(getattr(recipe, service).threads)
        await work(WorkerProcess(settings, recipe, store, health))

    app = worker_app(service, health)
    await serve(
        app,
        begin(),
        host=settings.host,
        port=settings.port,
        allowed_hosts=settings.allowed_hosts,
    )
