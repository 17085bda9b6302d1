"""Starts a rollout worker, or an encoder: connections are opened here and passed down."""

import asyncio
from collections.abc import Callable
from functools import partial

from shared.devices.conditions import encoded_conditions
from shared.devices.protocols import RolloutDevice
from shared.errors import UserError
from shared.models.catalogue import encoding_parts
from shared.process.settings import ServiceSettings
from shared.process.worker_process import WorkerProcess, run_worker
from shared.recipe.recipe import Recipe, override
from shared.run.conditions import find_encoding
from shared.run.previews import PreviewRule

BuildDevice = Callable[[Recipe], RolloutDevice]


async def run(settings: ServiceSettings) -> None:
    await run_device(settings, None)


async def run_device(settings: ServiceSettings, build_device: BuildDevice | None) -> None:
    """Runs a worker whose device ``build_device`` loads; without it, the recipe's model here."""
    await run_worker("rollout", settings, partial(_work, build_device=build_device))


def as_here(recipe: Recipe, settings: ServiceSettings) -> Recipe:
    """Returns the recipe as this worker follows it: it may hold the network in its own way.

    Raises:
        UserError: if the recipe does not allow it.
    """
    return override(recipe, {"rollout.memory": settings.rollout_memory})


async def _work(process: WorkerProcess, *, build_device: BuildDevice | None) -> None:
    from services.rollout.app import RolloutApp
    from services.rollout.rollout_engine import RolloutEngine  # torch, once the probes answer
    from shared.diffusion.loading.device import this_device

    settings, recipe = process.settings, as_here(process.recipe, process.settings)
    registered = this_device(
        recipe, recipe.generating_parts, trains=False,
        concurrency=1, memory_gib=settings.memory_gib,
        holding=recipe.holding,
    )  # fmt: skip
    async with (
        process.sharing() as sharing,
        sharing.connect("waiting_for_trainer", registered) as context,
        settings.connect_index() as index,
    ):
        await process.refuse_or_go_on(context)
        device = await asyncio.to_thread(build_device or RolloutEngine, recipe)
        app = RolloutApp(
            device, context, index, max_staleness=recipe.schedule.staleness_limit,
            encoded=await encoded_conditions(process.store, recipe),
            lossless=recipe.rollout.media == "lossless", previews=PreviewRule.from_recipe(recipe),
        )  # fmt: skip
        await process.run(app.run(), context)


async def run_encoder(settings: ServiceSettings) -> None:
    """Runs an encoder, which makes conditions ahead for the devices that generate."""
    await run_worker("encoder", settings, _encode)


async def _encode(process: WorkerProcess) -> None:
    from services.rollout.encoder import EncoderApp
    from services.rollout.encoder_engine import EncoderEngine  # torch, once the probes answer
    from shared.diffusion.loading.device import this_device

    settings, recipe = process.settings, process.recipe
    if not recipe.encoder.workers:
        raise UserError(
            "encoder.workers: 0, so the devices that generate encode for themselves and would use "
            "nothing of what an encoder makes; set it to the number of encoders"
        )
    registered = this_device(
        recipe, encoding_parts(recipe.model.folder), trains=False,
        concurrency=0, memory_gib=settings.memory_gib,
    )  # fmt: skip
    async with process.connect("waiting_for_trainer", registered) as context:
        await process.refuse_or_go_on(context)
        device = await asyncio.to_thread(EncoderEngine, recipe)
        app = EncoderApp(device, context, recipe, await find_encoding(process.store, recipe))
        await process.run(app.run(), context)
