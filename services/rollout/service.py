"""Starts a rollout worker: connections are opened here and passed down."""

import asyncio
from collections.abc import Callable
from functools import partial

from shared.devices.protocols import RolloutDevice
from shared.process.settings import ServiceSettings
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
    from services.rollout.rollout_engine import RolloutEngine  # torch, once the probes answer
    from shared.diffusion.device import this_device

    settings, recipe = process.settings, process.recipe
    registered = this_device(
        recipe, ("transformer", "text", "decoder"), trains=False,
        concurrency=1, memory_gib=settings.memory_gib, can_train=recipe.rollout.can_train,
    )  # fmt: skip
    async with (
        process.connect("waiting_for_trainer", registered) as context,
        settings.connect_index() as index,
    ):
        await process.refuse_or_go_on(context)
        device = await asyncio.to_thread(build_device or RolloutEngine, recipe)
        app = RolloutApp(device, context, index, max_staleness=recipe.schedule.staleness_limit)
        await process.run(app.run(), context)
