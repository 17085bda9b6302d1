"""Starts the trainer: connections are opened here and passed down."""

import asyncio

from shared.run_store import wait_for_recipe
from shared.service import Health, serve, worker_app
from shared.settings import ServiceSettings
from shared.store import open_store
from shared.worker import Worker


async def run(settings: ServiceSettings) -> None:
    health = Health()
    app = worker_app("trainer", health)
    await serve(app, _work(settings, health), host=settings.host, port=settings.port)


async def _work(settings: ServiceSettings, health: Health) -> None:
    from services.trainer.app import TrainerApp  # torch, once the probes answer
    from services.trainer.engine import TrainerEngine

    store = open_store(settings.store)
    recipe = await wait_for_recipe(store, settings.run)
    engine = await asyncio.to_thread(TrainerEngine, recipe)
    worker = Worker("trainer", settings.worker, "waiting_for_rollout", device=engine.device)
    async with settings.connect_bus() as bus:
        health.is_ready()
        await TrainerApp(engine, recipe, bus, store, worker).run()
