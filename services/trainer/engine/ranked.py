"""Trains on several processes that torchrun has started; this is the first one.

Replicated, every rank has all weights and takes slices of groups on its own, and they meet once per
batch, to sum their gradients; then each takes the same optimizer step. Sharded, all ranks together
are one device: each trains its part of the samples of every group, in passes that are taken at the
same time.
"""

import asyncio
import itertools
import queue
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import Any, TypeVar, cast

import torch

from services.trainer.engine.engine_device import CACHED_GROUPS, EngineDevice, ParsedGroups
from services.trainer.engine.follower import Links, Message, join, load_engine
from services.trainer.engine.other_ranks import FollowingRank, SentToAll, StoringRank, answer_of
from services.trainer.engine.snapshot import EngineCopy
from services.trainer.engine.threads import TrainingOnThreads
from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.engine.world import local_rank, num_ranks
from shared.devices.protocols import GroupData, Snapshot, TrainingDevice
from shared.devices.slices import GroupSlice
from shared.errors import IntegrityError, OutOfMemory, RanksLost, Untrainable, UserError
from shared.recipe.recipe import Recipe
from shared.run.manifest import StoredTensors


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
        for link in self._links:
            self._first.add({}, link.ask(Message("tally")).values)
        self._first.check_rows()  # before the others wait for this rank's gradient
        kept = self._first.take_kept_factor()  # of the rows of all ranks
        values = {"batch": batch, "scale": scale, "kept": kept, "num_steps": self._first.num_steps}
        self._send_all(Message("step", values))
        metrics = together(
            lambda: self._first.step(batch, scale, kept),
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


def torchrun_of(recipe: Recipe) -> str:
    """Return how many processes torchrun is to start, on each host, as its options say it."""
    trainer = recipe.trainer
    if trainer.hosts == 1:
        return f"torchrun --nproc-per-node {trainer.ranks}"
    each, more = divmod(trainer.ranks, trainer.hosts)
    numbers = f"{each} or {each + 1}" if more else str(each)
    return f"torchrun --nnodes {trainer.hosts} --nproc-per-node {numbers}"


def start_ranks(recipe: Recipe) -> RankedTraining:
    """Meet the other ranks, tell them the recipe, and load this one's weights.

    Raises:
        UserError: if torchrun has started another number of them than the recipe says.
    """
    if num_ranks() != recipe.trainer.ranks:
        raise UserError(
            f"trainer.devices: {recipe.trainer.ranks}, a process each, but this trainer was "
            f"started as {num_ranks()}; start it with {torchrun_of(recipe)}"
        )
    links = join()
    for each in links:
        each.training.send(Message("begin", blobs=(recipe.model_dump_json().encode(),)))
    return RankedTraining(recipe, load_engine(recipe), links)
