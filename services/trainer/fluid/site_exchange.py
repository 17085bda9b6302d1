"""Has the hosts of a site add up their sums, so that one sum of a site crosses to others.

    hosts of a site -- their sums --> leader -- one sum of the site --> the other sites' leaders
                    <-- the total --         <------ the total --------

Within a site sums go from host to host as weights do (`shared.store.relay`), and only their digests
go through the object store. Between sites sums go through the store, which every site reaches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.trainer.fluid.exchange import Exchange, MemberRound, Place, Sum
from services.trainer.fluid.host_exchange import total_of_places
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.fluid.sums import SumLayout, Term
from shared.messages.contracts import ObjectRef
from shared.store import ObjectStore
from shared.store.host_cache import HostCache
from shared.store.objects import named


@dataclass(frozen=True, slots=True)
class RelayedSums:
    """Implements `SumStore`. No store has the sums, so that a slow host is waited for."""

    cache: HostCache
    store: ObjectStore

    async def put(self, folder: str, data: bytes, *, suffix: str) -> ObjectRef:
        ref = await named(folder, data, suffix)
        await self.cache.offer(ref, data)
        return ref

    async def get(self, ref: ObjectRef) -> bytes:
        return bytes(await self.cache.get(ref, self.store))


class SiteExchange:
    def __init__(
        self, in_one_site: Exchange, store: ObjectStore, layout: SumLayout, *, adds_up_hosts: bool
    ) -> None:
        """``in_one_site``: forms the total of members in one site. ``adds_up_hosts``:
        whether a `HostExchange` has done so before."""
        self._in_one_site = in_one_site
        self._among_sites = StoreExchange(store, layout)
        self._layout = layout
        self._adds_up_hosts = adds_up_hosts
        cache, self._site, sums = store.cache, "", None
        if isinstance(cache, HostCache) and cache.relay is not None:
            self._site, relay = cache.relay.site, replace(cache.relay, min_share=0.0)
            sums = RelayedSums(replace(cache, relay=relay), store)
        self._in_site = StoreExchange(store, layout, sums)

    @property
    def place(self) -> Place:
        return Place(site=self._site)

    @property
    def sum_bytes(self) -> int:
        return self._layout.num_bytes

    async def total(self, round_: MemberRound, own: Sum) -> Term:
        if not self._adds_up_hosts:
            round_ = round_.among_hosts
        if not round_.message.hosts:
            total: Term = await self._in_one_site.total(round_, own)
            return total
        layout, near, among = self._layout, self._in_site, self._among_sites
        return await total_of_places(round_, own, round_.on_host, near, among, layout)

    async def local_total(self, round_: MemberRound, sums: Mapping[str, Sum]) -> Term:
        total: Term = await self._in_one_site.local_total(round_, sums)
        return total

    async def close(self) -> None:
        await self._in_one_site.close()
