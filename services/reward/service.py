"""Starts a reward worker: connections are opened here and passed down."""

import asyncio

from shared.run_store import wait_for_recipe
from shared.service import Health, serve, worker_app
from shared.settings import ServiceSettings
from shared.store import open_store
from shared.worker import Worker


async def run(settings: ServiceSettings) -> None:
    health = Health()
    app = worker_app("reward", health)
    await serve(app, _work(settings, health), host=settings.host, port=settings.port)


async def _work(settings: ServiceSettings, health: Health) -> None:
    from services.reward.app import RewardApp
    from services.reward.scorer import build_scorers

    store = open_store(settings.store)
    recipe = await wait_for_recipe(store, settings.run)
    limit_threads(recipe.reward.threads)
    scorers = await asyncio.to_thread(build_scorers, recipe.reward.scorers)
    worker = Worker("reward", settings.worker, "waiting_for_rollout")
    async with settings.connect_bus() as bus:
        health.is_ready()
        await RewardApp(scorers, bus, store, worker).run()


def limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
