"""The real scheduler with many fluid devices, which answer at once: the fleet of `live`."""

import asyncio
from dataclasses import dataclass, field, replace

from bench.growth.core import REF, plan_of, policy_of, published, results_of
from bench.growth.fluid_core import GROUP_SECONDS, checksum_of
from bench.growth.history import METRICS
from bench.growth.live import RUN, Fleet
from services.scheduler.core.fluid.cutting import part_of_group
from services.scheduler.core.state import Plan
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment
from shared.messages.fluid import (
    ExchangeSums,
    PieceTrained,
    Share,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
)
from shared.messages.workers import Device, Holds, WorkerStatus
from shared.recipe.schedule import RunSchedule
from shared.run.commits import CommitRecord, commit, record_digest


def fluid_plan_of(members: int) -> Plan:
    """A batch with a group for each member, in two fragments."""
    return replace(
        plan_of(members, 2), num_groups=members, trained_steps=8,
        schedule=RunSchedule(mode="fluid", fragment_size=8, max_staleness=0),
    )  # fmt: skip


@dataclass(slots=True)
class FluidFleet(Fleet):
    """All members of the run, in one process that reads each message once."""

    version: int = 0
    shares: tuple[Share, ...] = ()
    plan: Plan = field(default_factory=lambda: fluid_plan_of(1))

    @property
    def names(self) -> list[str]:
        return [f"m{number}" for number in range(self.num_workers)]

    async def run(self) -> None:
        self.plan = fluid_plan_of(self.num_workers)
        await self.commit()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.report())
            tasks.create_task(self.answer(subjects.TASK))
            tasks.create_task(self.answer(subjects.FLUID))

    def statuses(self) -> list[WorkerStatus]:
        holds = Holds(version=self.version, checksum=checksum_of(self.version), update=0)
        return [
            WorkerStatus(
                service="trainer", worker=name, address=f"{name}-0", activity="generating",
                device=Device(concurrency=1), policy_version=self.version, holds=holds,
            )
            for name in self.names
        ]  # fmt: skip

    async def answer(self, stream: subjects.Stream) -> None:
        async for received in self.bus.follow(stream):
            match received.message:
                case GenerateFragment() as command:
                    for result in results_of(command):
                        await self.send(result)
                case TrainPiece() as command:
                    seconds = GROUP_SECONDS * part_of_group(self.plan, command.piece)
                    await self.send(PieceTrained(
                        **command.answer_fields, seconds=seconds,
                    ))  # fmt: skip
                case ExchangeSums() as command:
                    self.shares = command.shares
                    for share in command.shares:
                        await self.send(SumHeld(
                            **command.answer_fields, worker=share.worker,
                            sum_id=f"{command.batch:064x}", norm=1.0, finite=True, scale=1.0,
                            seconds=0.0,
                        ))  # fmt: skip
                case TakeStep() as command:
                    await self.step(command)
                case _:
                    pass

    async def step(self, command: TakeStep) -> None:
        """Have all members step, and the committer commit."""
        self.version = command.batch + 1
        for share in self.shares:
            await self.send(Stepped(
                **command.answer_fields, worker=share.worker, policy=policy_of(self.version),
                checksum=checksum_of(self.version),
                is_reference=share.worker == command.committer, seconds=0.0,
            ))  # fmt: skip
        await self.commit()

    async def commit(self) -> None:
        parent = None if self.head is None else record_digest(self.head.encode())
        self.head = CommitRecord(
            run=RUN, policy=policy_of(self.version), parent=parent, weights=REF, checkpoint=REF,
            metrics=METRICS if self.version else {}, worker="m0-0",
            checksum=checksum_of(self.version), shares=self.shares,
        )  # fmt: skip
        await commit(self.store, self.head)
        event = published(self.version).model_copy(update={"checksum": checksum_of(self.version)})
        await self.bus.publish(event)
