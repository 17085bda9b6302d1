"""Starts a rollout worker: connections are opened here and passed down."""

import asyncio
from collections.abc import Callable
from functools import partial

from shared.devices.protocols import RolloutDevice
from shared.process.settings import ServiceSettings
from shared.process.worker import Worker
from shared.process.worker_process import WorkerProcess, run_worker
from shared.recipe.recipe import Recipe

BuildDevice = Callable[[Recipe], RolloutDevice]


async def run(settings: ServiceSettings) -> None:
    await run_device(settings, None)


async def run_device(settings: ServiceSettings, build_device: BuildDevice | None) -> None:
    """Runs a worker whose device ``build_device`` loads; without it, the recipe's model here."""
    await run_worker("rollout", settings, partial(_work, build_device=build_device))


async def _work(process: WorkerProcess, *, build_device: BuildDevice | None) -> None:
    from services.rollout.app import RolloutApp
    from services.rollout.engine import RolloutEngine  # torch, once the probes answer
    from shared.diffusion.device import this_device

    settings, recipe = process.settings, process.recipe
    registered = this_device(
        recipe, ("transformer", "text", "decoder"), trains=False,
        concurrency=1, memory_gib=settings.memory_gib, can_train=recipe.rollout.can_train,
    )  # fmt: skip
    worker = Worker(
        "rollout", settings.worker, "waiting_for_trainer", device=registered, url=process.url
    )
    async with settings.connect_bus() as bus, settings.connect_index() as index:
        await process.refuse_or_go_on(worker, bus)
        device = await asyncio.to_thread(build_device or RolloutEngine, recipe)
        process.is_ready(registered)
        app = RolloutApp(
            device, bus, process.store, index, worker,
            max_staleness=recipe.schedule.staleness_limit,
        )  # fmt: skip
        await process.run(app.run(), bus)
