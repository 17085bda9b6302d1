"""Has near members add up their sums first: members of a host, then hosts of a site.

    members of a host -- their sums --> leader -- one sum of the host --> the site's leader
                      <-- the total --         <-------- the total ----

Each round names the near members (`ExchangeSums.hosts`, `sites`), as members report it (`Holds`).
Sums go from process to process as weights do: through the cache of their host, and from there to
other hosts of the site (`shared.store.host_cache`, `relay`). Only their digests go through the
object store. If each group's gradient is separate, a leader forwards all gradients of its place,
and they are added in the order of the groups as usual. NCCL needs no leaders of hosts: its rings
cross the line between two hosts once.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.trainer.fluid.exchange import WHOLE_BATCH, Exchange, MemberRound, Place, Sum
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.fluid.sums import SumLayout, Term, added, in_order
from shared.messages.contracts import ObjectRef
from shared.store import ObjectStore
from shared.store.host_cache import HostCache
from shared.store.objects import named


@dataclass(frozen=True, slots=True)
class CachedSums:
    """Implements `SumStore`."""

    cache: HostCache
    store: ObjectStore

    async def put(self, folder: str, data: bytes, *, suffix: str) -> ObjectRef:
        ref = await named(folder, data, suffix)
        await self.cache.offer(ref, data)
        return ref

    async def get(self, ref: ObjectRef) -> bytes:
        return bytes(await self.cache.get(ref, self.store))


class NearExchange:
    def __init__(
        self, exchange: Exchange, store: ObjectStore, layout: SumLayout, *, on_host: bool = True
    ) -> None:
        """``exchange``: forms the total of a site's leaders, or of all members. ``on_host``:
        whether members of a host add up theirs."""
        self._exchange = exchange
        self._layout = layout
        self._among_sites = StoreExchange(store, layout)
        self._near, self._place = self._among_sites, Place()
        if isinstance(store.cache, HostCache):
            cache, relay = store.cache, store.cache.relay
            word = hashlib.sha256(cache.folder.secret().encode()).hexdigest()[:32]
            self._place = Place(word if on_host else "", "" if relay is None else relay.site)
            if relay is not None:  # no store has the sums, so that a slow host is waited for
                cache = replace(cache, relay=replace(relay, min_share=0.0))
            self._near = StoreExchange(store, layout, CachedSums(cache, store))

    @property
    def place(self) -> Place:
        return self._place

    @property
    def sum_bytes(self) -> int:
        return self._layout.num_bytes

    async def total(self, round_: MemberRound, own: Sum) -> Term:
        among = self._among_sites if round_.message.sites else self._exchange
        return await self._total(round_, own, among)

    async def _total(self, round_: MemberRound, own: Sum, among: Exchange) -> Term:
        if not round_.message.hosts:
            total: Term = await among.total(round_, own)
            return total
        here = round_.on_host
        if not here.is_committer:
            return await self._near.exchange_sum(here, own)
        sums = await self._near.gathered(here, own)
        together = await asyncio.to_thread(self._together, here, sums)
        total = await self._total(round_.among_hosts, together, among)
        await self._near.give(here, total)
        return total

    async def local_total(self, round_: MemberRound, sums: Mapping[str, Sum]) -> Term:
        total: Term = await self._exchange.local_total(round_, sums)
        return total

    async def close(self) -> None:
        await self._exchange.close()

    def _together(self, here: MemberRound, sums: dict[str, Sum]) -> Sum:
        if len(here.members) == 1:
            return sums[here.me]
        terms = in_order(sums, here)
        if here.by_group:
            return dict(zip(here.owner_of, terms, strict=True))
        return {WHOLE_BATCH: added(terms, self._layout)} if terms else {}
