"""Brings one batch into the gradient: groups are trained, added or skipped, each exactly once.

Advantages over the standard deviation of the batch are known with its last reward. Until then
groups are trained by centred ones, or held, as `Tables.batch_std` says. Centred ones may turn out
to be beyond the clip: what they have too much is then trained once more, and taken away. After the
first update, which waits for the last reward, all others train by the advantages themselves. They
are those of all rewards together, so if one of them changes afterwards, the batch begins again.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from services.trainer.batch.fetcher import AdmittedGroup, GroupFetcher
from services.trainer.batch.measures import batch_metrics, of_all_steps
from services.trainer.devices.pool import DevicePool, Outcome, QueuedGroup
from shared.bus.traces import did
from shared.devices.protocols import GroupData, Training
from shared.errors import ContractError, IntegrityError, OutOfMemory, Untrainable
from shared.learning.advantages import Scored, batch_scale
from shared.messages.contracts import GroupTrained, TrainGroup
from shared.process.worker import WorkerContext
from shared.recipe.recipe import Recipe
from shared.run.commits import TrainedGroup
from shared.telemetry import STAGE_SECONDS


@dataclass(slots=True)
class BatchInTraining:
    number: int
    part: range
    is_again: bool = False
    """Whether it was trained before: nobody is told of its groups."""
    """Groups that the next optimizer step is made of."""
    held: list[AdmittedGroup] = field(default_factory=list)
    """Groups of later parts."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the optimizer steps in between."""
    counted: set[int] = field(default_factory=set)
    """Groups that are in the gradient or on their way; whatever comes twice counts once."""
    trained: dict[int, TrainedGroup] = field(default_factory=dict)
    """Groups that are in the gradient."""
    commands: dict[int, TrainGroup] = field(default_factory=dict)
    """What the scheduler says of the groups that are counted."""
    final: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Advantages of all groups over the standard deviation of the batch, once they are known."""
    num_taken: int = 0
    """Number of groups of the part that are in the gradient or on their way."""
    scale: float = 1.0
    """What the optimizer step of this part multiplies the gradient of centred advantages by."""
    num_again: int = 0
    """Number of rows that were trained again, because the clip reaches them."""
    seconds: float = 0.0
    """Seconds that the trainer was busy with these groups."""
    outcomes: asyncio.Queue[Outcome | None] = field(default_factory=asyncio.Queue)
    """None: all rewards are known."""

    @property
    def in_index_order(self) -> tuple[TrainedGroup, ...]:
        return tuple(self.trained[index] for index in sorted(self.trained))

    @property
    def commands_in_order(self) -> tuple[TrainGroup, ...]:
        """What was sent of the groups that are in the gradient."""
        return tuple(self.commands[index] for index in sorted(self.trained))

    @property
    def scored(self) -> list[Scored]:
        """Rewards of the counted groups, by their index, and the scores that make them up."""
        return [_scored(self.commands[index]) for index in sorted(self.counted)]

    @property
    def part_is_trained(self) -> bool:
        return all(index in self.trained for index in self.part)

    def metrics(self, last_step: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the batch; ``last_step``: those of the optimizer step that makes
        the version."""
        groups = sorted(self.trained)
        ordered = (self.final.get(index, self.commands[index].advantages) for index in groups)
        advantages = [each for group in ordered for each in group]
        return {
            **batch_metrics(self.number, self.in_index_order, advantages),
            "rows_trained_again": float(self.num_again),
            "train_seconds": self.seconds,
            **of_all_steps([*self.steps, last_step]),
        }


