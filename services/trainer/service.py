"""Starts the trainer: connections are opened here and passed down."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from services.trainer.engine.world import num_ranks, this_rank
from shared.models.memory import Part
from shared.process.settings import ServiceSettings
from shared.process.worker import Worker
from shared.process.worker_process import WorkerProcess, run_worker
from shared.recipe.recipe import Recipe

if TYPE_CHECKING:
    from shared.devices.protocols import Training
    from shared.diffusion.devices import LocalGenerator


async def run(settings: ServiceSettings) -> None:
    """Of the ranks that torchrun has started, the first one is the service, and the others follow
    it."""
    if this_rank() == 0:
        await run_worker("trainer", settings, _work)
    else:
        from services.trainer.engine.follower import follow  # torch

        await asyncio.to_thread(follow)


async def _work(process: WorkerProcess) -> None:
    from services.trainer.app import TrainerApp  # torch, once the probes answer
    from services.trainer.engine.ranked import RankedTraining
    from shared.diffusion.device import this_device
    from shared.diffusion.training.stored import check_stored

    settings, recipe = process.settings, process.recipe
    num_devices, helps = recipe.trainer.devices, recipe.trainer_may_help
    device = this_device(
        recipe,
        _parts(helps),
        trains=True,
        concurrency=num_devices if helps else 0,
        memory_gib=settings.memory_gib,
        independent_devices=num_devices > 1,
    )
    if device.kind == "cpu":  # where all of them share the memory
        device = device.model_copy(update={"needs_bytes": num_devices * device.needs_bytes})
    worker = Worker(
        "trainer", settings.worker, "waiting_for_rollout", device=device, url=process.url
    )
    async with settings.connect_bus() as bus:
        await process.refuse_or_go_on(worker, bus)
        training, generators = await asyncio.to_thread(_load, recipe)
        process.is_ready(device)
        app = TrainerApp(
            training, recipe, bus, process.store, worker,
            generators=generators, check=partial(check_stored, recipe),
        )  # fmt: skip
        if await process.run(app.run(), bus) and isinstance(training, RankedTraining):
            await asyncio.to_thread(training.end)


def _load(recipe: Recipe) -> "tuple[Training, list[LocalGenerator]]":
    """The trainer's devices, and generators on them if they may be lent."""
    from services.trainer.engine.ranked import start_ranks
    from services.trainer.engine.replicas import ReplicatedTraining, load_replicas
    from shared.diffusion.devices import LocalGenerator
    from shared.diffusion.generation import Generator

    if num_ranks() > 1 or recipe.trainer.ranks > 1:
        return start_ranks(recipe), []
    helps = recipe.trainer_may_help
    loaded = load_replicas(recipe, _parts(helps))
    generators = [LocalGenerator(Generator(recipe, each)) for each in loaded] if helps else []
    return ReplicatedTraining(recipe, loaded), generators


def _parts(helps: bool) -> set[Part]:
    """Of the model, what the trainer's devices hold: all of it if they are lent to generate."""
    return {"transformer", "text", "decoder"} if helps else {"transformer"}
