"""The index of policy versions in Redis: which weights belong to a version.

The commit records are the truth, and `rebuild` restores the index from them. Only the scheduler
writes it; rollout workers read it (when: services/rollout/policy_loader.py).
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis
from pydantic import ValidationError
from redis.exceptions import WatchError

from shared.errors import ContractError, IntegrityError, LeaseLost, Unavailable
from shared.limits import MAX_INDEXED_VERSIONS
from shared.messages.contracts import ObjectRef, Policy
from shared.messages.records import Record
from shared.run.commits import StoredAs
from shared.store.redis_client import check_redis, open_redis
from shared.telemetry import FENCED_COMMANDS


class Version(Record):
    policy: Policy
    weights: ObjectRef


@dataclass(frozen=True, slots=True)
class VersionIndex:
    _redis: "redis.Redis"
    run: str
    epoch: int = 0
    """Epoch of the scheduler that writes: one whose epoch is over changes nothing."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, *, run: str, ca: str | None = None, may_be_open: bool = False
    ) -> AsyncIterator["VersionIndex"]:
        """Open the index, whether or not Redis answers yet.

        Args:
            ca: certificates, as PEM text, that verify a `rediss://` server.
            may_be_open: whether Redis without authentication is allowed.

        Raises:
            UserError: if Redis refuses the user or the password, is too old, or has no
                authentication.
        """
        client = open_redis(url, ca, timeout=5)
        try:
            await check_redis(client, url, ca, may_be_open=may_be_open)
            yield cls(client, run)
        finally:
            await client.aclose()

    async def publish(self, version: Version) -> None:
        """Add the next version; repeating it changes nothing.

        Raises:
            IntegrityError: if it is not the next one, or the index holds other weights for it.
            LeaseLost: if a scheduler of a later epoch has written.
        """
        number = version.policy.version
        key = self._key(number)
        async with self._redis.pipeline(transaction=True) as pipe:
            while True:
                try:
                    await pipe.watch(self._newest_key, key, self._epoch_key)
                    await self._check_epoch(pipe)
                    # In this order: whoever publishes the same in between is seen to have done it.
                    newest, stored_version = await pipe.get(self._newest_key), await pipe.get(key)
                    if stored_version is not None and _decode(stored_version) == version:
                        return
                    if stored_version is not None or number != (
                        0 if newest is None else int(newest) + 1
                    ):
                        holds = "nothing" if newest is None else int(newest)
                        raise IntegrityError(
                            f"the version index is at {holds}; it cannot take {number}"
                        )
                    pipe.multi()  # type: ignore[no-untyped-call]
                    pipe.set(key, version.model_dump_json())
                    pipe.set(self._newest_key, number)
                    pipe.set(self._epoch_key, self.epoch)
                    pipe.delete(self._key(number - MAX_INDEXED_VERSIONS))
                    await pipe.execute()
                    return
                except WatchError:
                    continue

    async def try_to_write(self) -> None:
        """Write a probe; raises RedisError if Redis does not accept it."""
        await self._redis.set(f"{self._newest_key}:room", self.epoch)

    async def lookup(self, number: int) -> Version | None:
        """Return a version, None if it is not in the index.

        Raises:
            Unavailable: if Redis does not answer.
            ContractError: if the index holds something that is no version.
        """
        try:
            data = await self._redis.get(self._key(number))
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        return None if data is None else _decode(data)

    async def rebuild(self, chain: Iterable[StoredAs]) -> None:
        """Make the index agree with the newest commits; raises LeaseLost as `publish` does."""
        versions = [Version(policy=each.policy, weights=each.weights) for each in chain]
        stale = [key async for key in self._redis.scan_iter(f"{self._newest_key}:*", count=1000)]
        async with self._redis.pipeline(transaction=True) as pipe:
            while True:
                try:
                    await pipe.watch(self._epoch_key)
                    await self._check_epoch(pipe)
                    pipe.multi()  # type: ignore[no-untyped-call]
                    for key in [*stale, self._newest_key]:
                        pipe.delete(key)
                    for version in versions:
                        number = version.policy.version
                        pipe.set(self._key(number), version.model_dump_json())
                        pipe.set(self._newest_key, number)
                    pipe.set(self._epoch_key, self.epoch)
                    await pipe.execute()
                    return
                except WatchError:
                    continue

    async def _check_epoch(self, pipe: "redis.client.Pipeline") -> None:
        newest = int(await pipe.get(self._epoch_key) or 0)
        if newest > self.epoch:
            FENCED_COMMANDS.labels(what="version_index").inc()
            raise LeaseLost(f"a scheduler of epoch {newest} writes the version index")

    @property
    def _epoch_key(self) -> str:
        return f"{self._newest_key}:epoch"

    @property
    def _newest_key(self) -> str:
        return f"dg:wv:{self.run}"

    def _key(self, number: int) -> str:
        return f"{self._newest_key}:{number}"


def _decode(data: Any) -> Version:
    try:
        return Version.model_validate_json(data)
    except ValidationError as error:
        raise ContractError("the version index holds something that is no version") from error
