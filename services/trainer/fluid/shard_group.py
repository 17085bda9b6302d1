"""A shard group as one member. Its first rank follows the scheduler's messages, and makes the other
ranks do the same work at the same time."""

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from services.trainer import limits
from services.trainer.engine.parsed_groups import ParsedGroups
from services.trainer.fluid.exchange import Sum
from services.trainer.fluid.links import Message, RankLink, RankLinks
from services.trainer.fluid.other_ranks import StoringRank, receive_answer, together
from services.trainer.fluid.protocols import TotalMeasure
from services.trainer.fluid.shard import ParameterOrder, Shard, gradient_scale
from services.trainer.fluid.sums import StoredSum, SumPart, Term
from shared.devices.protocols import GroupData, Snapshot
from shared.messages.fluid import Piece
from shared.messages.workers import MemoryShortage
from shared.process.failpoints import reach
from shared.run.manifest import StoredTensors

T = TypeVar("T")


class RankSum(dict[int, Term]):
    """A numbered sum with a part on every rank, kept until it is released."""

    def __init__(self, terms: Mapping[int, Term], number: int) -> None:
        super().__init__(terms)
        self.number = number


class ShardGroup:
    """Implements `FluidDevice`, and holds sums for `ShardExchange`."""

    def __init__(self, shard: Shard, links: Sequence[RankLinks]) -> None:
        self._shard = shard
        self._links = [each.training for each in links]
        self._storing = [StoringRank(each.storing) for each in links]
        self._one_at_a_time = threading.Lock()
        self._groups = ParsedGroups(shard.engine.read, limits.MAX_SENT_GROUPS)
        self._sent: list[tuple[int, GroupData]] = []
        """Groups that the other ranks have."""
        self._numbers = itertools.count()
        self._sums: weakref.WeakValueDictionary[int, RankSum] = weakref.WeakValueDictionary()
        self._is_new = False
        """Whether the next piece begins a new sum."""

    steps_concurrently = False

    @property
    def pass_rows(self) -> int:
        return self._shard.engine.chunk.rows

    def weights_digest(self) -> str:
        return self._all("digest", self._shard.engine.newest_digest)

    def take(self) -> None:
        raise AssertionError("a group steps in place")

    def before(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def checksum(self) -> str:
        return (await self._do("checksum", self._shard.engine.checksum)).hex

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        refs = {"weights": weights.ref.model_dump(), "checkpoint": checkpoint.ref.model_dump()}
        read = self._shard.restore(weights, checkpoint)
        await self._do("restore", lambda: asyncio.run(read), refs)

    def begin(self) -> None:
        """Empty the sum; the other ranks do so with their next command."""
        self._is_new = True

    async def train(self, group: GroupData, piece: Piece) -> MemoryShortage | None:
        read = await self._groups.read(group)  # what is faulty is found before anybody begins
        number, blobs = self._number_of(group)
        chunk = self._shard.engine.chunk
        values = {
            "group": number, "piece": piece.model_dump(), "chunk": [chunk.samples, chunk.steps],
            "advantages": list(group.advantages), "staleness": group.staleness,
        }  # fmt: skip
        train = partial(self._shard.train, read, piece, chunk)
        await self._added("train", train, values, blobs)
        reach("fluid.trains")  # its gradient is in memory, and nobody knows
        return None

    async def skip(self, piece: Piece) -> None:
        skip = partial(self._shard.skip, piece)
        await self._added("skip", skip, {"piece": piece.model_dump()})

    async def _added(
        self, name: str, work: Callable[[], T], values: Mapping[str, Any],
        blobs: Sequence[bytes] = (), answers: list[Message] | None = None,
    ) -> T:  # fmt: skip
        """Have all ranks add to the sum, and empty it before if requested."""
        is_new, self._is_new = self._is_new, False

        def add() -> T:
            if is_new:
                self._shard.begin()
            return work()

        return await self._do(name, add, {**values, "is_new": is_new}, blobs, answers)

    async def own_sum(self) -> Sum:
        number, kept = next(self._numbers), sorted(self._sums)
        values = {"number": number, "kept": kept}
        copy, answers = partial(self._shard.copy_sum, number, kept), list[Message]()
        await self._added("copy_sum", copy, values, answers=answers)
        tallies = [dict(each.values["tallies"]) for each in answers]
        rank_sum = RankSum(self._shard.merge(number, tallies), number)
        self._sums[number] = rank_sum
        return rank_sum

    async def measure(self, total: Term) -> TotalMeasure:
        shard = self._shard
        shard.engine.check(total)

        def measure() -> TotalMeasure:
            measures = shard.measured(total)
            norm = measures.norm if measures.norm == measures.norm else None
            return TotalMeasure(shard.sum_id(total), norm, measures.scale)

        if not shard.is_sharded:  # the first rank holds all of it
            return await asyncio.to_thread(measure)
        return await self._do("measure", measure, {"tally": dict(total.tally)})

    async def step(self, batch: int, total: Term, measure: TotalMeasure) -> Mapping[str, float]:
        shard, given = self._shard, gradient_scale(measure.norm, measure.scale)
        shard.total = total
        tally = dict(total.tally)
        values = {
            "batch": batch, "tally": tally, "norm": measure.norm, "scale": measure.scale,
        }  # fmt: skip
        self._is_new = True
        return await self._do("step", partial(shard.step, batch, tally, given), values)

    async def weights(self) -> Snapshot:
        number = next(self._numbers)
        snapshot = await self._do("weights", self._shard.engine.weights, {"number": number})
        if not self._shard.is_sharded:
            return snapshot
        return replace(snapshot, elsewhere=[partial(each.store, number) for each in self._storing])

    async def put_sum(self, own: Sum, batch: int) -> StoredSum:
        """Store a sum of this group, each rank its part."""
        assert isinstance(own, RankSum)
        put = partial(self._shard.put_sum, own.number, batch)
        return await self._put("put_sum", put, {"number": own.number, "batch": batch})

    async def put_total(self, batch: int) -> StoredSum:
        """Store the newest total, each rank its part."""
        return await self._put("put_total", partial(self._shard.put_total, batch), {"batch": batch})

    async def _put(
        self, name: str, put: Callable[[], Coroutine[Any, Any, SumPart]], values: Mapping[str, Any]
    ) -> StoredSum:
        answers: list[Message] = []
        mine = await self._do(name, lambda: asyncio.run(put()), values, answers=answers)
        others = (SumPart.model_validate_json(each.blobs[0]) for each in answers)
        return StoredSum(parts=(mine, *(each for each in others if each.ranges)))

    async def take_total(self, stored: StoredSum) -> Term:
        """Have each rank read its part of a total that another member has formed."""
        take = self._shard.take_total(stored)
        values = {"stored": stored.model_dump_json()}
        return await self._do("take_total", lambda: asyncio.run(take), values)

    async def add(
        self, order: ParameterOrder, own: Mapping[str, Sum], stored: Mapping[str, StoredSum]
    ) -> Term:
        """Form a total; ``own``: sums that were made here, by the member that they count for."""
        numbers = {name: each.number for name, each in own.items() if isinstance(each, RankSum)}
        assert len(numbers) == len(own)
        references = {name: each.model_dump_json() for name, each in stored.items()}
        adding = self._shard.add(order, numbers, stored)
        values = {"order": [list(each) for each in order], "own": numbers, "stored": references}
        return await self._do("add", lambda: asyncio.run(adding), values)

    def end(self) -> None:
        """Let the other ranks go."""
        for link in (*(each.link for each in self._storing), *self._links):
            link.send(Message("end"))

    def _number_of(self, group: GroupData) -> tuple[int, tuple[bytes, ...]]:
        """Return the group's number on the other ranks, and its content if they do not have it."""
        for number, sent_group in self._sent:
            if sent_group is group:
                return number, ()
        number = next(self._numbers)
        self._sent = [*self._sent, (number, group)][-limits.MAX_SENT_GROUPS :]
        return number, (*group.trajectories, group.conditions)

    async def each(self, message: Message, mine: Callable[[], Message]) -> list[Message]:
        """Send a message to all other ranks; return the answers of all ranks, in their order."""
        others: list[Message] = []
        first = await self._do(message.name, mine, message.values, message.blobs, others)
        return [first, *others]

    async def _do(
        self, name: str, mine: Callable[[], T], values: Mapping[str, Any] | None = None,
        blobs: Sequence[bytes] = (), answers: list[Message] | None = None,
    ) -> T:  # fmt: skip
        return await asyncio.to_thread(self._all, name, mine, values, blobs, answers)

    def _all(
        self, name: str, mine: Callable[[], T], values: Mapping[str, Any] | None = None,
        blobs: Sequence[bytes] = (), answers: list[Message] | None = None,
    ) -> T:  # fmt: skip
        """Do something here while the other ranks do it, and return what came out here.

        Raises:
            RanksLost: if a rank cannot do it.
            RuntimeError: if a rank is gone.
        """
        with self._one_at_a_time:
            for link in self._links:
                link.send(Message(name, values or {}, blobs))
            answers_by_rank: dict[int, Message] = {}

            def receive(rank: int, link: RankLink) -> None:
                answers_by_rank[rank] = receive_answer(link)

            others = [partial(receive, rank, link) for rank, link in enumerate(self._links)]
            result = together(mine, others=others)
            if answers is not None:
                answers += [answers_by_rank[rank] for rank in sorted(answers_by_rank)]
            return result
