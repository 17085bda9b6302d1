"""The trainer's devices together: the groups that wait for them, and what each device does next.

A group is trained in slices, a few samples each, which any device may take: groups first in, first
out, and no slice before all of the group before it are taken. So no device waits for another, and
what is ready is divided over all of them.

One device trains whatever is ready before it generates, so that rollout never waits for it. Of
several devices each first finishes the fragments that it has, unbroken, and otherwise trains the
next slice, whatever the others do. Either way a device changes over between two denoising steps at
the latest, and a commit takes all of them.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from services.trainer.devices.device import TrainerDevice
from services.trainer.devices.loan_agent import LoanAgent
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice, num_last_groups, slice_group
from shared.devices.together import HOLD_S
from shared.errors import ContractError, OutOfMemory
from shared.messages.contracts import TrainGroup
from shared.process.worker import Worker


@dataclass(frozen=True, slots=True)
class Outcome:
    """A group that is in the gradient, or why it is not."""

    command: TrainGroup
    device_seconds: float = 0.0
    """Seconds that devices were busy with it, one after the other."""
    error: ContractError | OutOfMemory | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedGroup:
    """A group that waits for devices, or is trained by them."""

    command: TrainGroup
    data: GroupData
    tell: Callable[[Outcome], None]
    """Takes the outcome once the last slice is done; called once."""
    is_last: bool = False
    """Whether it is one of the batch's last groups, which are sliced finely."""
    num_left: int = 0
    """Number of slices that are not done yet."""
    seconds: float = 0.0
    error: ContractError | OutOfMemory | None = None


