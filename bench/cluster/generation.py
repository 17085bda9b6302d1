"""Emulated devices that generate: on their own, or as a part of a member."""

from collections.abc import Awaitable
from dataclasses import dataclass

from bench.cluster.blobs import (
    check_conditions,
    conditions_blob,
    digest_of,
    head_of,
    media_blob,
    samples_of,
    trajectory_blob,
)
from bench.cluster.hold import Held
from bench.cluster.payloads import Scaled
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.seconds import fragment_seconds
from shared.devices.protocols import FragmentGeneration, GeneratedFragment, GroupData, StagedVersion
from shared.errors import ContractError, IntegrityError
from shared.messages.contracts import GenerateFragment
from shared.run.manifest import StoredTensors


@dataclass(slots=True)
class EmulatedDevice:
    """Generates fragments in the time that its kind takes; the caller has it do one at a time."""

    profile: Profile
    kind: str
    held: Held
    sizes: Scaled
    weights: str
    """Digest of the weights in use."""
    num_steps: int = 1
    """Parts in which a fragment is generated: 1, or the model's denoising steps where the device
    may be called back."""

    def weights_digest(self) -> str:
        return self.weights

    async def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> FragmentGeneration:
        if conditions is not None:
            check_conditions(conditions, task.prompt.text)
        whole = fragment_seconds(self.profile, self.kind, task.fragment.num_samples)
        return EmulatedGeneration(self, task, self.weights, self.held.drawn(whole))

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        return conditions_blob(prompt, self.sizes.conditions)


@dataclass(frozen=True, slots=True)
class EmulatedEncoder:
    """Encodes prompts, and does nothing else."""

    sizes: Scaled

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        return conditions_blob(prompt, self.sizes.conditions)


@dataclass(slots=True)
class EmulatedGeneration:
    """A fragment, generated with one hold, or with one for every denoising step."""

    device: EmulatedDevice
    task: GenerateFragment
    digest: str
    whole: float
    """Seconds that it takes, at full scale."""
    seconds: float = 0.0
    """Seconds that it has taken so far, scaled."""
    _taken: int = 0

    @property
    def done(self) -> bool:
        return self._taken == self.device.num_steps

    async def advance(self) -> None:
        device, samples = self.device, self.task.fragment.num_samples
        if device.weights != self.digest:
            raise IntegrityError(f"{device.held.name}: other weights are in use")
        self._taken += 1
        steps = device.num_steps
        part = self.whole / steps
        self.seconds += await device.held.hold(part, "generate", samples=samples / steps)

    def finish(self) -> Awaitable[GeneratedFragment]:
        if self.device.weights != self.digest:
            raise IntegrityError(f"{self.device.held.name}: other weights are in use")
        return self._finished()

    async def _finished(self) -> GeneratedFragment:
        samples, sizes = samples_of(self.task, self.digest), self.device.sizes
        return GeneratedFragment(
            trajectory=trajectory_blob(samples, sizes.window, sizes.start),
            media=media_blob(samples, sizes.media),
            weights_digest=self.digest,
            seconds=self.seconds,
        )


@dataclass(slots=True)
class EmulatedRollout(EmulatedDevice):
    """A rollout device: takes published weights."""

    async def stage(self, weights: StoredTensors) -> StagedVersion:
        return EmulatedStaged(self, digest_of(await head_of(weights)))


@dataclass(frozen=True, slots=True)
class EmulatedStaged:
    device: EmulatedRollout
    digest: str

    async def adopt(self) -> None:
        await self.device.held.hold(self.device.profile.variant.adopt_seconds, "adopt")
        self.device.weights = self.digest


def check_group(profile: Profile, group: GroupData) -> None:
    """Raises ContractError if it is not a whole group."""
    if len(group.advantages) != profile.shape.group_size:
        raise ContractError(
            f"a group of {len(group.advantages)} samples, not {profile.shape.group_size}"
        )
