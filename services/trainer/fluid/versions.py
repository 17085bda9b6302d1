"""The version that a member has in use: made by its own step, or fetched; compared, and committed.

The reference is the result of others: the step of the committing member, and then the published
version. A member whose own step has other bits reports it, and fetches the version. While it waits
for that, it can still generate if only its optimizer differs.
"""

import asyncio
import json
import time
from functools import partial

import structlog

from services.trainer import limits
from services.trainer.fluid.committing import GroupsLost, SteppedVersion, VersionCommits
from services.trainer.fluid.protocols import FluidDevice
from services.trainer.fluid.replay import Replay
from services.trainer.fluid.state import MemberState, ReferenceVersion
from shared.errors import CommitConflict, DigenRLError, IntegrityError
from shared.limits import WORKER_RETRY_S
from shared.messages import subjects
from shared.messages.contracts import Policy, PolicyPublished
from shared.process.worker import WorkerContext, patiently
from shared.run.commits import CommitRecord, newest_commit
from shared.run.layout import commit_key, first_version_key
from shared.run.shards import open_tensors

log = structlog.get_logger()


class MemberVersions:
    def __init__(
        self, device: FluidDevice, state: MemberState, replay: Replay, context: WorkerContext
    ) -> None:
        self._device = device
        self._replay = replay
        self._state = state
        self._bus = context.bus
        self._store = context.store
        self._worker = context.worker
        self._committing = VersionCommits(context)
        self._news = asyncio.Event()
        """Set when a version is published, or found to differ."""
        self._published = -1
        """Newest version that is published."""
        self._said: str | None = None
        """Checksum that this member has reported as different."""
        self.made: SteppedVersion | None = None
        """The version that this member has stepped to last."""

    async def recover(self) -> None:
        """Take over the newest commit, or make the first one; announce it either way."""
        if await patiently(self._newest, "commits_unavailable") is None:
            await self._make_first()
        with self._worker.doing("loading_weights"):
            record = await self.fetch()
        await self._committing.announce(record, again=True)

    async def follow(self) -> None:
        """Record each published version, without end."""
        subject = subjects.event_subject(self._bus.run, "policy_published")
        async for received in self._bus.follow(subjects.EVT, [subject]):
            event = received.message
            if isinstance(event, PolicyPublished):
                self._published = max(self._published, event.policy.version)
                if event.checksum is not None:
                    self.compare(ReferenceVersion(event.policy, event.checksum, event.worker))
                self._news.set()

    async def keep_up(self) -> None:
        """Fetch each published version that is not in use here, without end."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._lacks_published and self._state.holds_total_of(self._published - 1):
                await asyncio.sleep(limits.STEP_WAIT_S)  # told to step, on another stream
            if self._lacks_published:
                with self._worker.doing("loading_weights"):
                    await self.fetch()

    def compare(self, reference: ReferenceVersion) -> None:
        """Record the reference checksum and report a mismatch."""
        self._state.refer(reference)
        difference, here = self._state.differs, self._state.newest_checksum
        if difference is None:
            if self._said is not None and (self._said, reference.checksum) == (here, here):
                self._said = None  # the step that it differed from was not committed: this one was
                self._state.trust()
            return
        self._news.set()
        if self._said == self._state.newest_checksum:
            return  # by the step of its committer, before it is published
        self._said = self._state.newest_checksum
        log.error(
            "step_differs", version=difference.policy.version, committer=difference.worker,
            theirs=difference.checksum, here=self._state.newest_checksum,
        )  # fmt: skip
        self._state.doubt()

    async def fetch(self) -> CommitRecord:
        """Take over the newest commit; retry until its objects are available."""
        while True:
            record = await patiently(self._newest, "commits_unavailable")
            if record is None:  # the store does not show it yet
                await asyncio.sleep(WORKER_RETRY_S)
                continue
            try:
                await patiently(partial(self._adopt, record), "store_unavailable")
                return record
            except IntegrityError as error:
                log.warning("version_unavailable", error=str(error))
                newest = await patiently(self._newest, "commits_unavailable")
                if newest == record and await self._rebuild(record, error):
                    return record
            await asyncio.sleep(WORKER_RETRY_S)  # deleted meanwhile, as there are newer ones

    async def _rebuild(self, record: CommitRecord, damage: IntegrityError) -> bool:
        """Make a damaged version again, if that is possible; else report a remedy."""
        version = record.policy.version
        note = f"version {version} is damaged in the store and is recomputed from an older version"
        try:
            with self._worker.saying(note):
                await patiently(partial(self._use_recomputed, record, damage), "store_unavailable")
            return True
        except DigenRLError as error:
            key = commit_key(self._bus.run, version)
            advice = (
                f"version {version} is damaged in the store ({damage}) and cannot be recomputed "
                f"({error}): restore its objects from a backup; or stop the run, move {key} out "
                f"of the store and start it again, which trains batch {version - 1} again"
            )
            log.error("version_lost", version=version, advice=advice)
            with self._worker.saying(advice[:4000]):
                await asyncio.sleep(limits.LOST_VERSION_RETRY_S)
            return False

    async def _use_recomputed(self, record: CommitRecord, damage: IntegrityError) -> None:
        async with self._state.lock, self._state.sums:
            self._state.lose()
            version = await self._replay.recompute(record, damage)
            self._state.use(version.policy, version.checksum)

    def commit(self, batch: int, tasks: asyncio.TaskGroup) -> None:
        """Commit this member's version of a batch, concurrently with the next one; without one, do
        nothing."""
        version = self.made
        if version is not None and version.batch == batch and self._state.newest == version.policy:
            tasks.create_task(self._committed(version))

    async def _committed(self, version: SteppedVersion) -> None:
        """Copy a version while it is in use, which it is until it is committed, and commit it."""
        try:
            snapshot = await self._device.weights()
            if self._state.newest != version.policy:
                log.warning("commit_too_late", version=version.policy.version)
                return
            await self._committing.commit(version, snapshot)
        except CommitConflict:  # by one that died, or by this one: the answer of the store was lost
            log.info("committed_by_another", version=version.policy.version)
            if (record := await patiently(self._newest, "commits_unavailable")) is not None:
                await self._committing.announce(record, again=True)
        except DigenRLError as error:
            log.error("commit_failed", version=version.policy.version, error=str(error))
            if isinstance(error, GroupsLost):  # nobody ever can: others train the batch again
                await self.go_back()

    async def go_back(self) -> None:
        """Use the newest commit instead of what this member has made."""
        self.made = None
        self._state.references.clear()  # what the attempt before has made is no reference
        self._state.lose()
        await self.fetch()

    async def _make_first(self) -> None:
        """Commit version 0, which is the same in every process. One member makes it, since its
        weights and states are many bytes; the others do if that one takes too long, or has died."""
        maker = await patiently(self._maker_of_first, "store_unavailable")
        if maker != self._worker.name:
            with self._worker.saying(f"waits for {maker} to store the first version"):
                if await self._is_made_within(limits.FIRST_VERSION_S):
                    return
            log.warning("first_version_late", maker=maker, waited_seconds=limits.FIRST_VERSION_S)
        with self._worker.doing("loading_weights"):
            digest = await asyncio.to_thread(self._device.weights_digest)
            policy = Policy(version=0, weights_digest=digest)
            version = SteppedVersion(policy, await self._device.checksum(), began=time.monotonic())
            try:
                await self._committing.commit(version, await self._device.weights())
            except CommitConflict:
                log.info("committed_by_another", version=0)

    async def _maker_of_first(self) -> str:
        """Return the name of the member that makes the first version: the first to announce it."""
        key, name = first_version_key(self._bus.run), self._worker.name
        if await self._store.create(key, json.dumps({"maker": name}).encode()):
            return name
        try:
            return str(json.loads(await self._store.read(key) or b"")["maker"])
        except (ValueError, KeyError, TypeError):
            return name

    async def _is_made_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if await patiently(self._newest, "commits_unavailable") is not None:
                return True
            await asyncio.sleep(WORKER_RETRY_S)
        return False

    async def _newest(self) -> CommitRecord | None:
        return await newest_commit(self._store, self._bus.run)

    async def _adopt(self, record: CommitRecord) -> None:
        """Fetch the weights and states of a version, and use them.

        Raises:
            IntegrityError: if they do not match the record.
        """
        version, digest = record.policy.version, record.policy.weights_digest
        if await self._began_with(record):
            return
        trained = record.learned
        weights = await open_tensors(self._store, trained.ref, trained.digest)
        checkpoint = await open_tensors(self._store, record.checkpoint, trained.digest)
        async with self._state.lock, self._state.sums:
            if self._has(record):
                return
            self._state.lose()
            await self._device.restore(weights, checkpoint)
            own_digest = await asyncio.to_thread(self._device.weights_digest)
            checksum = await self._device.checksum()
            if own_digest != digest or record.checksum not in (None, checksum):
                raise IntegrityError(f"version {version}: its weights or states have other bits")
            self._state.use(record.policy, checksum)
        log.info("version_fetched", version=version, checksum=checksum)

    async def _began_with(self, record: CommitRecord) -> bool:
        """Use the first version, if the device has begun with the same bits: nothing is read."""
        if record.policy.version or self._state.policy is not None or record.checksum is None:
            return False
        async with self._state.lock, self._state.sums:
            checksum = await self._device.checksum()
            own_digest = await asyncio.to_thread(self._device.weights_digest)
            if (own_digest, checksum) != (record.policy.weights_digest, record.checksum):
                return False
            self._device.begin()
            self._state.use(record.policy, checksum)
        return True

    def _has(self, record: CommitRecord) -> bool:
        """Whether a version is in use, or a later one: by a step that this member was still at."""
        state = self._state
        same = (state.newest, state.newest_checksum) == (record.policy, record.checksum)
        return same or state.version > record.policy.version

    @property
    def _lacks_published(self) -> bool:
        """Whether the newest published version is not the one in use."""
        version = self._state.version
        is_other = version == self._published and self._state.differs is not None
        return version < self._published or is_other
