"""One rank of a shard group: what it holds of the member, and its part of what all ranks do at
once.

A group is one member of several processes, which share weights, gradients and optimizer (FSDP2).
The first one is the member for all others of the run (`shard_group`); the rest follow it
(`shard_follower`) and know no broker.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.trainer.engine.world import local_rank, num_ranks, this_rank
from services.trainer.fluid.engine import FluidEngine, StepScale, merged
from services.trainer.fluid.exchange import WHOLE_BATCH, Sum
from services.trainer.fluid.store_exchange import SumObjects
from services.trainer.fluid.sums import StoredSum, SumPart, Term, added
from shared.devices.chunks import Chunk
from shared.devices.slices import GroupSlice
from shared.diffusion.loading.device import fits
from shared.diffusion.policy import load_policy
from shared.diffusion.training.rows import TrainingGroup
from shared.diffusion.weights.sharding import hold_part, hold_whole
from shared.messages.fluid import Piece
from shared.models.memory import ModelPart
from shared.recipe.recipe import Recipe
from shared.run.layout import batch_folder
from shared.run.manifest import StoredTensors
from shared.store import ObjectStore

GATHER_REMEDY = (
    'use GPUs with more memory, or have groups train only: schedule.mode = "disaggregated" and '
    'schedule.tag = "off"'
)
ParameterOrder = Sequence[tuple[str, int]]
"""Members and keys of the terms of a total, in the order in which they are added."""


def model_parts(recipe: Recipe, rank: int) -> set[ModelPart]:
    """Return the parts of the model that a rank holds. The first one encodes prompts for all."""
    if not recipe.run_schedule.trainer_generates:
        return {"transformer"}
    return set(recipe.generating_parts) - (set[ModelPart]() if rank == 0 else {"text"})


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's part of a piece."""

    own: GroupSlice | None
    """Samples that it trains, as many as every other rank; None if there are less than ranks."""
    last: GroupSlice | None
    """One sample more, as every other rank, if the samples cannot be divided evenly."""
    counts: bool
    """Whether the gradient of ``last`` counts here; where it does not, it is multiplied by 0."""


def rank_piece(piece: Piece, rank: int, ranks: int) -> RankPart:
    """Divide the samples of a piece: every pass is taken by all ranks at once."""
    end = piece.first_step + piece.num_steps
    each, rest = divmod(piece.num_samples, ranks)
    first = piece.first_sample + rank * each

    def taken(samples: range) -> GroupSlice | None:
        return GroupSlice(samples, first=piece.first_step, end=end) if samples else None

    after = piece.first_sample + ranks * each + (rank if rank < rest else 0)
    last = taken(range(after, after + 1)) if rest else None
    return RankPart(taken(range(first, first + each)), last, counts=rank < rest)


