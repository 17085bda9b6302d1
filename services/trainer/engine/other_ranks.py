"""What the first rank of a trainer has the others do: train slices of groups, and store their part
of a version."""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from services.trainer.engine.follower import (
    KEPT_GROUPS,
    PIECES,
    Link,
    Message,
    slice_values,
)
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData, Half
from shared.devices.slices import GroupSlice
from shared.errors import ContractError, OutOfMemory, Unavailable, Untrainable
from shared.messages.contracts import ObjectRef
from shared.messages.workers import MemoryShortage
from shared.run.manifest import Fetched, StoredParts, StoredTensors, Wanted


@dataclass(frozen=True, slots=True)
class StoringRank:
    """Stores its part of versions in another process, one after the other."""

    link: Link
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def digest(self) -> Message:
        """Return what it answers when it is asked for the digest of its weights."""
        with self._asking:
            return self.link.ask(Message("digest"))

    async def store(self, number: int, half: Half) -> StoredParts:
        """Raises Unavailable if the store does not take it."""
        return await asyncio.to_thread(self._store, {"number": number, "half": half})

    def _store(self, what: dict[str, Any]) -> StoredParts:
        with self._asking:
            answer = self.link.ask(Message("store", what))
        if answer.name != "stored":
            raise Unavailable(answer.values["reason"])
        return StoredParts.model_validate_json(answer.blobs[0])


@dataclass(frozen=True, slots=True)
class SentToAll:
    """Tensors of which every part that is read here is sent to the other ranks."""

    stored: StoredTensors
    of: str
    """What they are: weights, or states."""
    ask_all: Callable[[Message], None]

    @property
    def ref(self) -> ObjectRef:
        return self.stored.ref

    @property
    def weights_digest(self) -> str | None:
        return self.stored.weights_digest

    async def parts(self, wanted: Wanted | None = None) -> AsyncIterator[Fetched]:
        async for part in self.stored.parts(wanted):
            pieces = None if part.pieces is None else dict(part.pieces)
            message = Message("part", {"of": self.of}, (bytes(part.data), PIECES.dump_json(pieces)))
            await asyncio.to_thread(self.ask_all, message)
            yield part


@dataclass(slots=True)
class FollowingRank:
    """Trains slices of groups in another process, as a `TrainingDevice`."""

    link: Link
    first: TrainerEngine
    """Engine of the first rank, which knows how far the batch is."""
    _known: deque[tuple[int, GroupData]] = field(default_factory=lambda: deque(maxlen=KEPT_GROUPS))
    _asked: tuple[Message, GroupData] = field(init=False)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def accumulate(self, group: GroupData, group_slice: GroupSlice) -> MemoryShortage | None:
        return await asyncio.to_thread(self.train, group, group_slice)

    def train(self, group: GroupData, group_slice: GroupSlice) -> MemoryShortage | None:
        """Raises ContractError if the fragments do not make up a group of this run."""
        self.begin(group, group_slice)
        return self.finish()

    def begin(self, group: GroupData, group_slice: GroupSlice, chunk: Chunk | None = None) -> None:
        number, blobs = self._blobs(group)
        values = {
            "group": number,
            "cut": slice_values(group_slice),
            "chunk": chunk and [chunk.samples, chunk.steps],
            "advantages": list(group.advantages),
            "staleness": group.staleness,
            "num_steps": self.first.num_steps,
            "kind": group.kind,
            "limit": group.limit,
        }
        message = Message("train", values, blobs)
        self._asked = (message, group)
        self.link.send(message)

    def finish(self) -> MemoryShortage | None:
        """Receive the answer: what did not fit at first, if anything."""
        answer = self.link.receive()
        if answer.name == "unknown":  # it was refused when its first slice came
            message, group = self._asked
            self.link.send(replace(message, blobs=_blobs_of(group)))
            answer = self.link.receive()
        shortage = raised(answer).values.get("shortage")
        return None if shortage is None else MemoryShortage.model_validate(shortage)

    def _blobs(self, group: GroupData) -> tuple[int, tuple[bytes, ...]]:
        """Return the group's number there, and its content if it is not there yet."""
        for number, known in self._known:
            if known is group:
                return number, ()
        number = next(self._numbers)
        self._known.append((number, group))
        return number, _blobs_of(group)


def answer_of(link: Link) -> Message:
    """Receive what another rank answers, or raise what it says has gone wrong."""
    return raised(link.receive())


def raised(answer: Message) -> Message:
    """Return an answer, unless it says what has gone wrong on its rank, which is raised here."""
    values = answer.values
    if answer.name == "refused":
        raise ContractError(values["reason"])
    if answer.name == "untrainable":
        raise Untrainable(values["reason"])
    if answer.name == "out_of_memory":
        raise OutOfMemory(
            values["reason"], smaller=values["smaller"], what=values["what"],
            remedy=values["remedy"],
        )  # fmt: skip
    return answer


def _blobs_of(group: GroupData) -> tuple[bytes, ...]:
    return (*group.trajectories, group.conditions)
