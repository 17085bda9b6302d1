"""Sums of shard groups over the object store: each rank stores and reads the numbers that it
holds, and no process holds a whole sum."""

from collections.abc import Mapping

from services.trainer.fluid.exchange import ExchangeIncomplete, MemberRound, Sum
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

    async def total(self, round_: MemberRound, own: Sum) -> Term:
        if not round_.is_committer:
            return await self.exchange_sum(round_, own)
        async with self.limited(round_) as waits_for:
            others = await self.others(round_, waits_for, _as_told)
            total = await self._added(round_, {round_.me: own} if own else {}, others)
            if len(round_.members) > 1:
                stored = await self._group.put_total(round_.message.batch)
                await self.say(round_, TOTAL, stored)
        return total

    async def exchange_sum(self, round_: MemberRound, own: Sum) -> Term:
        async with self.limited(round_) as waits_for:
            if own:
                stored = await self._group.put_sum(own, round_.message.batch)
                await self.say(round_, round_.me, stored)
            waits_for.add(round_.committer)
            return await self._group.take_total(await self.stored(round_, TOTAL))

    async def local_total(self, round_: MemberRound, sums: Mapping[str, Sum]) -> Term:
        return await self._added(round_, sums, {})

    async def _added(
        self, round_: MemberRound, own: Mapping[str, Sum], others: Mapping[str, StoredSum]
    ) -> Term:
        order = addition_order(round_)
        missing = {name for name, key in order if name in own and key not in own[name]}
        if missing:
            reason = "the sums do not match their shares"
            raise ExchangeIncomplete(reason, tuple(sorted(missing)))
        return await self._group.add(order, own, others)


async def _as_told(stored: StoredSum) -> StoredSum:
    return stored
