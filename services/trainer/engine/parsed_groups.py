"""Unpacks the groups that a device trains pieces of."""

import asyncio
from collections import deque
from collections.abc import Callable

from shared.devices.protocols import GroupData
from shared.diffusion.training.rows import TrainingGroup


class ParsedGroups:
    """Unpacks each group once, however many pieces of it are trained."""

    def __init__(self, read: Callable[[GroupData], TrainingGroup], size: int) -> None:
        self._read = read
        self._recent: deque[tuple[GroupData, asyncio.Task[TrainingGroup]]] = deque(maxlen=size)

    async def read(self, group: GroupData) -> TrainingGroup:
        """Raises ContractError if the fragments do not make up a group of this run."""
        for parsed_group, reading in self._recent:
            if parsed_group is group:  # comparing the bytes would take as long as reading them
                return await reading
        reading = asyncio.create_task(asyncio.to_thread(self._read, group))
        self._recent.append((group, reading))
        return await reading
