"""A generator on a device of this process, for services that go on talking while it is busy."""

import asyncio

from shared.devices.protocols import Generated
from shared.diffusion.generation import GenerationInProgress, Generator
from shared.messages.contracts import GenerateFragment


class LocalGeneration:
    """Wraps a fragment that is generated on this process's device."""

    def __init__(self, generator: Generator, work: GenerationInProgress) -> None:
        self._generator = generator
        self._work = work

    @property
    def task(self) -> GenerateFragment:
        return self._work.task

    @property
    def done(self) -> bool:
        return self._work.done

    @property
    def seconds(self) -> float:
        return self._work.seconds

    async def advance(self) -> None:
        await asyncio.to_thread(self._generator.advance, self._work)

    async def finish(self) -> Generated:
        return await asyncio.to_thread(self._generator.finish, self._work)


class LocalGenerator:
    """Implements `shared.devices.protocols.GeneratingDevice`; each call runs in a thread."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def weights_digest(self) -> str:
        return self._generator.weights_digest()

    async def begin(self, task: GenerateFragment) -> LocalGeneration:
        return LocalGeneration(
            self._generator, await asyncio.to_thread(self._generator.begin, task)
        )

    async def conditions(self, prompt: str) -> bytes:
        return await asyncio.to_thread(self._generator.conditions, prompt)
