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
    from shared.diffusion.device import this_device
    from shared.diffusion.generation import Generator
    from shared.diffusion.models import Part
    from shared.diffusion.policy import load_policy

    settings, recipe = process.settings, process.recipe
    helps = recipe.schedule.trainer_may_help
    parts: set[Part] = {"transformer", "text", "decoder"} if helps else {"transformer"}
    device = this_device(recipe, slots=int(helps), memory_gib=settings.memory_gib)
    worker = Worker("trainer", settings.worker, "waiting_for_rollout", device=device)
    async with settings.connect_bus() as bus:
        await process.refuse_or_go_on(worker, bus)
        loaded = await asyncio.to_thread(load_policy, recipe, parts)
        engine = TrainerEngine(recipe, loaded)
        generator = Generator(recipe, loaded) if helps else None
        process.health.is_ready()
        app = TrainerApp(engine, recipe, bus, process.store, worker, generator=generator)
        await app.run()
