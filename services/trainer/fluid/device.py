"""A member's device: one network that generates and trains, in threads."""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from services.trainer import limits
from services.trainer.engine.parsed_groups import ParsedGroups
from services.trainer.fluid.engine import FluidEngine, StepScale
from services.trainer.fluid.exchange import WHOLE_BATCH, Sum
from services.trainer.fluid.protocols import TotalMeasure
from services.trainer.fluid.sums import Term
from shared.devices.protocols import GroupData, Snapshot
from shared.devices.slices import GroupSlice
from shared.diffusion.policy import LoadedPolicy
from shared.messages.fluid import Piece
from shared.messages.workers import MemoryShortage
from shared.process.failpoints import reach
from shared.recipe.recipe import Recipe
from shared.run.manifest import StoredTensors


class EngineMember:
    """Implements `FluidDevice`."""

    def __init__(self, recipe: Recipe, loaded: LoadedPolicy) -> None:
        self.engine = FluidEngine(recipe, loaded)
        self._by_group = recipe.trainer.deterministic
        self._window = recipe.sampling.window
        self._groups = ParsedGroups(self.engine.read, limits.MAX_UNPACKED_GROUPS)
        self._terms: dict[int, Term] = {}
        """Holds the gradient of each group in main memory, in deterministic mode."""

    @property
    def steps_concurrently(self) -> bool:
        return self.engine.steps_concurrently

    @property
    def pass_rows(self) -> int:
        return self.engine.chunk.rows

    def weights_digest(self) -> str:
        return self.engine.newest_digest()

    def take(self) -> None:
        self.engine.take_ahead()

    def before(self) -> AbstractContextManager[None]:
        return self.engine.before()

    async def checksum(self) -> str:
        return await asyncio.to_thread(lambda: self.engine.checksum().hex)

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        await self.engine.restore(weights, checkpoint)
        self.begin()

    def begin(self) -> None:
        self.engine.begin()
        self._terms = {}

    async def train(self, group: GroupData, piece: Piece) -> MemoryShortage | None:
        read = await self._groups.read(group)
        last = piece.first_step + piece.num_steps
        part = read.sliced(GroupSlice(piece.samples, first=piece.first_step, end=last))

        def train() -> MemoryShortage | None:
            with self.engine.in_training():
                shortage = self.engine.train(part)
            reach("fluid.trains")  # its gradient is in memory, and nobody knows
            return shortage

        return await asyncio.to_thread(self._train_separately, piece, train)

    async def skip(self, piece: Piece) -> None:
        rows = piece.num_samples * piece.num_steps
        await asyncio.to_thread(self._train_separately, piece, lambda: self.engine.skip_rows(rows))

    def _train_separately(
        self, piece: Piece, train: Callable[[], MemoryShortage | None]
    ) -> MemoryShortage | None:
        """Train a piece; in deterministic mode, keep its gradient apart from all others."""
        if not self._by_group:
            return train()
        self.engine.begin()
        shortage = train()
        term = self.engine.term()
        gradient = None if term.gradient is None else term.gradient.cpu()
        self._terms[piece.group] = Term(gradient, term.tally)
        self.engine.begin()
        return shortage

    async def own_sum(self) -> Sum:
        if self._by_group:
            return dict(self._terms)
        return {WHOLE_BATCH: await asyncio.to_thread(self.engine.term)}

    async def measure(self, total: Term) -> TotalMeasure:
        return await asyncio.to_thread(self._measure, total)

    def _measure(self, total: Term) -> TotalMeasure:
        assert total.gradient is not None
        self.engine.check(total)
        measures = self.engine.measured(total)
        norm = measures.norm if math.isfinite(measures.norm) else None
        return TotalMeasure(self.engine.sum_id(total), norm, measures.scale)

    async def step(self, batch: int, total: Term, measure: TotalMeasure) -> Mapping[str, float]:
        norm = math.nan if measure.norm is None else measure.norm
        given = StepScale(norm, measure.scale, measure.level)
        self._terms = {}
        take = self.engine.take_concurrently if self.steps_concurrently else self.engine.take
        metrics = await asyncio.to_thread(take, batch, total, given)
        self.begin()
        return metrics

    async def weights(self) -> Snapshot:
        return await asyncio.to_thread(self.engine.weights)
