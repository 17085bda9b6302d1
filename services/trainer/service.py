"""Starts the trainer: connections are opened here and passed down."""

import asyncio

from shared.settings import ServiceSettings
from shared.worker import Worker
from shared.worker_process import WorkerProcess, run_worker


async def run(settings: ServiceSettings) -> None:
    await run_worker("trainer", settings, _work)


async def _work(process: WorkerProcess) -> None:
    from services.trainer.app import TrainerApp  # torch, once the probes answer
    from services.trainer.engine import TrainerEngine

    engine = await asyncio.to_thread(TrainerEngine, process.recipe)
    name = process.settings.worker
    worker = Worker("trainer", name, "waiting_for_rollout", device=engine.device)
    async with process.settings.connect_bus() as bus:
        process.health.is_ready()
        await TrainerApp(engine, process.recipe, bus, process.store, worker).run()
