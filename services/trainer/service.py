"""Starts the trainer: connections are opened here and passed down."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from services.trainer.engine.world import num_ranks, this_rank
from shared.devices.conditions import encoded_conditions
from shared.errors import UserError
from shared.models.memory import Part
from shared.process.settings import ServiceSettings
from shared.process.worker_process import WorkerProcess, run_worker
from shared.recipe.recipe import Recipe

if TYPE_CHECKING:
    from shared.devices.protocols import Training
    from shared.diffusion.generation import LocalGenerator


async def run(settings: ServiceSettings) -> None:
    """Be the service as the first of the ranks that torchrun has started; the others follow it."""
    if this_rank() == 0:
        await run_worker("trainer", settings, _work)
    else:
        from services.trainer.fluid.shard_follower import follow  # torch

        await asyncio.to_thread(follow, settings.store)


async def _work(process: WorkerProcess) -> None:
    if process.recipe.schedule.has_members:
        from services.trainer.fluid.process import be_a_member  # torch

        await be_a_member(process)
        return
    if num_ranks() > 1:
        raise UserError(
            f"schedule.mode: this trainer was started as {num_ranks()} processes, and only fluid "
            'devices form shard groups; set it to "fluid", or start one process'
        )
    await _train(process)


async def _train(process: WorkerProcess) -> None:
    from services.trainer.app import TrainerApp  # torch, once the probes answer
    from shared.diffusion.device import this_device
    from shared.diffusion.training.rows import check_stored

    settings, recipe = process.settings, process.recipe
    num_devices, helps = recipe.trainer.devices, recipe.run_schedule.trainer_generates
    device = this_device(
        recipe,
        _parts(recipe),
        trains=True,
        concurrency=num_devices if helps else 0,
        memory_gib=settings.memory_gib,
        independent_devices=num_devices > 1,
    )
    if device.kind == "cpu":  # where all of them share the memory
        device = device.model_copy(update={"needs_bytes": num_devices * device.needs_bytes})
    async with process.connect("waiting_for_rollout", device) as context:
        await process.refuse_or_go_on(context)
        training, generators = await asyncio.to_thread(_load, recipe)
        check = partial(check_stored, recipe)
        encoded = await encoded_conditions(process.store, recipe) if generators else None
        app = TrainerApp(
            training, recipe, context, generators=generators, encoded=encoded, check=check
        )
        await process.run(app.run(), context)


def _load(recipe: Recipe) -> "tuple[Training, list[LocalGenerator]]":
    """Load the trainer's devices, and generators on them if they may be lent."""
    from services.trainer.engine.threads import ReplicatedTraining, load_replicas
    from shared.diffusion.generation import Generator, LocalGenerator

    helps = recipe.run_schedule.trainer_generates
    loaded = load_replicas(recipe, _parts(recipe))
    generators = [LocalGenerator(Generator(recipe, each)) for each in loaded] if helps else []
    return ReplicatedTraining(recipe, loaded), generators


def _parts(recipe: Recipe) -> set[Part]:
    """Return what the trainer's devices hold of the model: if they are lent, what generates."""
    helps = recipe.run_schedule.trainer_generates
    return set(recipe.generating_parts) if helps else {"transformer"}
