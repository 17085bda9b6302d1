"""Brings one batch into the gradient: groups are trained, added or skipped, each exactly once.

The metrics of the batch that need no network are computed here as well, from its trained groups.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.trainer.batch.fetcher import AdmittedGroup, GroupFetcher
from services.trainer.devices.pool import DevicePool, Outcome, QueuedGroup
from shared.devices.protocols import GroupData, GroupGradient, Training
from shared.devices.slices import LAST_GROUPS
from shared.errors import ContractError, OutOfMemory, Untrainable
from shared.learning.advantages import population_std
from shared.learning.metrics import of_scorer
from shared.messages.contracts import GroupTrained, TrainGroup
from shared.process.worker import WorkerContext
from shared.recipe.recipe import Recipe
from shared.run.commits import TrainedGroup
from shared.telemetry import STAGE_SECONDS


@dataclass(slots=True)
class BatchInTraining:
    number: int
    part: range
    """Groups that the next optimizer step is made of."""
    held: list[AdmittedGroup] = field(default_factory=list)
    """Groups of later parts."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the optimizer steps in between."""
    counted: set[int] = field(default_factory=set)
    """Groups that are in the gradient or on their way; whatever comes twice counts once."""
    trained: dict[int, TrainedGroup] = field(default_factory=dict)
    """Groups that are in the gradient."""
    advantages: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Advantages that the samples of these groups were trained with."""
    seconds: float = 0.0
    """Seconds that the trainer was busy with these groups."""
    outcomes: asyncio.Queue[Outcome] = field(default_factory=asyncio.Queue)

    @property
    def in_index_order(self) -> tuple[TrainedGroup, ...]:
        return tuple(self.trained[index] for index in sorted(self.trained))

    @property
    def rewards(self) -> list[float]:
        """Rewards of the samples that could be scored."""
        every = (reward for group in self.in_index_order for reward in group.rewards)
        return [reward for reward in every if reward is not None]

    @property
    def part_is_trained(self) -> bool:
        return all(index in self.trained for index in self.part)

    def metrics(self, last_step: dict[str, float], scale: float) -> dict[str, float]:
        """Return the metrics of the batch.

        ``last_step``: those of the optimizer step that makes the version. ``scale``: what its
        gradient, and so its advantages, are multiplied by.
        """
        ordered = (self.advantages[index] for index in sorted(self.trained))
        advantages = [scale * each for group in ordered for each in group]
        return {
            **batch_metrics(self.number, self.in_index_order, advantages),
            "train_seconds": self.seconds,
            **_of_all_steps([*self.steps, last_step]),
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
        self._bus = context.bus
        self._worker = context.worker

    def open(self, number: int) -> BatchInTraining:
        """Return the batch before any of its groups has come."""
        return BatchInTraining(number, range(self._part_size))

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
                    if index in batch.part:
                        await self._take(batch, group)
                    else:
                        batch.held.append(group)

    async def _take(self, batch: BatchInTraining, group: AdmittedGroup) -> None:
        command, tell = group.command, batch.outcomes.put_nowait
        match group.work:
            case GroupData() as data:
                num_taken = sum(index in batch.part for index in batch.counted)
                is_last = self._part_size - num_taken < LAST_GROUPS
                queued = QueuedGroup(command=command, data=data, tell=tell, is_last=is_last)
                await self._pool.train(queued)
            case GroupGradient() as part:
                try:
                    await self._training.add(part)
                except ContractError as error:
                    tell(Outcome(command, error=error))
                else:
                    tell(Outcome(command))
            case None:
                self._training.skip(self._trained_samples)
                tell(Outcome(command))

    async def _finish(self, batch: BatchInTraining) -> None:
        while len(batch.trained) < self._num_groups:
            outcome = await batch.outcomes.get()
            if isinstance(outcome.error, OutOfMemory | Untrainable):  # partly in the gradient
                if isinstance(outcome.error, Untrainable):
                    await self._fetcher.fail(outcome.command, outcome.error)
                raise outcome.error
            if outcome.error is None:
                await self._trained(batch, outcome)
            else:
                batch.counted.discard(outcome.command.group)
                await self._fetcher.fail(outcome.command, outcome.error)
            if batch.part_is_trained and batch.part.stop < self._num_groups:
                await self._step_between(batch)

    async def _step_between(self, batch: BatchInTraining) -> None:
        """The weights after it are no version: nobody else ever sees them."""
        async with self._pool.all_held():
            batch.steps.append(await self._training.step(batch.number))
        batch.part = range(batch.part.stop, batch.part.stop + self._part_size)
        held, batch.held = batch.held, []
        for group in held:
            if group.command.group in batch.part:
                await self._take(batch, group)
            else:
                batch.held.append(group)

    async def _trained(self, batch: BatchInTraining, outcome: Outcome) -> None:
        command = outcome.command
        seconds = outcome.device_seconds / len(self._training.devices)  # as if side by side
        if seconds:
            STAGE_SECONDS.labels(stage="trainer").observe(seconds)
        self._worker.num_done += 1
        batch.seconds += seconds
        await self._bus.publish(
            GroupTrained(
                batch=command.batch,
                group=command.group,
                attempt=command.attempt,
                worker=self._worker.address,
                seconds=seconds,
            )
        )
        batch.trained[command.group] = _record(command)
        batch.advantages[command.group] = command.advantages


def _of_all_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the last step's metrics, which count all rows of the batch; but the loss and the
    metrics of a gradient, which each step has its own, over all of them."""
    num = len(steps)
    if num == 1:
        return steps[0]
    norms = [step["grad_norm"] for step in steps]
    return {
        **steps[-1],
        "loss": steps[-1]["loss"] / num,
        "grad_norm": sum(norms) / num,
        "skipped_not_finite": sum(step["skipped_not_finite"] for step in steps),
    }


def _record(command: TrainGroup) -> TrainedGroup:
    names = command.fragments[0].parts
    added = command.contribution
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
        contribution=None if added is None else added.gradient,
        trained_by=None if added is None else added.worker,
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


def batch_metrics(
    batch: int, groups: Sequence[TrainedGroup], advantages: Sequence[float]
) -> dict[str, float]:
    """Return the metrics of rewards, advantages and staleness.

    ``advantages``: those of all samples, as they count in the gradient. Means of rewards and scores
    are over the samples that could be scored; 0 if none could.
    """
    num_samples = len(advantages)
    rewards = _known(reward for group in groups for reward in group.rewards)
    stale = sum((batch - group.policy_version) * len(group.rewards) for group in groups)
    found = {
        "reward_mean": _mean(rewards),
        "reward_std": _deviation(rewards),
        "failed_fraction": 1 - len(rewards) / num_samples,
        "dropped_groups": float(sum(group.dropped is not None for group in groups)),
        "advantage_mean": _mean(advantages),
        "advantage_std": population_std(advantages),
        "advantage_min": min(advantages),
        "advantage_max": max(advantages),
        "staleness_mean": stale / num_samples,
    }
    for scorer in groups[0].parts:
        scores = _known(score for group in groups for score in group.parts[scorer])
        found[of_scorer("reward_mean", scorer)] = _mean(scores)
        found[of_scorer("reward_std", scorer)] = _deviation(scores)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _deviation(values: Sequence[float]) -> float:
    return population_std(values) if values else 0.0


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
