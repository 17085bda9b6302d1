"""Trains on several processes that torchrun has started; this is the first one.

Replicated, every rank has all weights and takes slices of groups on its own, and they meet once per
batch, to sum their gradients; then each takes the same optimizer step. Sharded, all ranks together
are one device: each trains its part of the samples of every group, in passes that are taken at the
same time.
"""

import asyncio
import itertools
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Thread
from typing import Any, TypeVar, cast

import torch

from services.trainer.engine.follower import (
    KEPT_GROUPS,
    PIECES,
    Link,
    Links,
    Message,
    join,
    load_engine,
    slice_values,
)
from services.trainer.engine.snapshot import EngineCopy
from services.trainer.engine.threads import TrainingOnThreads
from services.trainer.engine.trainer_engine import (
    CACHED_GROUPS,
    EngineDevice,
    ParsedGroups,
    TrainerEngine,
)
from services.trainer.engine.world import local_rank, num_ranks
from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData, Half, Snapshot, TrainingDevice
from shared.devices.slices import GroupSlice
from shared.errors import (
    ContractError,
    IntegrityError,
    OutOfMemory,
    RanksLost,
    Unavailable,
    Untrainable,
    UserError,
)
from shared.messages.contracts import ObjectRef
from shared.messages.workers import MemoryShortage
from shared.recipe.recipe import Recipe
from shared.run.manifest import Fetched, StoredParts, StoredTensors, Wanted


class RankedTraining(TrainingOnThreads):
    def __init__(self, recipe: Recipe, engine: TrainerEngine, links: Sequence[Links]) -> None:
        """``engine``: this rank's. ``links``: to each of the others, which follow."""
        super().__init__(recipe, engine)
        self._links = [each.training for each in links]
        self._storing = [StoringRank(each.storing) for each in links]
        self._numbers = itertools.count()
        self._groups = ParsedGroups(engine.read, CACHED_GROUPS)
        mine = EngineDevice(engine, self._groups)
        others = [FollowingRank(link, engine) for link in self._links]
        self.devices: tuple[TrainingDevice, ...] = (mine, *others)
        if recipe.trainer.sharded:
            self.devices = (ShardedRanks(engine, self._groups, others),)
        self._digest = ""

    def weights_digest(self) -> str:
        return self._digest

    def begin(self) -> None:
        """The other ranks begin with the step, or the weights, that came before."""
        super().begin()
        self._groups.forget()

    def end(self) -> None:
        """Let the other ranks go."""
        for link in (*(each.link for each in self._storing), *self._links):
            link.send(Message("end"))

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        """Whole weights are read by this rank, for all; of sharded ones every rank reads its own
        part."""
        if self._first.is_sharded:
            refs = {"weights": weights.ref.model_dump(), "checkpoint": checkpoint.ref.model_dump()}
            await self._read_sharded(refs, self._first.restore(weights, checkpoint))
        else:
            await asyncio.to_thread(self._ask_all, Message("restore"))
            await self._first.restore(
                SentToAll(weights, "weights", self._ask_all),
                SentToAll(checkpoint, "states", self._ask_all),
            )
        await asyncio.to_thread(self._restored)

    async def replace(self, weights: StoredTensors, sampling: StoredTensors | None) -> None:
        """Put other committed weights in the place of those in use, on all ranks.

        Raises:
            IntegrityError: if they are of other weights, or not in the store.
        """
        if self._first.is_sharded:
            assert sampling is None, "the recipe has been checked"
            refs = {"weights": weights.ref.model_dump()}
            await self._read_sharded(refs, self._first.replace(weights, None))
        else:
            await asyncio.to_thread(self._ask_all, Message("replace"))
            await self._first.replace(
                SentToAll(weights, "weights", self._ask_all),
                None if sampling is None else SentToAll(sampling, "sampling", self._ask_all),
            )
        await asyncio.to_thread(self._restored)

    async def _read_sharded(self, refs: dict[str, Any], reading: Awaitable[None]) -> None:
        self._send_all(Message("read", refs))
        try:
            await reading
        finally:  # or they would be in the way of the next attempt
            answers = await asyncio.to_thread(self._receive_all)
        for answer in answers:
            if answer.name != "read":
                raise IntegrityError(answer.values["reason"])

    def _restored(self) -> None:
        self._send_all(Message("restored"))
        self._digest = self._first.weights_digest()
        self._check_digests(self._receive_all())
        self._note_held(self._first)

    def _step(self, batch: int, scale: float) -> dict[str, float]:
        self._remote.into(self._first)
        for link in self._links:
            self._first.add({}, link.ask(Message("tally")).values)
        self._first.check_rows()  # before the others wait for this rank's gradient
        values = {"batch": batch, "scale": scale, "num_steps": self._first.num_steps}
        self._send_all(Message("step", values))
        metrics = together(
            lambda: self._first.step(batch, scale),
            others=[partial(answer_of, link) for link in self._links],
        )
        self._note_held(self._first)
        return metrics

    def _copy(self, states: bool, kept: bool) -> Callable[[], Awaitable[Snapshot]]:
        if not self._first.is_sharded:
            return partial(self._of_all, self._first.copy(states=states, kept=kept))
        number = next(self._numbers)
        self._send_all(Message("copy", {"number": number, "states": states, "kept": kept}))
        snapshot = self._first.copy(states=states, kept=kept).snapshot()
        self._digest = snapshot.digest
        self._check_digests(self._receive_all())
        return partial(self._shared, snapshot, number)

    async def _shared(self, snapshot: Snapshot, number: int) -> Snapshot:
        return replace(snapshot, elsewhere=[partial(each.store, number) for each in self._storing])

    async def _of_all(self, copied: EngineCopy) -> Snapshot:
        """Take the digest of whole weights, and compare it with those that the others take of
        theirs, beside what they train."""
        asking = asyncio.gather(*(asyncio.to_thread(each.digest) for each in self._storing))
        snapshot = await self._taken(copied)
        self._digest = snapshot.digest
        self._check_digests(await asking)
        return snapshot

    def _send_all(self, message: Message) -> None:
        for link in self._links:
            link.send(message)

    def _receive_all(self) -> list[Message]:
        return [link.receive() for link in self._links]

    def _ask_all(self, message: Message) -> None:
        self._send_all(message)
        self._receive_all()

    def _check_digests(self, answers: Sequence[Message]) -> None:
        for answer in answers:
            theirs = answer.values["digest"]
            if theirs != self._digest:
                raise IntegrityError(f"ranks hold weights {self._digest[:12]} and {theirs[:12]}")


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


