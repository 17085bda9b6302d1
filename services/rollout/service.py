"""Starts a rollout worker: connections are opened here and passed down."""

import asyncio

from shared.process.settings import ServiceSettings
from shared.process.worker import Worker
from shared.process.worker_process import WorkerProcess, run_worker


async def run(settings: ServiceSettings) -> None:
    await run_worker("rollout", settings, _work)


async def _work(process: WorkerProcess) -> None:
    from services.rollout.app import RolloutApp
    from services.rollout.engine import RolloutEngine  # torch, once the probes answer
    from services.rollout.slowed import SlowedDevice
    from shared.diffusion.device import this_device

    settings, recipe = process.settings, process.recipe
    registered = this_device(
        recipe, ("transformer", "text", "decoder"), trains=False,
        slots=1, memory_gib=settings.memory_gib, can_train=recipe.rollout.can_train,
    )  # fmt: skip
    worker = Worker(
        "rollout", settings.worker, "waiting_for_trainer", device=registered, url=process.url
    )
    async with settings.connect_bus() as bus, settings.connect_index() as index:
        await process.refuse_or_go_on(worker, bus)
        engine = await asyncio.to_thread(RolloutEngine, recipe)
        device = SlowedDevice(engine, settings.slowdown) if settings.slowdown > 1 else engine
        process.is_ready(registered)
        app = RolloutApp(
            device, bus, process.store, index, worker,
            max_staleness=recipe.schedule.staleness_limit,
        )  # fmt: skip
        await process.run(app.run(), bus)
