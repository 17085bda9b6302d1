"""The trainer's devices as lanes, and the groups that wait for them.

A group is trained in pieces, a few samples each, which any lane may take: groups first in, first
out, and no piece before all of the group before it are taken. So no lane waits for another.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.devices.loan import DeviceUse
from shared.devices.protocols import GeneratingDevice, Generation, GroupData, TrainingDevice
from shared.devices.publisher import FragmentPublisher
from shared.devices.slices import GroupSlice, slice_group
from shared.errors import ContractError, OutOfMemory
from shared.messages.contracts import GenerateFragment, TrainGroup


@dataclass(frozen=True, slots=True)
class Generates:
    """What a lane needs to be lent."""

    device: GeneratingDevice
    publisher: FragmentPublisher


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """One device, and the fragment that it is at."""

    trains: TrainingDevice
    generates: Generates | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Training, generation and commits take turns; whoever asks first is next."""
    use: DeviceUse = field(default_factory=DeviceUse)
    something: asyncio.Event = field(default_factory=asyncio.Event)
    """There may be something to do."""
    task: GenerateFragment | None = None
    """Kept until it is finished or given back, however often training comes between."""
    begun: Generation | None = None
    is_generating: bool = False
    """In the middle of a denoising step, of which nobody calls it back."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A group that is in the gradient, or why it is not."""

    command: TrainGroup
    device_seconds: float = 0.0
    """That devices were busy with it, one after the other."""
    error: ContractError | OutOfMemory | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedGroup:
    """A group on its way through the lanes."""

    command: TrainGroup
    data: GroupData
    tell: Callable[[Outcome], None]
    """Called once, when its last piece is done."""
    is_last: bool = False
    """Of the batch's last groups, which are cut fine."""
    num_left: int = 0
    """Pieces that are not done yet."""
    seconds: float = 0.0
    error: ContractError | OutOfMemory | None = None


@dataclass(frozen=True, slots=True)
class QueuedSlice:
    group: QueuedGroup
    group_slice: GroupSlice

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around its training: takes the time, and notes why the group cannot be trained."""
        group, began = self.group, time.monotonic()
        try:
            yield
        except (ContractError, OutOfMemory) as error:
            group.error = error
        group.seconds += time.monotonic() - began
        group.num_left -= 1
        if not group.num_left:
            group.tell(Outcome(group.command, group.seconds, group.error))


class QueuedSlices:
    """First in, first out."""

    def __init__(self, num_devices: int, trained_steps: int) -> None:
        self._num_devices = num_devices
        self._trained_steps = trained_steps
        self._waiting: deque[QueuedSlice] = deque()
        self._none_left = asyncio.Event()
        self._none_left.set()

    async def room(self) -> None:
        """Until every piece is taken: whatever else is ready need not be held in memory."""
        await self._none_left.wait()

    def put(self, group: QueuedGroup) -> None:
        size = len(group.data.advantages)
        for group_slice in slice_group(
            size, self._num_devices, self._trained_steps, is_last=group.is_last
        ):
            self._waiting.append(QueuedSlice(group, group_slice))
            group.num_left += 1
        self._none_left.clear()

    def take(self) -> QueuedSlice | None:
        if not self._waiting:
            return None
        piece = self._waiting.popleft()
        if not self._waiting:
            self._none_left.set()
        return piece

    def clear(self) -> None:
        self._waiting.clear()
        self._none_left.set()
