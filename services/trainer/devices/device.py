"""One of the trainer's devices: it trains, generates while it is lent, or is held for a commit.

Whoever uses it has its lock; whoever asks first is next. A fragment that it has begun stays with it
however often training comes between.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from shared.devices.conditions import QueuedFragment
from shared.devices.loan import DeviceUse
from shared.devices.protocols import (
    Generated,
    GeneratingDevice,
    Generation,
    GroupData,
    JoinsGroups,
    TrainingDevice,
)
from shared.devices.publisher import FragmentPublisher
from shared.devices.slices import GroupSlice
from shared.messages.contracts import GenerateFragment
from shared.messages.workers import MemoryShortage


@dataclass(frozen=True, slots=True)
class LoanableGenerator:
    """Generates on a trainer's device, and publishes what it has generated."""

    device: GeneratingDevice
    publisher: FragmentPublisher


@dataclass(slots=True, eq=False)
class KeptFragment:
    queued: QueuedFragment
    generation: Generation | None = None

    @property
    def task(self) -> GenerateFragment:
        return self.queued.task


class TrainerDevice:
    def __init__(self, trains: TrainingDevice, generator: LoanableGenerator | None = None) -> None:
        """``generator``: works with the weights that ``trains`` trains; None if never lent."""
        self._trains = trains
        self._generator = generator
        self._lock = asyncio.Lock()
        self._use = DeviceUse()
        self._work_available = asyncio.Event()
        self._fragment: KeptFragment | None = None
        self.is_generating = False
        """Whether it is in the middle of a denoising step, which nobody interrupts."""
        self.step_seconds: float | None = None
        """Duration of the denoising step that `advance` took last; None if it took none."""

    async def work(self, act: Callable[["TrainerDevice"], Awaitable[bool]]) -> None:
        """Call ``act`` with the device held, for ever: until it says False, and after `wake`."""
        while True:
            await self._work_available.wait()
            self._work_available.clear()
            is_at_work = True
            while is_at_work:
                async with self._lock:
                    is_at_work = await act(self)

    def wake(self) -> None:
        """Say that there may be work."""
        self._work_available.set()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep the device from any other use."""
        async with self._lock:
            with self._use.use("training"):
                yield

    async def train(self, group: GroupData, group_slice: GroupSlice) -> MemoryShortage | None:
        """Add the gradient of a slice; return what did not fit at first, if anything. The caller
        holds the device."""
        with self._use.use("training"):
            return await self._trains.accumulate(group, group_slice)

    @property
    def groups_at_once(self) -> int:
        """How many groups had better be trained together."""
        return self._trains.groups_at_once if isinstance(self._trains, JoinsGroups) else 1

    async def train_together(self, groups: Sequence[GroupData]) -> None:
        """Add the gradients of whole groups. The caller holds the device."""
        assert isinstance(self._trains, JoinsGroups)
        with self._use.use("training"):
            await self._trains.accumulate_together(groups)

    @property
    def publisher(self) -> FragmentPublisher:
        return self._loanable.publisher

    @property
    def queued(self) -> QueuedFragment | None:
        """The fragment that it has, whether it is begun or not."""
        return None if self._fragment is None else self._fragment.queued

    @property
    def task(self) -> GenerateFragment | None:
        return None if self._fragment is None else self._fragment.task

    @property
    def has_begun(self) -> bool:
        return self._fragment is not None and self._fragment.generation is not None

    def assign(self, queued: QueuedFragment) -> QueuedFragment:
        self._fragment = KeptFragment(queued)
        return queued

    def drop(self, task: GenerateFragment) -> bool:
        """Let a fragment go; False if the device does not have it any more."""
        if self.task is not task:
            return False
        self._fragment = None
        return True

    async def advance(self) -> Generated | None:
        """Begin the fragment, take one denoising step of it, or decode it, which returns the
        result. The caller holds the device, for no more than that."""
        assert self._fragment is not None
        self.step_seconds = None
        self.is_generating = True
        try:
            with self._use.use("generation"):
                return await self._advanced(self._fragment, self._loanable)
        finally:
            self.is_generating = False

    async def _advanced(
        self, fragment: KeptFragment, generator: LoanableGenerator
    ) -> Generated | None:
        work = fragment.generation
        if work is None:
            given, source = fragment.queued.conditions, fragment.queued.source
            fragment.generation = await generator.device.begin(
                fragment.task, None if given is None else given.packed, source
            )
            return None
        if work.done:
            return await work.finish()
        before = work.seconds
        await work.advance()
        self.step_seconds = work.seconds - before
        if not before:  # all devices are at work by now
            generator.publisher.prepare(fragment.task)
        return None

    @property
    def _loanable(self) -> LoanableGenerator:
        assert self._generator is not None
        return self._generator
