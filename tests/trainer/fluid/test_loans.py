"""A member that is lent generates, comes back between two denoising steps, and goes on at its next
loan: with real engines on a real bus, whose steps wait for their turn."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.fluid.loans import WORK_ORDER, NextWork, next_work
from shared.devices.protocols import FragmentGeneration, GeneratedFragment, GeneratingDevice
from shared.diffusion.generation import Generator
from shared.diffusion.policy import load_policy
from shared.messages import subjects
from shared.messages.contracts import (
    FragmentGenerated,
    FragmentReleased,
    GenerateFragment,
    Message,
    SetDevice,
)
from shared.messages.fluid import PieceTrained
from shared.recipe.recipe import Recipe
from shared.telemetry import LOAN_RETURN_SECONDS
from tests import examples
from tests.trainer.fluid.director import WAIT_S, Director, Start, whole

M = TypeVar("M", bound=Message)
MANY = 100


@dataclass
class Paced:
    """A generator each of whose denoising steps waits for its turn."""

    device: GeneratingDevice
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    begun: list[int] = field(default_factory=list)
    """Groups of the fragments that were begun."""
    steps: list[int] = field(default_factory=list)
    """Groups of the fragments whose steps were taken."""

    def weights_digest(self) -> str:
        return self.device.weights_digest()

    async def begin(
        self, task: GenerateFragment, conditions: bytes | None = None, source: bytes | None = None
    ) -> FragmentGeneration:
        self.begun.append(task.fragment.group)
        return PacedGeneration(self, await self.device.begin(task, conditions, source))

    async def conditions(
        self, prompt: str, source: bytes | None = None, negative: str | None = None
    ) -> bytes:
        return await self.device.conditions(prompt, source, negative)

    def let(self, number: int) -> None:
        for _ in range(number):
            self.turns.release()


@dataclass
class PacedGeneration:
    pace: Paced
    work: FragmentGeneration

    @property
    def task(self) -> GenerateFragment:
        return self.work.task

    @property
    def done(self) -> bool:
        return self.work.done

    @property
    def seconds(self) -> float:
        return self.work.seconds

    async def advance(self) -> None:
        await self.pace.turns.acquire()
        await self.work.advance()
        self.pace.steps.append(self.task.fragment.group)

    async def finish(self) -> GeneratedFragment:
        return await self.work.finish()


@dataclass
class Lender:
    """Lends the member "a", and gives it fragments."""

    director: Director
    pace: Paced
    number: int = 0

    async def set(self, mode: str, *, keep: bool = True, seconds: float = 60.0) -> None:
        self.number += 1
        await self.director.bus.publish(SetDevice.model_validate({
            "worker": "a", "generation": self.number, "mode": mode, "keep": keep,
            "max_seconds": seconds,
        }))  # fmt: skip
        await self.director.until(lambda: self.is_in(mode))

    def is_in(self, mode: str) -> bool:
        loan = self.director.members["a"].worker.loan
        return loan is not None and (loan.loan_number, loan.mode) == (self.number, mode)

    async def give(self, *groups: int) -> list[GenerateFragment]:
        policy = await self.director.policy(0)
        tasks = [examples.task(group=group, worker="a", policy=policy) for group in groups]
        for task in tasks:
            await self.director.bus.publish(task)
        return tasks

    async def told(self, kind: type[M], count: int) -> list[M]:
        stream = subjects.TRAJ if kind is FragmentGenerated else subjects.EVT
        found: list[M] = []
        async with (
            asyncio.timeout(WAIT_S),
            contextlib.aclosing(self.director.bus.follow(stream)) as messages,
        ):
            async for received in messages:
                if isinstance(received.message, kind):
                    found.append(received.message)
                if len(found) == count:
                    break
        return found

    async def steps(self, number: int) -> None:
        """Let the device take denoising steps; it waits in the next one if it may."""
        self.pace.let(number)
        wanted = len(self.pace.steps) + number
        await self.director.until(lambda: len(self.pace.steps) == wanted)


Lend = Callable[..., AbstractAsyncContextManager[Lender]]


@pytest.fixture
def lending(direct: Start) -> Lend:
    @contextlib.asynccontextmanager
    async def lend(**changes: Any) -> AsyncIterator[Lender]:
        paced: list[Paced] = []

        def wrap(device: GeneratingDevice) -> GeneratingDevice:
            paced.append(Paced(device))
            return paced[-1]

        lent = {"schedule__mode": "disaggregated", "rollout__workers": 1}
        async with direct(**lent, **changes) as director:
            director.wrap = wrap
            await director.start("a")
            yield Lender(director, paced[-1])

    return lend


@pytest.fixture
async def lender(lending: Lend) -> AsyncIterator[Lender]:
    async with lending() as lender:
        yield lender


async def alone(recipe: Recipe, task: GenerateFragment) -> GeneratedFragment:
    """Generate a fragment without an interruption."""
    loaded = load_policy(recipe, {"transformer", "text", "decoder"}, trains=True)
    generator = Generator(recipe, loaded)
    work = generator.begin(task)
    while not work.done:
        generator.advance(work)
    return generator.finish(work)


def num_returns() -> float:
    [metric] = LOAN_RETURN_SECONDS.collect()
    return next(each.value for each in metric.samples if each.name.endswith("_count"))


async def test_a_fragment_goes_on_over_loans_as_if_it_had_not_been_interrupted(
    lender: Lender,
) -> None:
    director, pace = lender.director, lender.pace
    await director.open(0, by="a")
    before = num_returns()
    [task] = await lender.give(0)
    await asyncio.sleep(0.2)
    assert pace.begun == [], "it is not lent"
    await lender.set("generate")
    for number in range(2):
        await lender.steps(1)
        await director.give(0, {"a": [whole(director.recipe, number)]})
        await lender.set("train")
        pace.let(1)  # the step that it was in
        await director.told(PieceTrained, number + 1)
        await asyncio.sleep(0.1)
        taken = 2 * (number + 1)
        assert (len(pace.steps), lender.director.members["a"].lock.locked()) == (taken, False)
        await lender.set("generate")
    pace.let(MANY)
    [generated] = await lender.told(FragmentGenerated, 1)
    assert pace.begun == [0]
    stored = await director.store.get(generated.stored.trajectory)
    wanted = await alone(director.recipe, task)
    assert len(pace.steps) == director.recipe.sampling.steps
    assert stored == wanted.trajectory
    assert num_returns() == before + 2


async def test_a_piece_comes_before_the_next_step_of_a_lent_device(lender: Lender) -> None:
    director, pace = lender.director, lender.pace
    await director.open(0, by="a")
    await lender.give(0)
    await lender.set("generate")
    await lender.steps(1)
    await director.give(0, {"a": [whole(director.recipe, 1)]})
    await asyncio.sleep(0.2)
    pace.let(1)
    await director.told(PieceTrained, 1)
    pace.let(MANY)
    await lender.told(FragmentGenerated, 1)


async def test_fragments_that_are_not_kept_go_back_also_the_one_in_progress(lender: Lender) -> None:
    await lender.give(0, 1)
    await lender.set("generate")
    await lender.steps(1)
    await lender.set("train", keep=False)
    released = await lender.told(FragmentReleased, 2)
    assert {each.slot.group for each in released} == {0, 1}
    assert {each.reason for each in released} == {"returned"}
    lender.pace.let(MANY)
    await lender.set("generate")
    await lender.give(2)
    [generated] = await lender.told(FragmentGenerated, 1)
    assert generated.fragment.group == 2 and lender.pace.begun == [0, 2]


async def test_a_kept_fragment_is_stale_once_its_version_is_not_in_use(lender: Lender) -> None:
    director, recipe = lender.director, lender.director.recipe
    await lender.give(0)
    await lender.set("generate")
    await lender.steps(1)
    await lender.set("train")
    lender.pace.let(1)
    await director.batch(0, {"a": [whole(recipe, n) for n in range(3)]}, committer="a")
    [released] = await lender.told(FragmentReleased, 1)
    assert released.reason == "stale"


async def test_one_step_ahead_a_kept_fragment_goes_on_by_the_version_before(lending: Lend) -> None:
    async with lending(schedule__max_staleness=1) as lender:
        director, recipe = lender.director, lender.director.recipe
        [task] = await lender.give(0)
        await lender.set("generate")
        await lender.steps(1)
        await lender.set("train")
        lender.pace.let(1)
        await director.batch(0, {"a": [whole(recipe, n) for n in range(3)]}, committer="a")
        await director.until(lambda: director.members["a"].worker.policy_version == 1)
        await lender.set("generate")
        lender.pace.let(MANY)
        [generated] = await lender.told(FragmentGenerated, 1)
        assert generated.policy == task.policy
        stored = await director.store.get(generated.stored.trajectory)
        assert stored == (await alone(recipe, task)).trajectory


async def test_a_loan_ends_by_itself_and_its_number_does_not_lend_again(lender: Lender) -> None:
    director, pace = lender.director, lender.pace
    await director.open(0, by="a")
    await lender.give(0)
    await lender.set("generate", seconds=0.4)
    await lender.steps(1)
    await director.until(lambda: lender.is_in("train"))
    lender.number -= 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await lender.set("generate")
    pace.let(MANY)
    await director.train(0, {"a": [whole(director.recipe, 0)]})
    assert len(pace.steps) == 2, "the step that it was in is its last one"


KINDS: tuple[NextWork, ...] = ("stale", "due", "piece", "early", "later")


@given(waiting=st.sets(st.sampled_from(KINDS)), lent=st.sampled_from([None, False, True]))
def test_what_a_device_does_next(waiting: set[NextWork], lent: bool | None) -> None:
    found = next_work(waiting, lent=lent)
    assert found is None or found in waiting
    assert found != "later"
    if lent is False:
        assert found in ("stale", "piece", None)
    if lent is not None and "piece" in waiting:
        assert found in ("stale", "piece"), "a piece waits for no fragment"
    if lent is None and "due" in waiting:
        assert found in ("stale", "due"), "a piece waits for the fragments of its batch"
    if found is None:
        assert not waiting & set(WORK_ORDER[lent])
