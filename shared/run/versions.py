"""The index of policy versions in Redis: which weights a version is, for whoever must load them.

Only an index: the commit records are the truth, and `rebuild` writes it anew from them. The
scheduler alone writes; rollout workers read.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis
import structlog
from pydantic import ValidationError
from redis.exceptions import WatchError

from shared.errors import ContractError, IntegrityError, Unavailable, UserError
from shared.messages.contracts import ObjectRef, Policy
from shared.messages.records import Record
from shared.run.commits import CommitRecord
from shared.telemetry import public

log = structlog.get_logger()


class Version(Record):
    policy: Policy
    weights: ObjectRef


@dataclass(frozen=True, slots=True)
class VersionIndex:
    _redis: "redis.Redis"
    run: str

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, *, run: str) -> AsyncIterator["VersionIndex"]:
        """Raises UserError if Redis refuses the user or the password; one that does not answer yet
        is waited for by whoever looks something up."""
        client = redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)
        try:
            await _look(client, public(url))
            yield cls(client, run)
        finally:
            await client.aclose()

    async def publish(self, version: Version) -> None:
        """Add the next version; doing it again changes nothing.

        Raises:
            IntegrityError: if it is not the next one, or the index holds other weights for it.
        """
        number = version.policy.version
        async with self._redis.pipeline(transaction=True) as pipe:
            while True:
                try:
                    await pipe.watch(self._head, self._key(number))
                    known, head = await pipe.get(self._key(number)), await pipe.get(self._head)
                    if known is not None and _decode(known) == version:
                        return
                    if known is not None or number != (int(head) + 1 if head is not None else 0):
                        raise IntegrityError(
                            f"the version index is at {_text(head)}; it cannot take {number}"
                        )
                    pipe.multi()  # type: ignore[no-untyped-call]
                    pipe.set(self._key(number), version.model_dump_json())
                    pipe.set(self._head, number)
                    await pipe.execute()
                    return
                except WatchError:
                    continue

    async def lookup(self, number: int) -> Version | None:
        """Raises Unavailable if Redis does not answer, ContractError if it holds something else."""
        try:
            found = await self._redis.get(self._key(number))
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise Unavailable(f"Redis does not answer: {error}") from error
        return None if found is None else _decode(found)

    async def rebuild(self, chain: Sequence[CommitRecord]) -> None:
        """Make the index say exactly what the commit records say."""
        stale = [key async for key in self._redis.scan_iter(f"{self._head}:*", count=1000)]
        async with self._redis.pipeline(transaction=True) as pipe:
            for key in [*stale, self._head]:
                pipe.delete(key)
            for record in chain:
                version = Version(policy=record.policy, weights=record.weights)
                pipe.set(self._key(record.policy.version), version.model_dump_json())
                pipe.set(self._head, record.policy.version)
            await pipe.execute()

    @property
    def _head(self) -> str:
        return f"dg:wv:{self.run}"

    def _key(self, number: int) -> str:
        return f"{self._head}:{number}"


async def _look(client: "redis.Redis", address: str) -> None:
    try:
        await client.ping()
    except redis.AuthenticationError as error:
        raise UserError(
            f"DIGENRL_REDIS_URL: Redis at {address} refuses this user or password"
        ) from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        log.warning(
            "redis_unavailable", redis=address, setting="DIGENRL_REDIS_URL", error=str(error)
        )
    else:
        log.info("connected", redis=address)


def _decode(data: Any) -> Version:
    try:
        return Version.model_validate_json(data)
    except ValidationError as error:
        raise ContractError("the version index holds something that is no version") from error


def _text(head: Any) -> str:
    return "nothing" if head is None else str(int(head))
