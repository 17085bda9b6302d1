"""Starts a rollout worker: connections are opened here and passed down."""

import asyncio

from shared.settings import ServiceSettings
from shared.worker import Worker
from shared.worker_process import WorkerProcess, run_worker


async def run(settings: ServiceSettings) -> None:
    await run_worker("rollout", settings, _work)


async def _work(process: WorkerProcess) -> None:
    from services.rollout.app import RolloutApp  # torch, once the probes answer
    from services.rollout.engine import RolloutEngine

    engine = await asyncio.to_thread(RolloutEngine, process.recipe)
    name = process.settings.worker
    worker = Worker("rollout", name, "waiting_for_trainer", device=engine.device)
    settings = process.settings
    async with settings.connect_bus() as bus, settings.connect_index() as index:
        process.health.is_ready()
        await RolloutApp(engine, bus, process.store, index, worker).run()
