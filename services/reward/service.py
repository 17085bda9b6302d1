"""Starts a reward worker: connections are opened here and passed down."""

import asyncio
import os

from shared.messages.workers import Device
from shared.process.settings import ServiceSettings
from shared.process.worker import host_memory
from shared.process.worker_process import WorkerProcess, run_worker


async def run(settings: ServiceSettings) -> None:
    await run_worker("reward", settings, _work)


async def _work(process: WorkerProcess) -> None:
    from services.reward.app import RewardApp
    from services.reward.kinds import may_load_a_network
    from services.reward.scorer import build_scorers
    from services.reward.scoring import MediaSize

    tables, gpu = process.recipe.reward.scorers, os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if gpu and any(may_load_a_network(table.type) for table in tables):
        from shared.diffusion.loading.device import own_device  # torch

        await asyncio.to_thread(own_device)  # a Python file would fall back to the CPU
    scorers = await asyncio.to_thread(build_scorers, tables)
    device = Device(memory_bytes=host_memory(), gpu=gpu)
    async with process.connect("waiting_for_rollout", device) as context:
        deadline = process.recipe.schedule.slot_deadline_s
        longest = sum(table.longest_s for table in tables)
        context.worker.progress.longer_s = longest
        app = RewardApp(
            scorers, context,
            deadline_s=None if deadline == "auto" else deadline,
            longest_s=longest,
            size=MediaSize.from_recipe(process.recipe),
            background=process.recipe.data.background,
        )  # fmt: skip
        await process.run(app.run(), context)
