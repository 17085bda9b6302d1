"""Sums of shard groups over the object store: each rank stores and reads the numbers that it
holds, and no process holds a whole sum."""

from collections.abc import Mapping

from services.trainer.fluid.exchange import ExchangeIncomplete, Meeting, Sum
from services.trainer.fluid.shard_group import ShardGroup
from services.trainer.fluid.store_exchange import TOTAL, StoreExchange
from services.trainer.fluid.sums import StoredSum, SumLayout, Term, addition_order
from shared.store import ObjectStore


class ShardExchange(StoreExchange):
    """Exchanges sums in the format of `StoreExchange`, so that shard groups and devices with all
    weights take part in one round."""

    def __init__(self, store: ObjectStore, layout: SumLayout, group: ShardGroup) -> None:
        super().__init__(store, layout)
        self._group = group

    async def total(self, meeting: Meeting, own: Sum) -> Term:
        if not meeting.is_committer:
            return await self.exchange_sum(meeting, own)
        async with self.limited(meeting) as waits_for:
            others = await self.others(meeting, waits_for, _as_told)
            total = await self._added(meeting, {meeting.me: own} if own else {}, others)
            if len(meeting.members) > 1:
                stored = await self._group.put_total(meeting.message.batch)
                await self.say(meeting, TOTAL, stored)
        return total

    async def exchange_sum(self, meeting: Meeting, own: Sum) -> Term:
        async with self.limited(meeting) as waits_for:
            if own:
                stored = await self._group.put_sum(own, meeting.message.batch)
                await self.say(meeting, meeting.me, stored)
            waits_for.add(meeting.committer)
            return await self._group.take_total(await self.stored(meeting, TOTAL))

    async def of_all(self, meeting: Meeting, sums: Mapping[str, Sum]) -> Term:
        return await self._added(meeting, sums, {})

    async def _added(
        self, meeting: Meeting, own: Mapping[str, Sum], others: Mapping[str, StoredSum]
    ) -> Term:
        order = addition_order(meeting)
        missing = {name for name, key in order if name in own and key not in own[name]}
        if missing:
            reason = "the sums do not match their shares"
            raise ExchangeIncomplete(reason, tuple(sorted(missing)))
        return await self._group.add(order, own, others)


async def _as_told(stored: StoredSum) -> StoredSum:
    return stored