class BatchTraining:
    def __init__(
        self,
        training: Training,
        pool: DevicePool,
        fetcher: GroupFetcher,
        recipe: Recipe,
        context: WorkerContext,
    ) -> None:
        self._training = training
        self._pool = pool
        self._fetcher = fetcher
        self._num_groups = recipe.batch.groups
        self._trained_samples = recipe.trained_samples
        self._part_size = recipe.batch.groups // recipe.trainer.updates
        self._deterministic = recipe.trainer.deterministic
        self._batch_std = recipe.batch_std
        self._algorithm = recipe.algorithm
        self._trains_zeros = recipe.trains_zeros
        self._advantages = recipe.advantages
        self._window = recipe.sampling.window
        self._trained_samples = recipe.trained_samples
        self._bus = context.bus
        self._worker = context.worker

    def open(self, number: int, *, is_again: bool = False) -> BatchInTraining:
        """Return the batch before any of its groups has come."""
        return BatchInTraining(number, range(self._part_size), is_again)

    async def run(
        self,
        batch: BatchInTraining,
        groups: AsyncGenerator[tuple[int, AdmittedGroup]],
        parent_commit: asyncio.Future[Any],
    ) -> None:
        """Train ``groups`` until every group of the batch is in the gradient, and every optimizer
        step is taken but the last one, which makes the version.

        Raises:
            OutOfMemory: if a group does not fit its device; the batch has to be begun again.
            Untrainable: if the network cannot take a group's tensors; the batch has to be begun
                again as well, and that group to be sent again.
            Exception: the one that ``parent_commit`` ends with: then the devices still finish what
                they are at, but nothing more of this batch is begun.
        """
        self._training.begin()
        reading = asyncio.create_task(self._read(batch, groups))
        finishing = asyncio.create_task(self._finish(batch))
        waiting: set[asyncio.Future[Any]] = {reading, finishing, parent_commit}
        try:
            while not finishing.done():
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in ended:
                    each.result()
        finally:
            self._pool.drop()
            for task in (reading, finishing):
                task.cancel()
            await asyncio.gather(reading, finishing, return_exceptions=True)

    async def _read(
        self, batch: BatchInTraining, groups: AsyncGenerator[tuple[int, AdmittedGroup]]
    ) -> None:
        async with contextlib.aclosing(groups):
            async for index, group in in_order(groups, self._deterministic):
                if index not in batch.counted:
                    batch.counted.add(index)
                    batch.commands[index] = group.command
                    batch.held.append(group)
                    if self._batch_std != "held":
                        await self._take_part(batch)
                    if self._all_known(batch):
                        await self._all_are_known(batch)

    def _all_known(self, batch: BatchInTraining) -> bool:
        """Whether every reward of the batch is known."""
        return len(batch.counted) == self._num_groups

    async def _all_are_known(self, batch: BatchInTraining) -> None:
        if self._batch_std == "held":
            batch.final = dict(enumerate(self._advantages.of_batch(batch.scored)))
            await self._take_part(batch)
        batch.outcomes.put_nowait(None)

    async def _take_part(self, batch: BatchInTraining) -> None:
        """Take the groups that the next optimizer step is made of, as far as they are there."""
        held, batch.held = batch.held, []
        batch.held += [group for group in held if group.command.group not in batch.part]
        for group in held:
            if group.command.group in batch.part:
                await self._take(batch, group)
        if batch.num_taken == self._part_size:
            self._pool.train_all()

    async def _take(self, batch: BatchInTraining, group: AdmittedGroup) -> None:
        command, work, tell = group.command, group.work, batch.outcomes.put_nowait
        final = batch.final.get(command.group)
        batch.num_taken += 1
        if work is not None and final is not None:
            is_zero = not (any(final) or self._trains_zeros)
            work = None if is_zero else replace(work, advantages=final, kind="final")
        match work:
            case GroupData() as data:
                left = self._part_size - batch.num_taken + 1
                is_last = self._pool.is_last(self._trained_samples, left)
                queued = QueuedGroup(command=command, data=data, tell=tell, is_last=is_last)
                await self._pool.train(queued)
            case None:
                self._training.skip(self._trained_samples)
                tell(Outcome(command))

    async def _finish(self, batch: BatchInTraining) -> None:
        while len(batch.trained) < self._num_groups:
            outcome = await batch.outcomes.get()
            if outcome is not None:
                await self._ended(batch, outcome)
            waits = self._batch_std is not None and not self._all_known(batch)
            if batch.part_is_trained and not waits:
                if self._batch_std == "late" and not batch.final:
                    await self._scale(batch)
                if batch.part.stop < self._num_groups:
                    await self._step_between(batch)

    async def _ended(self, batch: BatchInTraining, outcome: Outcome) -> None:
        """Count a group that is in the gradient, or have it sent again.

        Raises:
            OutOfMemory, Untrainable: if the batch has to be begun again.
        """
        if outcome.error is None:
            await self._trained(batch, outcome)
            return
        if batch.is_again and not isinstance(outcome.error, OutOfMemory):
            raise IntegrityError(str(outcome.error))
        if not isinstance(outcome.error, OutOfMemory):
            await self._fetcher.fail(outcome.command, outcome.error)
        if isinstance(outcome.error, OutOfMemory | Untrainable):  # partly in the gradient
            raise outcome.error
        if batch.final:
            raise Untrainable(f"others are trained by its rewards: {outcome.error}")
        batch.counted.discard(outcome.command.group)
        batch.num_taken -= 1

    async def _scale(self, batch: BatchInTraining) -> None:
        """Find what the gradient of centred advantages is multiplied by, now that every reward is
        known; take away what the clip does."""
        rewards = [each for rewards, _ in batch.scored for each in rewards]
        batch.scale = batch_scale([each for each in rewards if each is not None])
        await self._take_excess_away(batch)
        batch.final = {
            index: tuple(batch.scale * each for each in command.advantages)
            for index, command in batch.commands.items()
        }

    async def _take_excess_away(self, batch: BatchInTraining) -> None:
        """Train again what centred advantages of this part have beyond the clip."""
        ended: asyncio.Queue[Outcome] = asyncio.Queue()
        num_begun, limit = 0, self._algorithm.advantage_clip / batch.scale
        for index in batch.part:
            command = batch.commands[index]
            num_beyond = sum(abs(each) > limit for each in command.advantages)
            if not num_beyond:
                continue
            data = await self._fetcher.data(command)
            if data is None:
                raise await self._failed(command, ContractError("its samples are gone"))
            again = replace(data, kind="excess", limit=limit)
            await self._pool.train(QueuedGroup(command=command, data=again, tell=ended.put_nowait))
            num_begun += 1
            batch.num_again += self._window * min(num_beyond, self._trained_samples)
        self._pool.train_all()
        for _ in range(num_begun):
            outcome = await ended.get()
            if isinstance(outcome.error, ContractError):
                raise await self._failed(outcome.command, outcome.error)
            if outcome.error is not None:
                raise outcome.error
            batch.seconds += self._seconds(outcome)

    async def _failed(self, command: TrainGroup, error: ContractError) -> Untrainable:
        """Have a group that is in the gradient already sent again; return why the batch begins
        again."""
        await self._fetcher.fail(command, error)
        return Untrainable(str(error))

    async def _step_between(self, batch: BatchInTraining) -> None:
        """The weights after it are no version: nobody else ever sees them."""
        async with self._pool.all_held():
            batch.steps.append(await self._training.step(batch.number, batch.scale))
        batch.scale, batch.num_taken = 1.0, 0
        batch.part = range(batch.part.stop, batch.part.stop + self._part_size)
        await self._take_part(batch)

    async def _trained(self, batch: BatchInTraining, outcome: Outcome) -> None:
        command, seconds = outcome.command, self._seconds(outcome)
        if seconds:
            STAGE_SECONDS.labels(stage="trainer").observe(seconds)
        self._worker.num_done += 1
        batch.seconds += seconds
        if not batch.is_again:
            did("train", command, seconds=seconds, worker=self._worker.name)
            await self._tell(command, seconds)
        batch.trained[command.group] = trained_group(command)

    async def sent_again(self, batch: BatchInTraining, command: TrainGroup) -> None:
        """Report once more that a group is in the gradient: the scheduler waits for it, since NATS
        has lost the first report."""
        if command.group in batch.trained:
            await self._tell(command, seconds=0.0)

    async def _tell(self, command: TrainGroup, seconds: float) -> None:
        await self._bus.publish(
            GroupTrained(**command.answer_fields, worker=self._worker.address, seconds=seconds)
        )

    def _seconds(self, outcome: Outcome) -> float:
        """Return the seconds that the devices were busy, as if side by side."""
        return outcome.device_seconds / len(self._training.devices)


