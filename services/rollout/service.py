"""Starts a rollout worker: connections are opened here and passed down."""

import asyncio

from shared.run_store import wait_for_recipe
from shared.service import Health, serve, worker_app
from shared.settings import ServiceSettings
from shared.store import open_store
from shared.worker import Worker


async def run(settings: ServiceSettings) -> None:
    health = Health()
    app = worker_app("rollout", health)
    await serve(app, _work(settings, health), host=settings.host, port=settings.port)


async def _work(settings: ServiceSettings, health: Health) -> None:
    from services.rollout.app import RolloutApp  # torch, once the probes answer
    from services.rollout.engine import RolloutEngine

    store = open_store(settings.store)
    recipe = await wait_for_recipe(store, settings.run)
    engine = await asyncio.to_thread(RolloutEngine, recipe)
    worker = Worker("rollout", settings.worker, "waiting_for_trainer", device=engine.device)
    async with (
        settings.connect_bus() as bus,
        settings.connect_index() as index,
    ):
        health.is_ready()
        await RolloutApp(engine, bus, store, index, worker).run()
