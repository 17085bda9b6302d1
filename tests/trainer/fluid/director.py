"""Plays the scheduler for members with real engines, on a real bus: batch by batch, by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from services.trainer.fluid.device import EngineMember
from services.trainer.fluid.exchange import Exchange
from services.trainer.fluid.member import MemberApp
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.fluid.sums import SumLayout
from shared.bus.bus import Bus
from shared.devices.protocols import GeneratingDevice, GroupData
from shared.diffusion.generation import Generator, LocalGenerator
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.training.rows import check_stored
from shared.messages import subjects
from shared.messages.contracts import FragmentScored, Policy, TrainGroup, Trajectories
from shared.messages.fluid import (
    ExchangeMissed,
    ExchangeSums,
    FluidMessage,
    Piece,
    PieceTrained,
    Share,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
)
from shared.messages.records import ChosenLevel, Level
from shared.messages.workers import Device
from shared.process.worker import Worker, WorkerContext
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, commit_chain, read_commit
from shared.run.layout import batch_folder
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples
from tests.trainer.batches import fresh_groups

RUN = "test"
WAIT_S = 30.0
FLUID = {
    "schedule.mode": "fluid", "rollout.workers": 0, "trainer.updates": 1, "batch.groups": 3,
    "trainer.ema": 0.9,
}  # fmt: skip
M = TypeVar("M", bound=FluidMessage)
Parts = Mapping[str, Sequence[Piece]]
"""What each member is to train."""
MakeExchange = Callable[[ObjectStore, SumLayout], Exchange]
Start = Callable[..., "AbstractAsyncContextManager[Director]"]


def whole(recipe: Recipe, group: int, *, number: int = 0, attempt: int = 0) -> Piece:
    return part(recipe, group, range(recipe.trained_samples), number=number, attempt=attempt)


def part(
    recipe: Recipe,
    group: int,
    samples: range,
    steps: range | None = None,
    *,
    number: int = 0,
    attempt: int = 0,
) -> Piece:
    steps = steps or range(recipe.sampling.window)
    return Piece(
        group=group, attempt=attempt, number=number, first_sample=samples.start,
        num_samples=len(samples), first_step=steps.start, num_steps=len(steps),
    )  # fmt: skip


@dataclass
class Member:
    device: EngineMember
    loaded: LoadedPolicy
    worker: Worker
    running: "asyncio.Task[None]"
    app: MemberApp | None = None

    @property
    def lock(self) -> asyncio.Lock:
        """Held by whoever uses the device."""
        assert self.app is not None
        return self.app._state.lock


@dataclass
class Director:
    bus: Bus
    store: ObjectStore
    recipe: Recipe
    url: str
    make_exchange: MakeExchange = StoreExchange
    members: dict[str, Member] = field(default_factory=dict)
    wrap: Callable[[GeneratingDevice], GeneratingDevice] = lambda generator: generator

    async def start(self, *names: str) -> None:
        """Start members, which have the newest version when this returns."""
        for name in names:
            await self._start(name)
        started = [self.members[name].worker for name in names]
        await self.until(lambda: all(worker.holds is not None for worker in started))

    async def _start(self, name: str) -> None:
        loaded = load_policy(self.recipe, {"transformer", "text", "decoder"}, trains=True)
        device = EngineMember(self.recipe, loaded)
        worker = Worker("trainer", name, "waiting_for_rollout", Device(), address=name)

        async def run() -> None:
            async with Bus.connect(self.url, run=RUN, name=name) as bus:
                app = MemberApp(
                    device, self.wrap(LocalGenerator(Generator(self.recipe, loaded))),
                    self.make_exchange(self.store, device.engine.layout), self.recipe,
                    WorkerContext(bus, self.store, worker),
                    check=partial(check_stored, self.recipe),
                )  # fmt: skip
                self.members[name].app = app
                await app.run()

        self.members[name] = Member(device, loaded, worker, asyncio.create_task(run()))

    async def kill(self, name: str) -> None:
        running = self.members.pop(name).running
        running.cancel()
        await asyncio.wait({running})

    async def policy(self, version: int) -> Policy:
        return (await self.record(version)).policy

    async def open(
        self, batch: int, *, by: str, advantages: Sequence[float] | None = None
    ) -> list[GroupData]:
        """Send the groups of a batch, as the network of a member samples them."""
        member = self.members[by]
        groups = await asyncio.to_thread(fresh_groups, self.recipe, member.loaded)
        policy = await self.policy(batch)
        for number, group in enumerate(groups):
            await self.send(batch, number, group, policy, advantages)
        return groups

    async def send(
        self,
        batch: int,
        number: int,
        group: GroupData,
        policy: Policy,
        advantages: Sequence[float] | None = None,
        *,
        attempt: int = 0,
    ) -> None:
        folder, size = batch_folder(RUN, batch), len(group.advantages) // len(group.trajectories)
        scored = []
        for place, trajectory in enumerate(group.trajectories):
            put = self.store.put(folder, trajectory, suffix=".safetensors")
            given = self.store.put(folder, group.conditions, suffix=".safetensors")
            scored.append(FragmentScored(
                fragment=examples.fragment(
                    batch=batch, group=number, first_sample=place * size, num_samples=size,
                    attempt=attempt,
                ),
                policy=policy,
                stored=Trajectories(
                    trajectory=await put, conditions=await given, media=examples.ref("media"),
                    weights_digest=policy.weights_digest,
                ),
                rewards=(0.5,) * size, parts={"proxy": (0.5,) * size},
                generated_by="a", worker="reward", seconds=0.1,
            ))  # fmt: skip
        await self.bus.publish(TrainGroup(
            batch=batch, group=number, attempt=attempt, policy=policy, fragments=tuple(scored),
            advantages=tuple(advantages or group.advantages),
        ))  # fmt: skip

    async def give(
        self, batch: int, parts: Parts, *, attempt: int = 0, sum_number: int = 0, update: int = 0
    ) -> None:
        policy = await self.policy(batch)
        for worker, pieces in parts.items():
            for piece in pieces:
                await self.bus.publish(TrainPiece(
                    batch=batch, attempt=attempt, update=update, worker=worker, piece=piece,
                    sum_number=sum_number, policy=policy,
                ))  # fmt: skip

    async def train(
        self, batch: int, parts: Parts, *, attempt: int = 0, sum_number: int = 0, update: int = 0
    ) -> None:
        """Have pieces trained."""
        await self.give(batch, parts, attempt=attempt, sum_number=sum_number, update=update)
        wanted = {(w, p.group, p.attempt, p.number) for w, ps in parts.items() for p in ps}

        def is_one(each: PieceTrained) -> bool:
            piece = each.piece
            which = each.worker, piece.group, piece.attempt, piece.number
            about = each.batch, each.attempt, each.update, each.sum_number
            return about == (batch, attempt, update, sum_number) and which in wanted

        await self.told(PieceTrained, len(wanted), is_one)

    async def exchange(
        self,
        batch: int,
        shares: Sequence[Share],
        *,
        committer: str,
        attempt: int = 0,
        round_number: int = 0,
        seconds: float = 20.0,
        update: int = 0,
    ) -> ExchangeSums:
        message = ExchangeSums(
            batch=batch, attempt=attempt, update=update, round=round_number,
            policy=await self.policy(batch), committer=committer, shares=tuple(shares),
            max_seconds=seconds, up=self._level(self.recipe.exchange.up),
        )  # fmt: skip
        await self.bus.publish(message)
        return message

    @staticmethod
    def _level(asked: ChosenLevel) -> Level:
        assert asked != "auto"
        return asked

    async def summed(self, batch: int, parts: Parts, *, committer: str) -> ExchangeSums:
        """Train a batch from its groups to its exchange."""
        await self.open(batch, by=committer)
        await self.train(batch, parts)
        return await self.exchange(batch, self.shares(parts), committer=committer)

    async def held(self, message: ExchangeSums, count: int) -> list[SumHeld]:
        return await self.told(SumHeld, count, lambda each: _is_of(each, message))

    async def missed(self, message: ExchangeSums, count: int) -> list[ExchangeMissed]:
        return await self.told(ExchangeMissed, count, lambda each: _is_of(each, message))

    async def step(self, message: ExchangeSums, count: int) -> list[Stepped]:
        """Have those that hold the committer's total step; return what ``count`` of them say."""
        await self.held(message, count)
        held = await self.told(
            SumHeld, 1, lambda each: _is_of(each, message) and each.worker == message.committer
        )
        await self.take(message, held[0])
        return await self.stepped(message, count)

    async def take(self, message: ExchangeSums, held: SumHeld) -> None:
        await self.bus.publish(TakeStep(
            batch=message.batch, attempt=message.attempt, update=message.update,
            round=message.round, sum_id=held.sum_id, norm=held.norm, finite=held.finite,
            scale=held.scale, committer=message.committer,
            down=self._level(self.recipe.exchange.down),
        ))  # fmt: skip

    async def stepped(self, message: ExchangeSums, count: int) -> list[Stepped]:
        def is_one(each: Stepped) -> bool:
            of = each.batch, each.attempt, each.update
            return of == (message.batch, message.attempt, message.update)

        return await self.told(Stepped, count, is_one)

    async def batch(self, number: int, parts: Parts, *, committer: str) -> CommitRecord:
        """Train a batch from its groups to its record, without anything going wrong."""
        message = await self.summed(number, parts, committer=committer)
        await self.step(message, len(parts))
        return await self.record(number + 1)

    async def update(
        self, batch: int, number: int, parts: Parts, *, committer: str, attempt: int = 0,
        round_number: int | None = None,
    ) -> list[Stepped]:  # fmt: skip
        """Train one of a batch's updates from its groups, which are there, to its step."""
        await self.train(batch, parts, attempt=attempt, update=number)
        message = await self.exchange(
            batch, self.shares(parts), committer=committer, attempt=attempt, update=number,
            round_number=number if round_number is None else round_number,
        )  # fmt: skip
        return await self.step(message, len(parts))

    def shares(self, parts: Parts, *, sum_number: int = 0) -> list[Share]:
        return [
            Share(worker=worker, sum_number=sum_number, pieces=tuple(pieces))
            for worker, pieces in parts.items()
        ]

    async def record(self, version: int) -> CommitRecord:
        """Return the commit record of a version as soon as it is there."""
        async with asyncio.timeout(WAIT_S):
            while True:
                self._check()
                found = await read_commit(self.store, RUN, version)
                if found is not None:
                    return found
                await asyncio.sleep(0.01)

    async def chain_has(self, length: int) -> None:
        """The commits are one chain of so many."""
        assert len(await commit_chain(self.store, RUN)) == length

    async def told(
        self, kind: type[M], count: int, wanted: Callable[[M], bool] = lambda _: True
    ) -> list[M]:
        """Return the first messages of one kind."""
        found: list[M] = []
        async with (
            asyncio.timeout(WAIT_S),
            contextlib.aclosing(self.bus.follow(subjects.FLUID)) as messages,
        ):
            async for received in messages:
                self._check()
                message = received.message
                if isinstance(message, kind) and wanted(message):
                    found.append(message)
                if len(found) == count:
                    break
        return found

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._check()
                await asyncio.sleep(0.01)

    def _check(self) -> None:
        """Raise what has ended a member."""
        for member in self.members.values():
            if member.running.done():
                member.running.result()


def _is_of(answer: SumHeld | ExchangeMissed, message: ExchangeSums) -> bool:
    return answer.answer_fields == message.answer_fields


@contextlib.asynccontextmanager
async def directing(
    url: str, folder: Path, recipe: Recipe, make_exchange: MakeExchange = StoreExchange
) -> AsyncIterator[Director]:
    async with Bus.connect(url, run=RUN, name="director") as bus:
        await bus.ensure_streams()
        for stream in subjects.STREAMS:  # of another scenario on the same broker
            await bus.jetstream.purge_stream(stream.name)
        store = ObjectStore(FolderBackend(folder))
        director = Director(bus, store, recipe, url, make_exchange)
        try:
            yield director
        finally:
            for name in list(director.members):
                await director.kill(name)