def _scored(command: TrainGroup) -> Scored:
    names = command.fragments[0].parts
    return (
        [reward for f in command.fragments for reward in f.rewards],
        {name: [score for f in command.fragments for score in f.parts[name]] for name in names},
    )


def trained_group(command: TrainGroup) -> TrainedGroup:
    """Return what a commit record says of a group."""
    names = command.fragments[0].parts
    return TrainedGroup(
        group=command.group,
        attempt=command.attempt,
        policy_version=command.policy.version,
        fragments=tuple(
            (f.fragment.first_sample, f.fragment.num_samples, f.fragment.attempt)
            for f in command.fragments
        ),
        workers=tuple(f.generated_by for f in command.fragments),
        rewards=tuple(reward for f in command.fragments for reward in f.rewards),
        parts={name: tuple(s for f in command.fragments for s in f.parts[name]) for name in names},
        dropped=command.dropped,
    )


Item = TypeVar("Item")


async def in_order(
    groups: AsyncIterator[tuple[int, Item]], deterministic: bool
) -> AsyncIterator[tuple[int, Item]]:
    """Yield (index, group) as they come, or held back until every smaller index has been given.

    A group that comes again, in a later attempt, replaces the one that is still held back; if that
    was given already, it is given as well.
    """
    held: dict[int, Item] = {}
    following = 0
    async for index, group in groups:
        if not deterministic or index < following:
            yield index, group
            continue
        held[index] = group
        while following in held:
            yield following, held.pop(following)
            following += 1