T = TypeVar("T")


def together(mine: Callable[[], T], *, others: Sequence[Callable[[], object]]) -> T:
    """Does this rank's part of what all ranks do at once, while ``others`` wait for their answers;
    returns what ``mine`` does.

    A rank that has no memory for its part leaves the rest waiting for it, in exchanges that nothing
    interrupts. So each part has a thread of its own, which ends with this process at the latest.

    Raises:
        RanksLost: as soon as one rank says so.
        RuntimeError: if the network cannot take the tensors of a group, on any rank.
    """
    done: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def do(number: int, part: Callable[[], Any]) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank())  # a thread begins with the first GPU
        try:
            done.put((number, part(), None))
        except BaseException as error:
            done.put((number, None, error))

    parts = [mine, *others]
    for number, part in enumerate(parts):
        Thread(target=do, args=(number, part), daemon=True).start()
    results = dict[int, T | None]()
    for _ in parts:
        number, result, error = done.get()
        if error is not None:
            raise _as_lost(error, number)
        results[number] = result
    return cast(T, results[0])


def _as_lost(error: BaseException, rank: int) -> BaseException:
    """Returns what an error of one rank means for all of them."""
    if isinstance(error, OutOfMemory):
        return RanksLost(f"{error} (on rank {rank})")
    # It took part of the group already, as the others did: all begin again.
    return RuntimeError(str(error)) if isinstance(error, Untrainable) else error


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


@dataclass(frozen=True, slots=True)
class ShardedRanks:
    """Trains on all ranks together, each with a shard of the weights, as one `TrainingDevice`."""

    engine: TrainerEngine
    groups: ParsedGroups
    others: Sequence[FollowingRank]

    async def accumulate(self, group: GroupData, group_slice: GroupSlice) -> None:
        read = await self.groups.read(group)  # what is faulty is found before anybody begins
        mine, *theirs = shares(group_slice, 1 + len(self.others))

        def train() -> None:
            chunk = self.engine.chunk
            for rank, share in zip(self.others, theirs, strict=True):
                rank.begin(group, share, chunk)
            together(
                lambda: self.engine.train(read.sliced(mine), kind=group.kind),
                others=[rank.finish for rank in self.others],
            )

        await asyncio.to_thread(train)


def shares(group_slice: GroupSlice, num_ranks: int) -> list[GroupSlice]:
    """Give each rank the same number of samples, as every pass is taken by all ranks."""
    size, rest = divmod(len(group_slice.samples), num_ranks)
    assert not rest, "the recipe has been checked"
    first = group_slice.samples.start
    starts = [first + rank * size for rank in range(num_ranks)]
    return [replace(group_slice, samples=range(start, start + size)) for start in starts]


def start_ranks(recipe: Recipe) -> RankedTraining:
    """Meet the other ranks, tell them the recipe, and load this one's weights.

    Raises:
        UserError: if torchrun has started another number of them than the recipe says.
    """
    if num_ranks() != recipe.trainer.ranks:
        raise UserError(
            f"trainer.ranks: {recipe.trainer.ranks}, but this trainer was started as "
            f"{num_ranks()}; start it with torchrun --nproc-per-node {recipe.trainer.ranks}"
        )
    links = join()
    for each in links:
        each.training.send(Message("begin", blobs=(recipe.model_dump_json().encode(),)))
    return RankedTraining(recipe, load_engine(recipe), links)
