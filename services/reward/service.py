"""Starts a reward worker: connections are opened here and passed down."""

import asyncio

from shared.settings import ServiceSettings
from shared.worker import Worker
from shared.worker_process import WorkerProcess, run_worker


async def run(settings: ServiceSettings) -> None:
    await run_worker("reward", settings, _work)


async def _work(process: WorkerProcess) -> None:
    from services.reward.app import RewardApp
    from services.reward.scorer import build_scorers

    scorers = await asyncio.to_thread(build_scorers, process.recipe.reward.scorers)
    worker = Worker("reward", process.settings.worker, "waiting_for_rollout")
    async with process.settings.connect_bus() as bus:
        process.health.is_ready()
        await RewardApp(scorers, bus, process.store, worker).run()
