"""Sums over the object store: for several processes without a fast line between them.

Each member stores its sum; the committer adds them in the order of the shares, and stores the
total, which the others fetch. What is where is said by small objects with fixed keys:

    <run>/batches/<batch>/exchange/<attempt>.<round>/<member>.json     its sum
    <run>/batches/<batch>/exchange/<attempt>.<round>/total.json        the total
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from pydantic import ValidationError

from services.trainer.fluid.exchange import ALL, Meeting, Missed, Sum
from services.trainer.fluid.sums import SumLayout, Term, added, in_order, pack_sum, unpack_sum
from shared.errors import ContractError, IntegrityError, Unavailable
from shared.messages.contracts import ObjectRef
from shared.run.layout import batch_folder
from shared.store import ObjectStore

LOOK_S = 0.05
"""Seconds between two looks for what another member stores."""
TOTAL = "total"

T = TypeVar("T")


class StoreExchange:
    def __init__(self, store: ObjectStore, layout: SumLayout) -> None:
        self._store = store
        self._layout = layout

    @property
    def host(self) -> str:
        return ""

    async def total(self, meeting: Meeting, own: Sum) -> Term:
        if not meeting.is_committer:
            return await self.taken(meeting, own)
        sums = await self.gathered(meeting, own)
        total = await asyncio.to_thread(added, in_order(sums, meeting), self._layout)
        await self.give(meeting, total)
        return total

    async def of_all(self, meeting: Meeting, sums: Mapping[str, Sum]) -> Term:
        return await asyncio.to_thread(added, in_order(sums, meeting), self._layout)

    async def close(self) -> None:
        pass

    async def gathered(self, meeting: Meeting, own: Sum) -> dict[str, Sum]:
        """Return the sums of all members; raises Missed if they are not there in time."""
        async with _until(meeting) as waits_for:
            return {meeting.me: own, **await self._others(meeting, waits_for)}

    async def give(self, meeting: Meeting, total: Term) -> None:
        """Store the total for the others; raises Missed if that does not end in time."""
        if len(meeting.members) > 1:
            async with _until(meeting):
                await self._offer(meeting, TOTAL, {ALL: total})

    async def taken(self, meeting: Meeting, own: Sum) -> Term:
        """Store this member's sum and wait for the total; raises Missed if it does not come in
        time."""
        async with _until(meeting) as waits_for:
            if own:
                await self._offer(meeting, meeting.me, own)
            waits_for.add(meeting.committer)
            found = (await self._taken(meeting, TOTAL))[ALL]
            return await asyncio.to_thread(added, [found], self._layout)

    async def _others(self, meeting: Meeting, waits_for: set[str]) -> dict[str, Sum]:
        names = [share.worker for share in meeting.contributors if share.worker != meeting.me]
        waits_for.update(names)

        async def taken(name: str) -> dict[int, Term]:
            found = await self._taken(meeting, name)
            waits_for.discard(name)
            return found

        return dict(zip(names, await asyncio.gather(*map(taken, names)), strict=True))

    async def _offer(self, meeting: Meeting, name: str, what: Sum) -> None:
        folder = batch_folder(meeting.run, meeting.message.batch)
        data = await asyncio.to_thread(pack_sum, what)
        ref = await _again(lambda: self._store.put(folder, data, suffix=".sum.safetensors"))
        said = ref.model_dump_json().encode()
        await _again(lambda: self._store.write(f"{meeting.folder}/{name}.json", said))

    async def _taken(self, meeting: Meeting, name: str) -> dict[int, Term]:
        key = f"{meeting.folder}/{name}.json"
        said = None
        while said is None:
            said = await _again(lambda: self._store.read(key))
            if said is None:
                await asyncio.sleep(LOOK_S)
        try:
            ref = ObjectRef.model_validate_json(said)
        except ValidationError as error:
            raise ContractError(f"{key} names no object") from error
        data = await _again(lambda: self._store.get(ref))
        return await asyncio.to_thread(unpack_sum, data, self._layout)


@contextlib.asynccontextmanager
async def _until(meeting: Meeting) -> AsyncIterator[set[str]]:
    """Limit what is within to the round's deadline; gives a set for the names of those that are
    waited for, which `Missed` names."""
    waits_for = set[str]()
    try:
        async with asyncio.timeout(meeting.seconds):
            yield waits_for
    except TimeoutError:
        missing = tuple(sorted(waits_for))
        raise Missed("the sums were not there in time", missing) from None
    except (ContractError, IntegrityError) as error:
        raise Missed(str(error), tuple(sorted(waits_for))) from error


async def _again(work: Callable[[], Awaitable[T]]) -> T:
    """Repeat what the store does not answer; the deadline of the round ends it."""
    while True:
        try:
            return await work()
        except Unavailable:
            await asyncio.sleep(LOOK_S)
