"""Members of two sites: one sum of each site crosses, and all hold the bits of one total."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from digenrl.local.processes.ports import free_ports
from services.trainer.fluid.exchange import (
    WHOLE_BATCH,
    Exchange,
    ExchangeIncomplete,
    MemberRound,
    Sum,
)
from services.trainer.fluid.host_exchange import HostExchange, HostMemory
from services.trainer.fluid.site_exchange import SiteExchange
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.fluid.sums import added
from shared.diffusion.weights.checksum import checksum
from shared.store import ObjectStore
from shared.store.cache_folder import CacheFolder
from shared.store.folder import FolderBackend
from shared.store.host_cache import HostCache
from shared.store.relay import Peer, Relay
from tests.shared.store.hosts import LIMIT, Listed
from tests.trainer.fluid.test_exchange import LAYOUT, member_rounds, of, share, term, totals

HOSTS = {"a": 0, "b": 0, "c": 1, "d": 2, "e": 2, "f": 3}
SITES = ("home", "home", "lab", "lab")
GROUPS = {"a": (4, 0), "b": (2,), "c": (), "d": (1,), "e": (3, 5), "f": (6,)}
SHARES = [share(name, *groups) for name, groups in GROUPS.items()]


class Unlisted(Listed):
    """Redis while it does not answer."""

    async def enter(self, sha256: str, me: Peer) -> list[Peer]:
        return []


@contextlib.asynccontextmanager
async def two_sites(
    folder: Path, *, in_memory: bool, listed: Listed | None = None
) -> AsyncIterator[dict[str, Exchange]]:
    """The exchanges of six members on four hosts; ``in_memory``: whether those of a host add up
    their sums there."""
    ports, listed = free_ports(len(SITES)), listed or Listed()
    async with contextlib.AsyncExitStack() as stack:
        exchanges: dict[str, Exchange] = {}
        for name, host in HOSTS.items():
            cache = CacheFolder.open(folder / f"host-{host}")
            relay = Relay(cache, ("127.0.0.1", ports[host]), listed, SITES[host])
            await stack.enter_async_context(relay)
            backend = FolderBackend(folder / "objects")
            store = ObjectStore(backend, cache=HostCache(cache, LIMIT, relay))
            exchange: Exchange = SiteExchange(
                StoreExchange(store, LAYOUT), store, LAYOUT, adds_up_hosts=in_memory
            )
            if in_memory:
                (folder / f"memory-{host}").mkdir(exist_ok=True)
                memory = HostMemory.open(name, 0, folder / f"memory-{host}")
                assert memory is not None
                exchange = HostExchange(exchange, memory, LAYOUT)
            exchanges[name] = exchange
            stack.push_async_callback(exchange.close)
        yield exchanges


def rounds(
    *, in_memory: bool, batch: int = 0, by_group: bool = False, seconds: float = 20.0
) -> dict[str, MemberRound]:
    """The round as the scheduler groups its members."""
    hosts, sites = ((2, 1, 2, 1), (2, 2)) if in_memory else ((1,) * 6, (3, 3))
    return member_rounds(
        SHARES, batch=batch, by_group=by_group, seconds=seconds, hosts=hosts, sites=sites
    )


def sums_of(*, by_group: bool) -> dict[str, Sum]:
    return {
        name: {number: term(number) for number in groups}
        if by_group
        else {WHOLE_BATCH: added([term(number) for number in groups], LAYOUT)}
        for name, groups in GROUPS.items()
        if groups
    }


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("in_memory", [False, True])
async def test_the_hosts_of_a_site_add_up_theirs_before_sites_exchange_one_each(
    tmp_path: Path, in_memory: bool, by_group: bool
) -> None:
    whole = of(term(0)).clone()
    for number in range(1, 7):
        whole += of(term(number))
    found = []
    async with two_sites(tmp_path, in_memory=in_memory) as exchanges, asyncio.timeout(60):
        assert [each.place.site for each in exchanges.values()] == ["home"] * 3 + ["lab"] * 3
        for batch in range(2):
            met = rounds(in_memory=in_memory, batch=batch, by_group=by_group)
            found += await totals(exchanges, met, sums_of(by_group=by_group))
    assert len({checksum({"": of(each)}).hex for each in found}) == 1, "of both batches"
    assert torch.allclose(of(found[0]), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(of(found[0]), whole) or not by_group
    assert all(each.tally == found[0].tally for each in found)
    crossed = list((tmp_path / "objects").glob("test/batches/*/*.sum.safetensors"))
    assert len(crossed) == 2 * 2, "the lab's sum and the total, of two batches"


async def test_a_member_that_is_missed_is_named_by_the_leader_of_its_site(tmp_path: Path) -> None:
    async with two_sites(tmp_path, in_memory=True) as exchanges, asyncio.timeout(60):
        del exchanges["f"]
        met, sums = rounds(in_memory=True, seconds=2.0), sums_of(by_group=False)
        forming = [exchanges[name].total(met[name], sums.get(name, {})) for name in exchanges]
        found = await asyncio.gather(*forming, return_exceptions=True)
    missed = dict(zip(exchanges, found, strict=True))
    assert isinstance(missed["d"], ExchangeIncomplete) and missed["d"].missing == ("f",)
    assert all(isinstance(each, ExchangeIncomplete) for each in found)


async def test_hosts_that_do_not_find_each_other_say_so_at_once(tmp_path: Path) -> None:
    async with (
        two_sites(tmp_path, in_memory=True, listed=Unlisted()) as exchanges,
        asyncio.timeout(15),
    ):
        met, sums = rounds(in_memory=True, seconds=600.0), sums_of(by_group=False)
        with pytest.raises(ExchangeIncomplete) as error:
            await asyncio.gather(
                *(exchanges[name].total(met[name], sums.get(name, {})) for name in "def")
            )
    assert error.value.missing == ("f",)
