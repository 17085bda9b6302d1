"""Lets groups that may be trained into a batch, and fetches them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from services.trainer import limits
from shared.devices.protocols import GroupData
from shared.errors import AdmissionError, ContractError, DigenRLError, IntegrityError
from shared.messages.contracts import (
    FragmentFailed,
    FragmentScored,
    GroupFailed,
    ObjectRef,
    TrainGroup,
)
from shared.messages.staleness import AdmissibleVersions, check_admission
from shared.process.worker import WorkerContext, patiently
from shared.recipe.recipe import Recipe
from shared.telemetry import FRAGMENTS


class TrajectoryCache:
    """Holds what this process's device has generated. Each trajectory is taken once; the
    oldest make room, and are then read from the store as others are."""

    def __init__(self, max_bytes: int = limits.MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[ObjectRef, bytes] = {}
        self._size = 0

    def keep(self, ref: ObjectRef, data: bytes) -> None:
        self.take(ref)
        self._kept[ref] = data
        self._size += len(data)
        while self._size > self._max_bytes:
            self.take(next(iter(self._kept)))

    def take(self, ref: ObjectRef) -> bytes | None:
        data = self._kept.pop(ref, None)
        self._size -= len(data or b"")
        return data


log = structlog.get_logger()

CheckStored = Callable[[bytes, bytes, int], None]
"""(trajectory, conditions, samples): raises ContractError unless they can be trained."""


@dataclass(frozen=True, slots=True)
class AdmittedGroup:
    command: TrainGroup
    work: GroupData | None
    """Data to train; None if the gradient is zero."""


class GroupFetcher:
    def __init__(
        self,
        recipe: Recipe,
        context: WorkerContext,
        cache: TrajectoryCache,
        check: CheckStored | None = None,
    ) -> None:
        """``check``: looks at each stored fragment, in a thread."""
        self._check = check
        self._skips_zeros = not recipe.trains_zeros
        self._bus = context.bus
        self._store = context.store
        self._cache = cache
        self._failed: set[tuple[int, int, int]] = set()
        """(batch, group, attempt) that were reported as failed: a retry of their batch leaves them
        out."""

    async def fetch_trained(
        self, commands: Sequence[TrainGroup]
    ) -> AsyncGenerator[tuple[int, AdmittedGroup]]:
        """Yield groups that were trained before, from their stored commands.

        Raises:
            IntegrityError: if one of their objects is damaged or no longer in the store.
        """
        for command in commands:
            yield command.group, AdmittedGroup(command, await self._work_of(command))

    async def _work_of(self, command: TrainGroup) -> GroupData | None:
        if self._skips_zeros and not any(command.advantages):
            return None
        stored = [fragment.stored for fragment in command.fragments]
        return GroupData(
            trajectories=tuple([await self._store.get(each.trajectory) for each in stored]),
            conditions=await self._store.get(stored[-1].conditions),
            advantages=command.advantages,
            staleness=command.batch - command.policy.version,
        )

    async def fail(self, command: TrainGroup, error: DigenRLError) -> None:
        """Report that the scheduler has to issue a group again."""
        self._failed.add((command.batch, command.group, command.attempt))
        log.error("group_failed", batch=command.batch, group=command.group, error=str(error))
        await self._bus.publish(GroupFailed(**command.answer_fields, reason=str(error)[:4000]))

    async def admitted(
        self, command: TrainGroup, admissible: AdmissibleVersions
    ) -> AdmittedGroup | None:
        """Return the group with what is needed of it; or None, having reported what is faulty of
        it, if it may not be trained."""
        refused = [f for f in command.fragments if not await self._admits(f, command, admissible)]
        if refused:
            return None
        if self._skips_zeros and not any(command.advantages):
            return AdmittedGroup(command, None)
        data = await self.data(command)
        return None if data is None else AdmittedGroup(command, data)

    async def _admits(
        self, fragment: FragmentScored, command: TrainGroup, admissible: AdmissibleVersions
    ) -> bool:
        try:
            check_admission(fragment, command, admissible)
            if fragment.parts.keys() != command.fragments[0].parts.keys():
                raise AdmissionError("its scorers differ from the rest of its group")
        except AdmissionError as error:
            await self._refuse(fragment, error)
            return False
        return True

    async def data(self, command: TrainGroup) -> GroupData | None:
        """Fetch what is stored of the group; None, having refused them, if fragments are faulty."""
        stored = [fragment.stored for fragment in command.fragments]
        # The conditions of one prompt are one object, or few: each is read once.
        refs = dict.fromkeys(ref for each in stored for ref in (each.trajectory, each.conditions))
        read = {ref: asyncio.ensure_future(self._get(ref)) for ref in refs}
        await asyncio.gather(*read.values(), return_exceptions=True)
        fragments = [await self._fragment(each, read) for each in command.fragments]
        whole = [each for each in fragments if each is not None]
        if len(whole) < len(fragments):
            return None
        return GroupData(
            trajectories=tuple(trajectory for trajectory, _ in whole),
            conditions=whole[-1][1],
            advantages=command.advantages,
            staleness=command.batch - command.policy.version,
        )

    async def _get(self, ref: ObjectRef) -> bytes:
        cached = self._cache.take(ref)
        if cached is not None:
            return cached
        return await patiently(partial(self._store.get, ref), "store_unavailable", key=ref.key)

    async def _fragment(
        self, fragment: FragmentScored, read: Mapping[ObjectRef, asyncio.Future[bytes]]
    ) -> tuple[bytes, bytes] | None:
        """Return its trajectory and its prompt's conditions; None after refusing it, if one of the
        two is faulty."""
        stored = fragment.stored
        try:
            contents = read[stored.trajectory].result(), read[stored.conditions].result()
            if self._check is not None:
                await asyncio.to_thread(self._check, *contents, fragment.fragment.num_samples)
            return contents
        except (IntegrityError, ContractError) as error:
            await self._refuse(fragment, error)
            return None

    async def _refuse(self, fragment: FragmentScored, error: DigenRLError) -> None:
        log.error("fragment_refused", slot=str(fragment.fragment.slot), error=str(error))
        FRAGMENTS.labels(stage="admission", outcome="refused").inc()
        await self._bus.publish(
            FragmentFailed(
                slot=fragment.fragment.slot,
                stage="admission",
                reason=str(error)[:4000],
                worker=None,
            )
        )
