"""Sums over the object store: for several processes without a fast line between them.

Each member stores its sum; the committer adds them in the order of the shares, and stores the
total, which the others fetch. A shard group stores each in parts, one of each rank, of which a
reader fetches what has numbers that it holds. Small objects with fixed keys locate the sums:

    <run>/batches/<batch>/exchange/<attempt>.<round>/<member>.json     its sum
    <run>/batches/<batch>/exchange/<attempt>.<round>/total.json        the total
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from pydantic import ValidationError

from services.trainer import limits
from services.trainer.fluid.exchange import WHOLE_BATCH, ExchangeIncomplete, MemberRound, Place, Sum
from services.trainer.fluid.sums import (
    Ranges,
    StoredSum,
    SumLayout,
    SumPart,
    Term,
    added,
    assembled,
    in_order,
    overlaps,
    pack_sum,
    round_gradient,
    round_terms,
    unpack_sum,
)
from shared.errors import ContractError, IntegrityError, Unavailable
from shared.messages.contracts import ObjectRef
from shared.messages.records import Level
from shared.run.layout import batch_folder
from shared.store import ObjectStore

TOTAL = "total"
HEADER_BYTES = 4096
"""Most bytes of a gradient's names and tallies in an object."""

T = TypeVar("T")


class SumStore(Protocol):
    """Does what methods of an `ObjectStore` do."""

    async def put(self, folder: str, data: bytes, *, suffix: str) -> ObjectRef: ...
    async def get(self, ref: ObjectRef) -> bytes: ...


class SumObjects:
    """Stores this process's part of sums, and reads the matching parts of others."""

    def __init__(self, store: SumStore, layout: SumLayout, *, is_first: bool = True) -> None:
        """``is_first``: whether the tallies are wanted, which the first part has."""
        self._store = store
        self._layout = layout
        self._is_first = is_first

    async def put(self, folder: str, what: Sum, level: Level = "exact") -> SumPart:
        data = await asyncio.to_thread(pack_sum, what, level)
        ref = await again(lambda: self._store.put(folder, data, suffix=".sum.safetensors"))
        return SumPart(ref=ref, ranges=self._layout.held)

    async def get(self, stored: StoredSum) -> Sum:
        """Raises ContractError if it is no sum of this run."""
        own_ranges, tallies = self._layout.held, stored.parts[: self._is_first]
        overlapping = (each for each in stored.parts if any(overlaps(own_ranges, each.ranges)))
        wanted = dict.fromkeys((*tallies, *overlapping))
        parts = await asyncio.gather(*map(self._part, wanted))
        return await asyncio.to_thread(assembled, parts, self._layout)

    async def get_total(self, stored: StoredSum) -> Term:
        """Raises ContractError if it is no total of this run."""
        terms = await self.get(stored)
        if WHOLE_BATCH not in terms:
            raise ContractError("not a total: it holds sums of groups")
        total: Term = terms[WHOLE_BATCH]
        return total

    async def _part(self, part: SumPart) -> tuple[Ranges, Sum]:
        layout = replace(self._layout, ranges=part.ranges)
        data = await again(lambda: self._store.get(part.ref))
        return part.ranges, await asyncio.to_thread(unpack_sum, data, layout)


