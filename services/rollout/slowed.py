"""A device that takes longer than it needs to: to try unequal devices on equal ones."""

import asyncio
import time
from dataclasses import dataclass, replace

from shared.devices.protocols import (
    Generated,
    Generation,
    GroupData,
    GroupGradient,
    RolloutDevice,
    Staged,
)
from shared.messages.contracts import GenerateFragment


@dataclass(frozen=True, slots=True)
class SlowedGeneration:
    generation: Generation
    factor: float

    @property
    def task(self) -> GenerateFragment:
        return self.generation.task

    @property
    def done(self) -> bool:
        return self.generation.done

    @property
    def seconds(self) -> float:
        return self.generation.seconds * self.factor

    async def advance(self) -> None:
        before = self.generation.seconds
        await self.generation.advance()
        await asyncio.sleep((self.generation.seconds - before) * (self.factor - 1))

    async def finish(self) -> Generated:
        before = self.generation.seconds
        generated = await self.generation.finish()
        await asyncio.sleep((generated.seconds - before) * (self.factor - 1))
        return replace(generated, seconds=generated.seconds * self.factor)


@dataclass(frozen=True, slots=True)
class SlowedDevice:
    """``device``, each denoising step, decoding and gradient of which takes ``factor`` times as
    long."""

    device: RolloutDevice
    factor: float

    def weights_digest(self) -> str:
        return self.device.weights_digest()

    async def begin(self, task: GenerateFragment) -> SlowedGeneration:
        return SlowedGeneration(await self.device.begin(task), self.factor)

    async def conditions(self, prompt: str) -> bytes:
        return await self.device.conditions(prompt)

    async def stage(self, weights: bytes) -> Staged:
        return await self.device.stage(weights)

    async def gradient(self, group: GroupData) -> GroupGradient:
        began = time.monotonic()
        part = await self.device.gradient(group)
        await asyncio.sleep((time.monotonic() - began) * (self.factor - 1))
        return part
