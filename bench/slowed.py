"""A rollout worker that is several times slower than its device, to try unequal devices.

    python -m bench.slowed 3 --run NAME --worker slow

Everything else is as `digenrl serve rollout` does it, with the same environment.
"""

import argparse
import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, replace

import uvloop

from digenrl.commands.options import settings_from_options
from services.rollout.service import run_device
from shared.devices.protocols import (
    FragmentGeneration,
    GeneratedFragment,
    RolloutDevice,
    StagedVersion,
)
from shared.messages.contracts import GenerateFragment
from shared.recipe.recipe import Recipe
from shared.run.manifest import StoredTensors
from shared.telemetry import configure_logs


@dataclass(frozen=True, slots=True)
class SlowedGeneration:
    generation: FragmentGeneration
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

    def finish(self) -> Awaitable[GeneratedFragment]:
        return self._finished(self.generation.seconds, self.generation.finish())

    async def _finished(
        self, before: float, finishing: Awaitable[GeneratedFragment]
    ) -> GeneratedFragment:
        generated = await finishing
        await asyncio.sleep((generated.seconds - before) * (self.factor - 1))
        return replace(generated, seconds=generated.seconds * self.factor)


@dataclass(frozen=True, slots=True)
class SlowedDevice:
    """Makes each denoising step and decode of a device take ``factor`` times as long."""

    device: RolloutDevice
    factor: float

    def weights_digest(self) -> str:
        return self.device.weights_digest()

    async def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> SlowedGeneration:
        return SlowedGeneration(await self.device.begin(task, conditions, source), self.factor)

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        return await self.device.conditions(prompt, source, negative)

    async def stage(self, weights: StoredTensors) -> StagedVersion:
        return await self.device.stage(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("factor", type=float, help="how many times slower")
    for option in ("--run", "--worker", "--port"):
        parser.add_argument(option)
    asked = parser.parse_args()
    settings = settings_from_options(run=asked.run, worker=asked.worker, port=asked.port)
    configure_logs(service="rollout", worker=settings.worker, run=settings.run)

    def build(recipe: Recipe) -> SlowedDevice:
        from services.rollout.rollout_engine import RolloutEngine  # torch, once the probes answer

        return SlowedDevice(RolloutEngine(recipe), asked.factor)

    uvloop.run(run_device(settings, build))


if __name__ == "__main__":
    main()