class StoreExchange:
    def __init__(self, store: ObjectStore, layout: SumLayout, sums: SumStore | None = None) -> None:
        """``sums``: another place for the sums themselves than the store."""
        self._store = store
        self._layout = layout
        self._objects = SumObjects(sums or store, layout)

    @property
    def place(self) -> Place:
        return Place()

    @property
    def sum_bytes(self) -> int:
        return self._layout.num_bytes

    async def total(self, round_: MemberRound, own: Sum) -> Term:
        own = await asyncio.to_thread(self._with_residual, round_, own)
        if not round_.is_committer:
            return await self.exchange_sum(round_, own)
        sums = await self.gathered(round_, own)
        total = await asyncio.to_thread(added, in_order(sums, round_), self._layout)
        await self.give(round_, total)
        return total

    def _with_residual(self, round_: MemberRound, own: Sum) -> Sum:
        """Round the sum of a member other than the committer; in deterministic mode, every sum: the
        update does not depend on who trained a group."""
        message = round_.message
        if round_.by_group:
            return round_terms(own, message.up)
        level = "exact" if round_.is_committer else message.up
        rounding = partial(round_gradient, level=level)
        add = round_.residuals.add
        return {
            key: Term(add(message, each.gradient, rounding), each.tally)
            for key, each in own.items()
        }

    async def local_total(self, round_: MemberRound, sums: Mapping[str, Sum]) -> Term:
        if round_.by_group:
            level = round_.message.up
            sums = {name: round_terms(each, level) for name, each in sums.items()}
        return await asyncio.to_thread(added, in_order(sums, round_), self._layout)

    async def close(self) -> None:
        pass

    async def gathered(self, round_: MemberRound, own: Sum) -> dict[str, Sum]:
        """Return the sums of all members; raises ExchangeIncomplete at the deadline."""
        async with self.limited(round_) as waits_for:
            return {round_.me: own, **await self.others(round_, waits_for, self._objects.get)}

    async def give(self, round_: MemberRound, total: Term) -> None:
        """Store the total for the others; raises ExchangeIncomplete at the deadline."""
        if len(round_.members) > 1:
            async with self.limited(round_):
                await self._offer(round_, TOTAL, {WHOLE_BATCH: total})

    async def exchange_sum(self, round_: MemberRound, own: Sum) -> Term:
        """Store this member's sum and wait for the total; raises ExchangeIncomplete at the
        deadline."""
        async with self.limited(round_) as waits_for:
            if own:
                await self._offer(round_, round_.me, own, round_.message.up)
            waits_for.add(round_.committer)
            terms = await self._objects.get_total(await self.stored(round_, TOTAL))
            return await asyncio.to_thread(added, [terms], self._layout)

    async def others(
        self, round_: MemberRound, waits_for: set[str], get: Callable[[StoredSum], Awaitable[T]]
    ) -> dict[str, T]:
        """Return what ``get`` makes of the sum of each other member, as soon as it is stored."""
        names = [share.worker for share in round_.contributors if share.worker != round_.me]
        waits_for.update(names)

        async def taken(name: str) -> T:
            terms = await get(await self.stored(round_, name))
            waits_for.discard(name)
            return terms

        return dict(zip(names, await asyncio.gather(*map(taken, names)), strict=True))

    async def _offer(
        self, round_: MemberRound, name: str, what: Sum, level: Level = "exact"
    ) -> None:
        folder = batch_folder(round_.run, round_.message.batch)
        part = await self._objects.put(folder, what, level)
        await self.say(round_, name, StoredSum(parts=(part,)))

    async def say(self, round_: MemberRound, name: str, stored: StoredSum) -> None:
        """Publish the location of a sum, or of the total."""
        data = stored.model_dump_json().encode()
        await again(lambda: self._store.write(f"{round_.folder}/{name}.json", data))

    async def stored(self, round_: MemberRound, name: str) -> StoredSum:
        """Return the location of a member's sum, or of the total, once it is published."""
        key = f"{round_.folder}/{name}.json"
        try:
            stored = StoredSum.model_validate_json(await awaited(self._store, key))
        except ValidationError as error:
            raise ContractError(f"{key} names no sum") from error
        if sum(part.ref.size for part in stored.parts) > self._max_bytes(round_, name, stored):
            raise ContractError(f"{key} names a sum that is larger than its gradients")
        return stored

    def _max_bytes(self, round_: MemberRound, name: str, stored: StoredSum) -> int:
        """Return the most bytes of a member's sum, or of the total, without any rounding."""
        pieces = [
            each for share in round_.contributors if share.worker == name for each in share.pieces
        ]
        terms = len({each.group for each in pieces}) if round_.by_group and pieces else 1
        return terms * self._layout.num_bytes + (terms + len(stored.parts)) * HEADER_BYTES

    @contextlib.asynccontextmanager
    async def limited(self, round_: MemberRound) -> AsyncIterator[set[str]]:
        """Limit what is within to the round's deadline; gives a set for the names of members whose
        sums are read. `ExchangeIncomplete` names these if a sum is faulty, and after the deadline
        the members that are absent."""
        waits_for = set[str]()
        try:
            async with asyncio.timeout(round_.seconds):
                yield waits_for
        except TimeoutError:
            absent = await self._absent(round_)
            raise ExchangeIncomplete("the sums were not there in time", absent) from None
        except (ContractError, IntegrityError) as error:
            raise ExchangeIncomplete(str(error), tuple(sorted(waits_for))) from error

    async def _absent(self, round_: MemberRound) -> tuple[str, ...]:
        """Return the other members that have stored nothing of what the round needs of them: their
        sum, or if all of these are there, the total."""
        try:
            async with asyncio.timeout(limits.PRESENCE_S):
                keys = await self._store.keys(round_.folder)
        except (TimeoutError, Unavailable):
            return ()
        stored = {key.rpartition("/")[2].removesuffix(".json") for key in keys}
        needed = {share.worker for share in round_.contributors} - {round_.committer}
        absent = needed - stored or {round_.committer} - {round_.me}
        return tuple(sorted(absent - {round_.me}))


async def awaited(store: ObjectStore, key: str) -> bytes:
    """Return an object as soon as another member has stored it."""
    while (data := await again(lambda: store.read(key))) is None:  # noqa: ASYNC110 -- of objects
        await asyncio.sleep(limits.STORE_EXCHANGE_POLL_S)
    return data


async def again(work: Callable[[], Awaitable[T]]) -> T:
    """Repeat what the store does not answer; the deadline of the round ends it."""
    while True:
        try:
            return await work()
        except Unavailable:
            await asyncio.sleep(limits.STORE_EXCHANGE_POLL_S)
