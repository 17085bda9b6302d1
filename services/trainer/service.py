"""Starts the trainer: connections are opened here and passed down."""

import asyncio

from shared.settings import ServiceSettings
from shared.worker import Worker
from shared.worker_process import WorkerProcess, run_worker


async def run(settings: ServiceSettings) -> None:
    await run_worker("trainer", settings, _work)


async def _work(process: WorkerProcess) -> None:
    from services.trainer.app import TrainerApp
    from services.trainer.replicas import (  # torch, once the probes answer
        ReplicatedTraining,
        load_replicas,
    )
    from shared.diffusion.device import this_device
    from shared.diffusion.devices import LocalGenerator
    from shared.diffusion.generation import Generator
    from shared.diffusion.models import Part

    settings, recipe = process.settings, process.recipe
    helps, num_devices = recipe.schedule.trainer_may_help, recipe.trainer.devices
    parts: set[Part] = {"transformer", "text", "decoder"} if helps else {"transformer"}
    device = this_device(
        recipe,
        slots=num_devices if helps else 0,
        memory_gib=settings.memory_gib,
        fluid=num_devices > 1,
    )
    if device.kind == "cpu":  # where all of them share the memory
        device = device.model_copy(update={"needs_bytes": num_devices * device.needs_bytes})
    worker = Worker("trainer", settings.worker, "waiting_for_rollout", device=device)
    async with settings.connect_bus() as bus:
        await process.refuse_or_go_on(worker, bus)
        loaded = await asyncio.to_thread(load_replicas, recipe, parts)
        training = ReplicatedTraining(recipe, loaded)
        generators = [LocalGenerator(Generator(recipe, each)) for each in loaded] if helps else []
        process.health.is_ready()
        app = TrainerApp(training, recipe, bus, process.store, worker, generators=generators)
        await app.run()
