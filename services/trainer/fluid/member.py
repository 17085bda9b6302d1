"""A fluid device as a process: its messages from the scheduler and from the other members.

    fragments, pieces ----------------------> DeviceWork, one thing at a time
    ExchangeSums -> own sum -> the total of all -> SumHeld                          Rounds
    TakeStep     -> the elementwise step        -> Stepped; the next version is in use
    the committer, concurrently with the next batch        -> weights, checkpoint, commit record,
        news
    Stepped of the committer, PolicyPublished   -> compare; fetch what it lacks
        MemberVersions

Its memory holds nothing that is not also elsewhere, but its sum: if it is lost, others train the
same pieces again.
"""

import asyncio

from services.trainer.batch.fetcher import CheckStored, GroupFetcher, TrajectoryCache
from services.trainer.fluid.exchange import Exchange
from services.trainer.fluid.ledger import Ledger
from services.trainer.fluid.pieces import DeviceWork
from services.trainer.fluid.protocols import FluidDevice
from services.trainer.fluid.replay import Replay
from services.trainer.fluid.rounds import Rounds
from services.trainer.fluid.state import MemberState
from services.trainer.fluid.versions import MemberVersions
from shared.devices.conditions import EncodedConditions
from shared.devices.protocols import GeneratingDevice
from shared.devices.publisher import FragmentPublisher
from shared.process.worker import WorkerContext
from shared.recipe.recipe import Recipe
from shared.run.previews import PreviewRule


class MemberApp:
    def __init__(
        self,
        device: FluidDevice,
        generator: GeneratingDevice,
        exchange: Exchange,
        recipe: Recipe,
        context: WorkerContext,
        *,
        encoded: EncodedConditions | None = None,
        check: CheckStored | None = None,
    ) -> None:
        """``generator``: over the same weights as ``device``; ``encoded``: where conditions come
        from, if it does not encode; ``check``: looks at what is stored of a fragment."""
        self._bus = context.bus
        self._worker = context.worker
        self._exchange = exchange
        by_group = recipe.trainer.deterministic
        cache, lossless = TrajectoryCache(), recipe.rollout.media == "lossless"
        publisher = FragmentPublisher(
            generator, context, encoded=encoded, lossless=lossless, keep=cache.keep,
            previews=PreviewRule.from_recipe(recipe),
        )  # fmt: skip
        ledger = Ledger(self._worker.address)
        self._state = MemberState(self._worker, ledger, exchange.place, exchange.sum_bytes)
        fetcher = GroupFetcher(recipe, context, cache, check)
        self._work = DeviceWork(
            device, generator, self._state, context, fetcher, publisher, encoded, by_group=by_group,
            max_staleness=recipe.schedule.staleness_limit,
            has_loans=recipe.schedule.mode == "disaggregated",
        )  # fmt: skip
        replay = Replay(
            device, exchange, fetcher, context, by_group=by_group,
            num_updates=recipe.trainer.updates, num_groups=recipe.batch.groups,
        )  # fmt: skip
        self._versions = MemberVersions(device, self._state, replay, context)
        self._rounds = Rounds(
            device, exchange, self._state, self._versions, context, by_group=by_group,
            num_updates=recipe.trainer.updates,
        )  # fmt: skip

    async def run(self) -> None:
        await self._bus.wait_for_streams()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._worker.report(self._bus))
                await self._versions.recover()
                tasks.create_task(self._versions.follow())
                tasks.create_task(self._versions.keep_up())
                tasks.create_task(self._rounds.follow(tasks))
                tasks.create_task(self._work.run())
        finally:
            await self._exchange.close()
