"""Interfaces of devices to services, for a GPU, a CPU, or an emulated device.

Calls that keep the device busy are coroutines, so the service still communicates; a device runs one
call at a time. Real devices are in `shared.diffusion` and `services.trainer`; an emulated one is
busy for the time of a cost profile.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shared.messages.contracts import GenerateFragment
from shared.messages.workers import MemoryShortage
from shared.run.manifest import StoredParts, StoredTensors, VersionTensors


@dataclass(frozen=True, slots=True)
class GeneratedFragment:
    trajectory: bytes
    media: bytes
    weights_digest: str
    """Digest of the parameters that the samples were made with."""
    seconds: float
    """Seconds that the device was busy: denoising steps and decoding, without any pause. Seconds of
    decoding concurrent with the next fragment count once."""
    shortage: MemoryShortage | None = None
    """The first memory shortage, if any."""


class FragmentGeneration(Protocol):
    """A fragment that is generated, one denoising step at a time."""

    @property
    def task(self) -> GenerateFragment: ...

    @property
    def done(self) -> bool:
        """Whether every denoising step is taken, and only `finish` is left."""

    @property
    def seconds(self) -> float:
        """Seconds that the device was busy with it."""

    async def advance(self) -> None:
        """Take one denoising step. The device has finished the step on return; a step that is not
        recalled may still be running, with the ones before finished.

        Raises:
            IntegrityError: if other weights are in use than those that the fragment began with.
        """

    def finish(self) -> Awaitable[GeneratedFragment]:
        """Decode and pack a fragment whose steps are all taken. Raises as `advance` does, at once;
        from then on the device may begin other fragments and use other weights.

        Raises:
            OutOfMemory: if it cannot be decoded.
        """


class GeneratingDevice(Protocol):
    def weights_digest(self) -> str:
        """Return the digest of the weights in use."""

    async def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> FragmentGeneration:
        """Return the fragment as noise; no denoising step is taken yet. Without ``conditions``,
        which an encoder has made of its prompt, the device encodes the prompt itself, together with
        ``source``, the file of its source image, if it has one.

        Raises:
            FaultyConditions: if they are invalid. If the network does not take them, this or the
                first denoising step raises it.
            ContractError: if the source is no image, or missing, or the model takes none.
        """

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        """Return the conditioning of ``prompt`` and of its source image; may run concurrently with
        other work, and only if the device encodes prompts itself."""


class StagedVersion(Protocol):
    """A second set of weights next to the one in use."""

    @property
    def digest(self) -> str: ...

    async def adopt(self) -> None:
        """Put them in use, between two fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupData:
    """The stored data of a group."""

    trajectories: tuple[bytes, ...]
    """Trajectories of its fragments, in the order of their samples."""
    conditions: bytes
    advantages: tuple[float, ...]
    """One per sample."""
    staleness: int = 0
    """Batch number minus the policy version that generated it."""


class RolloutDevice(GeneratingDevice, Protocol):
    async def stage(self, weights: StoredTensors) -> StagedVersion:
        """Fetch weights and prepare them for use, object by object, concurrently with other work.

        Raises:
            ContractError: if they are no tensors.
            IntegrityError: if they belong to another adapter, or are not in the store.
        """


@dataclass(frozen=True, slots=True)
class SamplingWeights:
    """The weights that generate, where they are not the trained ones."""

    digest: str
    weights: Sequence[VersionTensors]


VersionPart = Literal["weights", "checkpoint"]
"""Stored parts of a version."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the trained weights and the optimizer's state on the host: they are stored while
    the devices continue."""

    digest: str
    """Digest of the trained weights."""
    weights: Sequence[VersionTensors]
    checkpoint: Sequence[VersionTensors]
    """Empty if the optimizer's state was not copied."""
    elsewhere: Sequence[Callable[[VersionPart], Awaitable[StoredParts]]] = ()
    """The parts of other processes: each call stores one part and returns its description."""
    sampling: SamplingWeights | None = None
    change: bytes | None = None
    """The rounded change that has made these weights of those before, as an object."""
