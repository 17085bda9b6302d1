"""Starts a member, or another rank of the shard group that torchrun has started."""

import asyncio

from services.trainer.engine.world import this_rank
from shared.process.settings import ServiceSettings
from shared.process.worker_process import WorkerProcess, run_worker


async def run(settings: ServiceSettings) -> None:
    """Be the service as the first of the ranks that torchrun has started; the others follow it."""
    if this_rank() == 0:
        await run_worker("trainer", settings, _work)
    else:
        from services.trainer.fluid.shard_follower import follow  # torch

        await asyncio.to_thread(follow, settings.store)


async def _work(process: WorkerProcess) -> None:
    from services.trainer.fluid.process import be_a_member  # torch, once the probes answer

    await be_a_member(process)
