"""A trainer's devices, without torch, that only note what they are told to do."""

import asyncio
import contextlib
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from fractions import Fraction

from bench.cluster.blobs import BytesPart, joined
from shared.devices.protocols import Generated, GroupData, SamplingWeights, Snapshot
from shared.devices.slices import GroupSlice
from shared.errors import ContractError, DigenRLError, IntegrityError
from shared.messages.contracts import GenerateFragment
from shared.run.manifest import StoredTensors

SIZE = 4
"""Samples of a group."""


def digest_of(adapter: bytes) -> str:
    return hashlib.sha256(adapter).hexdigest()


def slice_name(group_slice: GroupSlice) -> str:
    """0-3 for whole samples, 2.0/3 for the first third of the steps of sample 2."""
    first, last = group_slice.samples.start, group_slice.samples.stop - 1
    return (
        f"{first}-{last}"
        if group_slice.num_parts == 1
        else f"{first}.{group_slice.part}/{group_slice.num_parts}"
    )


@dataclass
class FakeDevice:
    """Trains and generates; both are noted in the order in which they begin and end."""

    name: str
    training: "FakeTraining"
    free: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to let the device finish: until then everything takes for ever."""
    used_for: str | None = None
    given: list[bytes | None] = field(default_factory=list)
    """Conditions that its fragments were begun with."""

    async def accumulate(self, group: GroupData, group_slice: GroupSlice) -> None:
        name = group.trajectories[0].decode()
        if name == "no group":
            raise ContractError("not a trajectory")
        kind = f" {group.kind}" if group.kind else ""
        async with self.busy(f"train {name} {slice_name(group_slice)}{kind}"):
            self.training.advantages[name, group.kind] = group.advantages
            if group.kind == "excess":
                return
            for sample in group_slice.samples:
                self.training.counted[name, sample] += Fraction(1, group_slice.num_parts)

    @contextlib.asynccontextmanager
    async def busy(self, what: str) -> AsyncIterator[None]:
        assert self.used_for is None, f"{self.name}: {what} beside {self.used_for}"
        self.used_for = what
        self.training.log.append(f"{self.name} {what}")
        await asyncio.sleep(0.001)
        await self.free.wait()
        yield
        self.used_for = None

    def weights_digest(self) -> str:
        return self.training.weights_digest()

    async def begin(
        self,
        task: GenerateFragment,
        conditions: bytes | None = None,
        source: bytes | None = None,
    ) -> "FakeGeneration":
        self.given.append(conditions)
        return FakeGeneration(self, task, self.weights_digest())

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        return prompt.encode()


@dataclass
class FakeGeneration:
    device: FakeDevice
    task: GenerateFragment
    digest: str
    steps_left: int = 3
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return not self.steps_left

    async def advance(self) -> None:
        if self.device.weights_digest() != self.digest:
            raise IntegrityError("other weights")
        async with self.device.busy(f"step {self.task.fragment.group}"):
            self.steps_left -= 1
            self.seconds += 0.1

    async def finish(self) -> Generated:
        return Generated(b"path", b"media", self.digest, self.seconds)


class FakeTraining:
    """Its weights are what was trained into them, written out."""

    def __init__(self, num_devices: int) -> None:
        self.log: list[str] = []
        self.counted: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
        """Of each sample, how much of its gradient."""
        self.advantages: dict[tuple[str, str | None], tuple[float, ...]] = {}
        """What each group was trained by, and what they were said to be."""
        self.scales: list[float] = []
        """Of the optimizer steps."""
        self.num_skipped = 0
        self.adapter = b"fresh"
        self.old: bytes | None = None
        """What generates, if that is not what is trained."""
        self.lags = False
        """Whether it falls behind at the next optimizer steps."""
        self.rounding = ""
        """Makes other weights of the same groups, as another order of sums would."""
        self.copying = asyncio.Event()
        """Cleared, copies take for ever."""
        self.copying.set()
        self.faults: list[DigenRLError] = []
        """Of the next optimizer steps."""
        self.devices = [FakeDevice(f"d{index}", self) for index in range(num_devices)]

    def weights_digest(self) -> str:
        return digest_of(self.adapter)

    def sampling_digest(self) -> str:
        return digest_of(self.old or self.adapter)

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        assert not any(device.used_for for device in self.devices)
        adapter = await joined(weights)
        states = await joined(checkpoint)
        assert states.startswith(b"of " + adapter)
        _, _, old = states.partition(b" after ")
        self.adapter, self.old = adapter, old or None
        self.log.append(f"restore {adapter.decode()}")

    def begin(self) -> None:
        self.counted.clear()
        self.num_skipped = 0

    def skip(self, num_samples: int) -> None:
        self.num_skipped += num_samples

    async def step(self, batch: int, scale: float = 1.0) -> dict[str, float]:
        if self.faults:
            raise self.faults.pop(0)
        assert not any(device.used_for for device in self.devices)
        assert set(self.counted.values()) <= {1}, "a sample was counted twice, or in part"
        total = len(self.counted) + self.num_skipped
        before = self.adapter
        self.adapter = f"{before.decode()}+{total}{self.rounding}".encode()
        self.old = before if self.lags else None
        self.log.append(f"step {batch}")
        self.scales.append(scale)
        self.counted.clear()
        return {"loss": 1.0, "grad_norm": float(total), "skipped_not_finite": 0.0}

    async def replace(self, weights: StoredTensors, sampling: StoredTensors | None) -> None:
        self.adapter = await joined(weights)
        self.old = None if sampling is None else await joined(sampling)
        self.log.append(f"replace {self.adapter.decode()}")

    async def copy(self, *, states: bool) -> Callable[[], Awaitable[Snapshot]]:
        assert self.devices[0].used_for is None
        copied = self._copied(states)
        await self.copying.wait()

        async def taken() -> Snapshot:
            await asyncio.sleep(0)
            return copied

        return taken

    def _copied(self, states: bool) -> Snapshot:
        state = b"of " + self.adapter + (b"" if self.old is None else b" after " + self.old)
        sampling = None
        if self.old is not None:
            sampling = SamplingWeights(self.sampling_digest(), [BytesPart(self.old)])
        parts = ([BytesPart(self.adapter)], [BytesPart(state)] if states else [])
        return Snapshot(self.weights_digest(), *parts, sampling=sampling)
