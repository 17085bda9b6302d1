"""A generator that services use without waiting for it."""

import asyncio

import pytest

from shared.diffusion.generation import Generator, LocalGenerator
from shared.errors import IntegrityError
from tests.shared.diffusion.digits import PROMPT, RECIPE, adapter, load_digits, task


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(RECIPE, load_digits())


async def test_a_fragment_is_that_of_the_generator_step_by_step(generator: Generator) -> None:
    device = LocalGenerator(generator)
    work = await device.begin(task())
    assert work.task == task()
    assert not work.done
    seconds = []
    while not work.done:
        await work.advance()
        seconds.append(work.seconds)
    assert len(seconds) == RECIPE.sampling.steps
    assert seconds[0] > 0 and seconds == sorted(set(seconds))
    made, straight = await work.finish(), generator.generate(task())
    assert (made.trajectory, made.media) == (straight.trajectory, straight.media)
    assert made.weights_digest == device.weights_digest() == generator.weights_digest()
    assert made.seconds > seconds[-1]
    assert await device.conditions(PROMPT) == generator.conditions(PROMPT)


async def test_the_service_goes_on_while_the_device_is_busy(generator: Generator) -> None:
    work = await LocalGenerator(generator).begin(task(num_samples=48))
    step = asyncio.create_task(work.advance())
    turns = 0
    while not step.done():
        await asyncio.sleep(0)
        turns += 1
    await step
    assert turns > 10


async def test_faults_are_those_of_the_generator(generator: Generator) -> None:
    work = await LocalGenerator(generator).begin(task())
    with pytest.raises(ValueError, match="steps left"):
        await work.finish()
    generator.load(adapter(load_digits(), 2))
    with pytest.raises(IntegrityError, match="no longer in use"):
        await work.advance()
