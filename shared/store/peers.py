"""Which hosts have an object, or are receiving it: a list for each, in Redis, for an hour. And how
fast each host of a site reads from the store.

Redis only names the hosts to try: without a useful response, objects come from the store.
"""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio as redis
import structlog
from pydantic import ValidationError
from redis.exceptions import RedisError

from shared.store.redis_client import open_redis
from shared.store.relay import Peer, StoreRates

PEER_LIFETIME_S = 3600
MAX_ENTRIES = 256
"""Entries of one list that are looked at, the last ones."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RedisPeers:
    """Implements `PeerList`."""

    _redis: "redis.Redis"
    run: str

    async def enter(self, sha256: str, me: Peer) -> list[Peer]:
        key = f"dg:peers:{self.run}:{sha256}"
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.rpush(key, me.model_dump_json())
                pipe.lrange(key, -MAX_ENTRIES, -1)
                pipe.expire(key, PEER_LIFETIME_S)
                _, entries, _ = await pipe.execute()
        except (RedisError, OSError) as error:
            log.warning("peers_unavailable", error=str(error), hint="read from the store instead")
            return []
        return [peer for entry in entries[-2::-1] if (peer := _decoded(entry)) is not None]

    async def store_rates(self, site: str, host: str, measured: float | None) -> StoreRates:
        key = f"dg:peers:{self.run}:site:{site}"
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                if measured is not None:
                    pipe.zadd(key, {host: measured})
                pipe.zscore(key, host)
                pipe.zrevrangebyscore(key, "(inf", "(0", 0, 1, withscores=True)
                pipe.expire(key, PEER_LIFETIME_S)
                *_, own, best, _ = await pipe.execute()
        except (RedisError, OSError):
            return StoreRates(measured, None)
        is_rate = own is not None and 0 < own < math.inf
        return StoreRates(own if is_rate else None, best[0][1] if best else None)


def _decoded(entry: bytes) -> Peer | None:
    try:
        return Peer.model_validate_json(entry)
    except (ValidationError, RecursionError):
        return None


@asynccontextmanager
async def peer_list(url: str, run: str, ca: str | None = None) -> AsyncIterator[RedisPeers]:
    """Open the lists of a run, whether or not Redis answers."""
    client = open_redis(url, ca, timeout=2)
    try:
        yield RedisPeers(client, run)
    finally:
        await client.aclose()