class Shard:
    def __init__(self, recipe: Recipe, store: ObjectStore) -> None:
        parts = model_parts(recipe, this_rank())
        self.recipe, self.loaded = recipe, load_policy(recipe, parts, local_rank(), trains=True)
        num_samples = max(1, recipe.trained_samples // num_ranks())
        self.engine = FluidEngine(recipe, self.loaded, num_samples=num_samples)
        self.is_sharded = self.engine.is_sharded
        """Whether each rank holds a part of the sum; otherwise the first rank holds all of it."""
        self._by_group = recipe.trainer.deterministic
        self._run = recipe.run.name
        self._objects = SumObjects(store, self.engine.layout, is_first=this_rank() == 0)
        self._terms: dict[int, Term] = {}
        self._sums: dict[int, Sum] = {}
        """Sums that were copied, by their numbers."""
        self.total: Term | None = None
        self._is_whole = False
        """Whether this rank has gathered the entire network."""

    def hold_whole(self) -> None:
        """Gather the network on every rank, unless it is; all ranks do it together."""
        if not self._is_whole:
            with fits(self.loaded.device, "the whole network beside a share of it", GATHER_REMEDY):
                hold_whole(self.loaded.model.transformer)
            self._is_whole = True

    def _hold_part(self) -> None:
        if self._is_whole:
            hold_part(self.loaded.model.transformer)
            self._is_whole = False

    def train(self, group: TrainingGroup, piece: Piece, chunk: Chunk) -> None:
        """Add the gradient of this rank's part of a piece, in chunks that the first rank has
        chosen; only that one measures how long they take."""
        self._hold_part()
        part, measures = rank_piece(piece, this_rank(), num_ranks()), this_rank() == 0
        if self._by_group:
            self.engine.begin()
        if part.own is not None:
            self.engine.train(group.sliced(part.own), None if measures else chunk)
        if part.last is not None:
            with self.engine.counting(part.counts):
                self.engine.train(group.sliced(part.last), Chunk(1, chunk.steps))
        self._keep_group_gradient(piece)

    def skip(self, piece: Piece) -> None:
        """Count the rows of a piece without a gradient."""
        if self._by_group:
            self.engine.begin()
        if this_rank() == 0:
            self.engine.skip_rows(piece.num_samples * piece.num_steps)
        self._keep_group_gradient(piece)

    def _keep_group_gradient(self, piece: Piece) -> None:
        """Keep the gradient of a group apart from all others, in deterministic mode."""
        if self._by_group:
            term = self.engine.term()
            gradient = None if term.gradient is None else term.gradient.cpu()
            self._terms[piece.group] = Term(gradient, term.tally)
            self.engine.begin()

    def begin(self) -> None:
        self.engine.begin()
        self._terms = {}

    def copy_sum(self, number: int, kept: Sequence[int]) -> Sum:
        """Copy the sum under a number, and forget the copies but those that are ``kept``."""
        self._sums = {each: terms for each, terms in self._sums.items() if each in kept}
        terms = dict(self._terms) if self._by_group else {WHOLE_BATCH: self.engine.term()}
        self._sums[number] = terms
        return terms

    def merge(self, number: int, tallies: Sequence[Mapping[int, Mapping[str, float]]]) -> Sum:
        """Add to a sum what happened to the rows of other ranks, by the keys of its terms."""
        merged_terms = {}
        for key, term in self._sums[number].items():
            tally = merged(term.tally, *(of_rank[key] for of_rank in tallies))
            merged_terms[key] = Term(term.gradient, tally.as_dict())
        self._sums[number] = merged_terms
        return merged_terms

    async def put_sum(self, number: int, batch: int) -> SumPart:
        """Store this rank's part of a sum."""
        return await self._objects.put(batch_folder(self._run, batch), self._sums[number])

    async def put_total(self, batch: int) -> SumPart:
        assert self.total is not None
        return await self._objects.put(batch_folder(self._run, batch), {WHOLE_BATCH: self.total})

    async def take_total(self, stored: StoredSum) -> Term:
        """Read this rank's part of a total.

        Raises:
            ContractError: if the object is no total of this run.
        """
        term = await self._objects.get_total(stored)
        self.total = await asyncio.to_thread(added, [term], self.engine.layout)
        return self.total

    async def add(
        self, order: ParameterOrder, own: Mapping[str, int], stored: Mapping[str, StoredSum]
    ) -> Term:
        """Form the total of the sums of all members, as far as this rank holds it.

        Args:
            own: members whose sums were made here, and the numbers of those.
            stored: where the others' are.
        """
        sums = {name: self._sums[number] for name, number in own.items()}
        names = list(stored)
        contents = await asyncio.gather(*(self._objects.get(stored[name]) for name in names))
        sums |= dict(zip(names, contents, strict=True))
        terms = [sums[worker][key] for worker, key in order]
        self.total = await asyncio.to_thread(added, terms, self.engine.layout)
        self._sums = {}
        return self.total

    def measured(self, total: Term) -> StepScale:
        return self.engine.measured(total)

    def sum_id(self, total: Term) -> str:
        return self.engine.sum_id(total)

    def step(self, batch: int, tally: Mapping[str, float], given: StepScale) -> dict[str, float]:
        """Take the step of the total; where the first rank holds all of it, it spreads it."""
        self._hold_part()
        total = self.total if self.total is not None else Term(self.engine.layout.zeros(), tally)
        self._terms, self.total = {}, None
        metrics = self.engine.take(batch, replace(total, tally=tally), given)
        self.begin()
        return metrics

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        self._hold_part()
        await self.engine.restore(weights, checkpoint)
        self.begin()
        self.total = None


def gradient_scale(norm: float | None, scale: float) -> StepScale:
    return StepScale(math.nan if norm is None else norm, scale)
