"""Trains on a network of this process, in threads, as one of the trainer's devices."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.diffusion.training.rows import TrainingGroup
from shared.messages.workers import MemoryShortage

CACHED_GROUPS = 2
"""Groups are trained one after the other: at most two at the same time, one just begun."""


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """Trains slices of groups in a thread: the `TrainingDevice` of a network in this process."""

    engine: TrainerEngine
    groups: "ParsedGroups"

    async def accumulate(self, group: GroupData, group_slice: GroupSlice) -> MemoryShortage | None:
        read = await self.groups.read(group)
        part = read.sliced(group_slice)
        return await asyncio.to_thread(self.engine.train, part, kind=group.kind)

    @property
    def groups_at_once(self) -> int:
        return self.engine.groups_at_once

    async def accumulate_together(self, groups: Sequence[GroupData]) -> None:
        read = [await self.groups.read(group) for group in groups]
        for kind in dict.fromkeys(group.kind for group in groups):
            alike = [part for part, given in zip(read, groups, strict=True) if given.kind == kind]
            await asyncio.to_thread(self.engine.train_together, alike, kind)


class ParsedGroups:
    """Unpacks each group once, however many devices train slices of it."""

    def __init__(self, read: Callable[[GroupData], TrainingGroup], size: int) -> None:
        self._read = read
        self._recent: deque[tuple[GroupData, asyncio.Task[TrainingGroup]]] = deque(maxlen=size)

    async def read(self, group: GroupData) -> TrainingGroup:
        """Raises ContractError if the fragments do not make up a group of this run."""
        for known, reading in self._recent:
            if known is group:  # comparing the bytes would take as long as reading them
                return await reading
        reading = asyncio.create_task(asyncio.to_thread(self._read, group))
        self._recent.append((group, reading))
        return await reading

    def forget(self) -> None:
        self._recent.clear()
