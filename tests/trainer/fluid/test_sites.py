"""Members of a host, and hosts of a site, add up their sums first; all have one total's bits."""

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
from services.trainer.fluid.near_exchange import NearExchange
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
    folder: Path, *, on_host: bool = True, relays: bool = True, listed: Listed | None = None
) -> AsyncIterator[dict[str, Exchange]]:
    """The exchanges of six members on four hosts; ``on_host``: whether those of a host add up
    theirs, ``relays``: whether hosts give objects to others."""
    ports, listed = free_ports(len(SITES)), listed or Listed()
    async with contextlib.AsyncExitStack() as stack:
        exchanges: dict[str, Exchange] = {}
        for name, host in HOSTS.items():
            cache, relay = CacheFolder.open(folder / f"host-{host}"), None
            if relays:
                relay = Relay(cache, ("127.0.0.1", ports[host]), listed, SITES[host])
                await stack.enter_async_context(relay)
            backend = FolderBackend(folder / "objects")
            store = ObjectStore(backend, cache=HostCache(cache, LIMIT, relay))
            exchanges[name] = NearExchange(
                StoreExchange(store, LAYOUT), store, LAYOUT, on_host=on_host
            )
            stack.push_async_callback(exchanges[name].close)
        yield exchanges


def rounds(
    *, on_host: bool = True, relays: bool = True, batch: int = 0, by_group: bool = False,
    seconds: float = 20.0,
) -> dict[str, MemberRound]:  # fmt: skip
    """The round as the scheduler groups its members."""
    hosts, sites = ((2, 1, 2, 1), (2, 2)) if on_host else ((1,) * 6, (3, 3))
    return member_rounds(
        SHARES, batch=batch, by_group=by_group, seconds=seconds, hosts=hosts,
        sites=sites if relays else (),
    )  # fmt: skip


def sums_of(*, by_group: bool) -> dict[str, Sum]:
    return {
        name: {number: term(number) for number in groups}
        if by_group
        else {WHOLE_BATCH: added([term(number) for number in groups], LAYOUT)}
        for name, groups in GROUPS.items()
        if groups
    }


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(
    ("on_host", "relays", "num_crossed"), [(True, True, 2), (False, True, 2), (True, False, 4)]
)
async def test_near_members_add_up_theirs_before_others_exchange_one_each(
    tmp_path: Path, on_host: bool, relays: bool, num_crossed: int, by_group: bool
) -> None:
    """``num_crossed``: the lab's sum, or the sums of three other hosts, and the total."""
    whole = of(term(0)).clone()
    for number in range(1, 7):
        whole += of(term(number))
    found = []
    async with (
        two_sites(tmp_path, on_host=on_host, relays=relays) as exchanges,
        asyncio.timeout(60),
    ):
        places = [each.place for each in exchanges.values()]
        assert [each.site for each in places] == (
            ["home"] * 3 + ["lab"] * 3 if relays else [""] * 6
        )
        assert len({each.host for each in places}) == (4 if on_host else 1)
        for batch in range(2):
            met = rounds(on_host=on_host, relays=relays, batch=batch, by_group=by_group)
            found += await totals(exchanges, met, sums_of(by_group=by_group))
    assert len({checksum({"": of(each)}).hex for each in found}) == 1, "of both batches"
    assert torch.allclose(of(found[0]), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(of(found[0]), whole) or not by_group
    assert all(each.tally == found[0].tally for each in found)
    crossed = list((tmp_path / "objects").glob("test/batches/*/*.sum.safetensors"))
    assert len(crossed) <= 2 * num_crossed


async def test_a_member_that_is_missed_is_named_by_the_leader_of_its_site(tmp_path: Path) -> None:
    async with two_sites(tmp_path) as exchanges, asyncio.timeout(60):
        del exchanges["f"]
        met, sums = rounds(seconds=2.0), sums_of(by_group=False)
        forming = [exchanges[name].total(met[name], sums.get(name, {})) for name in exchanges]
        found = await asyncio.gather(*forming, return_exceptions=True)
    missed = dict(zip(exchanges, found, strict=True))
    assert isinstance(missed["d"], ExchangeIncomplete) and missed["d"].missing == ("f",)
    assert all(isinstance(each, ExchangeIncomplete) for each in found)


async def test_hosts_that_do_not_find_each_other_say_so_at_once(tmp_path: Path) -> None:
    async with two_sites(tmp_path, listed=Unlisted()) as exchanges, asyncio.timeout(15):
        met, sums = rounds(seconds=600.0), sums_of(by_group=False)
        with pytest.raises(ExchangeIncomplete) as error:
            await asyncio.gather(
                *(exchanges[name].total(met[name], sums.get(name, {})) for name in "def")
            )
    assert error.value.missing == ("f",)
