"""RETURN within one denoising step: a device on loan, and training that wants it back."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from shared.devices.loan import Loan, apply, may_generate, tick
from shared.devices.protocols import GeneratedFragment
from shared.diffusion.generation import Generator
from shared.diffusion.policy import LoadedPolicy
from shared.messages.contracts import SetDevice
from tests.shared.diffusion.digits import PROMPT, RECIPE, accumulate, gradient, same, task

T = TypeVar("T")

NUM_RETURNS = 120
SAMPLES = 48
"""Makes a step long beside what the event loop and threads take."""


def borrow(loan_number: int, max_seconds: float = 60.0) -> SetDevice:
    return SetDevice(
        worker="trainer-0", loan_number=loan_number, mode="generate", max_seconds=max_seconds
    )


def give_back(loan_number: int) -> SetDevice:
    return SetDevice(worker="trainer-0", loan_number=loan_number, mode="train")


class Device:
    """What a trainer has of this: a device, the loan of it, and work for as long as it lasts."""

    def __init__(self, generator: Generator, clock: Callable[[], float] = time.monotonic) -> None:
        self.free = asyncio.Lock()
        self.loan = Loan()
        self.seconds: list[float] = []
        """Seconds of each denoising step and each decoding."""
        self._generator = generator
        self._clock = clock
        self._lent, self.returned = asyncio.Event(), asyncio.Event()

    def receive(self, command: SetDevice) -> None:
        self._follow(apply(self.loan, command, self._clock()))

    async def generate(self, num_samples: int) -> GeneratedFragment:
        """A fragment, whenever the device is on loan: between two steps it may be called back."""
        work = await self._on_loan(lambda: self._generator.begin(task(num_samples=num_samples)))
        while not work.done:
            await self._on_loan(lambda: self._generator.advance(work))
        return await self._on_loan(lambda: self._generator.finish(work))

    async def _on_loan(self, do: Callable[[], T]) -> T:
        while True:
            await self._lent.wait()
            async with self.free:
                now = self._clock()
                self._follow(tick(self.loan, now))
                if may_generate(self.loan, now):
                    return await asyncio.to_thread(self._do, do)

    def _do(self, do: Callable[[], T]) -> T:
        began = time.monotonic()
        done = do()
        self.seconds.append(time.monotonic() - began)
        return done

    def _follow(self, loan: Loan) -> None:
        self.loan = loan
        starts, ends = self._lent, self.returned
        if loan.mode == "train":
            starts, ends = ends, starts
        starts.set()
        ends.clear()


@dataclass
class Trial:
    seconds: float
    """From RETURN to the device in the trainer's hands."""
    num_steps: int
    """Number of steps that ended in between."""
    step_seconds: float
    """Seconds of the step that was under way."""


async def call_back(device: Device, loan_number: int) -> Trial:
    num_steps, began = len(device.seconds), time.monotonic()
    device.receive(give_back(loan_number))
    async with device.free:
        seconds = time.monotonic() - began
        return Trial(seconds, len(device.seconds) - num_steps, device.seconds[-1])


@pytest.mark.clock
async def test_a_device_is_returned_within_one_denoising_step(
    policy: LoadedPolicy, generator: Generator
) -> None:
    conditions = generator.conditions(PROMPT)
    straight = generator.generate(task(num_samples=SAMPLES))
    step = generator.generate(task(num_samples=SAMPLES)).seconds / RECIPE.sampling.steps
    accumulate(policy, conditions, seed=0)
    uncommitted = gradient(policy)
    device, delay = Device(generator), random.Random(0)
    made: list[GeneratedFragment] = []
    trials: list[Trial] = []

    async def generate_for_ever() -> None:
        while True:
            made.append(await device.generate(SAMPLES))

    async with asyncio.TaskGroup() as tasks:
        helper = tasks.create_task(generate_for_ever())
        for number in range(NUM_RETURNS):
            device.receive(borrow(2 * number + 1))
            await asyncio.sleep(delay.uniform(0.0, 2.5) * step)
            step = statistics.median([step, *device.seconds])
            trials.append(await call_back(device, 2 * number + 2))
            assert same(gradient(policy), uncommitted)
        helper.cancel()

    assert max(trial.num_steps for trial in trials) == 1
    assert sum(trial.num_steps for trial in trials) > NUM_RETURNS / 2, "hardly any in mid-step"
    # On a busy machine some steps take long: what counts is the time beyond the step under way.
    beyond = sorted(trial.seconds - trial.step_seconds for trial in trials)
    assert beyond[int(0.95 * NUM_RETURNS)] <= step
    assert len(made) >= 5
    for fragment in made:
        assert (fragment.trajectory, fragment.media) == (straight.trajectory, straight.media)


async def test_a_device_that_nobody_calls_back_returns_by_itself(generator: Generator) -> None:
    device = Device(generator, clock=lambda: float(len(device.seconds)))
    made = asyncio.create_task(device.generate(4))
    device.receive(borrow(1, max_seconds=4.0))
    await device.returned.wait()
    device.receive(borrow(1))
    await asyncio.sleep(0.05)
    assert device.loan.expired
    assert len(device.seconds) == 4
    device.receive(borrow(2))
    assert (await made).trajectory == generator.generate(task()).trajectory