@dataclass(frozen=True, slots=True)
class QueuedSlice:
    group: QueuedGroup
    group_slice: GroupSlice

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Goes around its training: takes the time, and notes why the group cannot be trained."""
        group, began = self.group, time.monotonic()
        try:
            yield
        except (ContractError, OutOfMemory) as error:
            group.error = error
        self.is_done(time.monotonic() - began)

    def is_done(self, seconds: float) -> None:
        """Count this slice as done, after so many seconds of a device."""
        group = self.group
        group.seconds += seconds
        group.num_left -= 1
        if not group.num_left:
            group.tell(Outcome(group.command, group.seconds, group.error))


class QueuedSlices:
    """First in, first out."""

    def __init__(
        self,
        num_devices: int,
        trained_steps: int,
        trained_samples: int | None = None,
        merged_steps: int = 0,
        *,
        divides_steps: bool = True,
    ) -> None:
        """``trained_samples``: number of samples that are trained of a group; by default all.
        ``merged_steps``: `Sampling.merged_steps`. ``divides_steps``: see `slice_group`."""
        self._num_devices = num_devices
        self._divides_steps = divides_steps
        self._merged_steps = merged_steps
        self._trained_samples = trained_samples
        self._trained_steps = trained_steps
        self._waiting: deque[QueuedSlice] = deque()
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def all_taken(self) -> None:
        """Wait until every slice is taken: what is ready later need not be held in memory."""
        await self._has_room.wait()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, group: QueuedGroup) -> None:
        size = self._trained_samples or len(group.data.advantages)
        slices = slice_group(
            size,
            self._num_devices,
            self._trained_steps,
            is_last=group.is_last,
            merged_steps=self._merged_steps,
            divides_steps=self._divides_steps,
        )
        self._waiting.extend(QueuedSlice(group, each) for each in slices)
        group.num_left += len(slices)
        self._has_room.clear()

    def take(self) -> QueuedSlice | None:
        if not self._waiting:
            return None
        taken = self._waiting.popleft()
        if not self._waiting:
            self._has_room.set()
        return taken

    def hold(self) -> None:
        """Let another group be put beside those that wait."""
        self._has_room.set()

    def clear(self) -> None:
        self._waiting.clear()
        self._has_room.set()


@dataclass(frozen=True, slots=True)
class Held:
    """All devices, which are kept from any other use."""

    _first: contextlib.AsyncExitStack

    def first(self) -> contextlib.AsyncExitStack:
        """Keep the first, whose state is committed, when all others go: until what this returns is
        closed."""
        return self._first.pop_all()


class DevicePool:
    def __init__(
        self,
        devices: Sequence[TrainerDevice],
        worker: Worker,
        agent: LoanAgent | None,
        *,
        trained_steps: int,
        trained_samples: int | None = None,
        merged_steps: int = 0,
        divides_steps: bool = True,
    ) -> None:
        """``agent``: lends the devices; None if they are never lent. ``divides_steps``: whether
        devices may share the trained steps of a sample (`RunSchedule.tsp`)."""
        self._devices = devices
        self._worker = worker
        self._agent = agent
        self._held_since = 0.0
        """When the first of those that wait was put there."""
        self._is_complete = False
        """Whether no other group comes that what is waiting could be trained with."""
        self._slices = QueuedSlices(
            len(devices), trained_steps, trained_samples, merged_steps, divides_steps=divides_steps
        )

    def is_last(self, group_size: int, groups_left: int) -> bool:
        """Return whether a group is sliced finely: ``groups_left`` counts it and those after it."""
        return groups_left <= num_last_groups(group_size, len(self._devices))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for device in self._devices:
                tasks.create_task(device.work(self._act))

    async def train(self, group: QueuedGroup) -> None:
        """Give the devices a group as soon as they have taken all that came before it, or hold it
        back for others (`JoinsGroups`)."""
        await self._slices.all_taken()
        if not len(self._slices):
            self._is_complete, self._held_since = False, time.monotonic()
            asyncio.get_running_loop().call_later(HOLD_S, self._wake)
        self._slices.put(group)
        self._wake()

    def train_all(self) -> None:
        """Hold nothing back of what is waiting: no other group comes for now."""
        self._is_complete = True
        self._wake()

    def _wake(self) -> None:
        for device in self._devices:
            device.wake()

    def drop(self) -> None:
        """Train nothing more of what is waiting. A slice that a device is at goes on."""
        self._slices.clear()

    def _holds_back(self) -> bool:
        """Return whether what is waiting waits for other groups."""
        number = self._devices[0].groups_at_once
        if number == 1 or self._is_complete or len(self._slices) >= number:
            return False
        return time.monotonic() - self._held_since < HOLD_S

    @contextlib.asynccontextmanager
    async def all_held(self) -> AsyncIterator["Held"]:
        """Keep every device for the trainer alone."""
        first, *others = self._devices
        async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as of_first:
            await of_first.enter_async_context(first.held())
            for device in others:
                await stack.enter_async_context(device.held())
            yield Held(of_first)

    async def _act(self, device: TrainerDevice) -> bool:
        """Train one slice, or take one denoising step; False if there is neither to do."""
        agent = self._agent
        generates = agent is not None and agent.may_go_on(device)
        taken = [] if generates and len(self._devices) > 1 else self._take()
        if taken:
            with self._worker.doing("training"):
                await self._train(device, taken)
        elif agent is not None and generates:
            await agent.go_on(device)
        return bool(taken) or generates

    def _take(self) -> list[QueuedSlice]:
        """Take the next slice, or all that are trained together with it."""
        if self._holds_back():
            self._slices.hold()
            return []
        taken = [self._slices.take() for _ in range(self._devices[0].groups_at_once)]
        return [each for each in taken if each is not None]

    async def _train(self, device: TrainerDevice, taken: list[QueuedSlice]) -> None:
        if len(taken) > 1:
            taken = await self._train_together(device, taken)
        for each in taken:
            with each.training():
                shortage = await device.train(each.group.data, each.group_slice)
                self._worker.note_shortage(shortage)

    async def _train_together(
        self, device: TrainerDevice, taken: list[QueuedSlice]
    ) -> list[QueuedSlice]:
        """Train groups in one pass; return those that have to be trained alone: all, to see which
        of them cannot be trained."""
        began = time.monotonic()
        error: OutOfMemory | None = None
        try:
            await device.train_together([each.group.data for each in taken])
        except ContractError:
            return taken
        except OutOfMemory as found:
            error = found
        for each in taken:
            each.group.error = error
            each.is_done((time.monotonic() - began) / len(taken))
        return []
