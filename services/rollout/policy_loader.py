"""Loads policy versions into a rollout worker: the next is staged while the current one generates.

Three things lead a device to a version's weights, each for a case of its own:

    event    A version is announced: its weights are staged at once, concurrently with
        generation. The commit record names the weights; an announcement without a record is
            refused.
    task     A fragment names the version that is to generate it, with its digest. This version
        is put in use before the fragment begins; usually it is staged by then. For a version
            that fluid devices have made and not yet committed, the fragment also names its
            weights: they are staged on arrival.
    Redis    If it is not staged, because the task came before the event or staging has failed,
        the index of versions names its weights. Workers read nothing else from Redis; if Redis
            is down or has lost its data, the commit record has the same.

Either way the weights are used only if their digest is the one that the task names. A device that
has the weights before them reads only the change, if one is stored.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError

from shared.devices.protocols import RolloutDevice, StagedVersion
from shared.errors import ContractError, DigenRLError, IntegrityError, Unavailable
from shared.limits import WORKER_RETRY_S
from shared.messages import subjects
from shared.messages.contracts import ObjectRef, Policy, PolicyPublished
from shared.process.worker import WorkerContext, patiently
from shared.run.commits import CommitRecord, newest_commit, read_commit
from shared.run.layout import weights_folder
from shared.run.shards import open_tensors
from shared.run.versions import Version, VersionIndex
from shared.telemetry import ANNOUNCEMENTS_REFUSED, WEIGHTS_LOAD_SECONDS, WEIGHTS_PAUSE_SECONDS

log = structlog.get_logger()


class PolicyLoader:
    """Knows which version is in use, and which one is newest."""

    def __init__(self, device: RolloutDevice, context: WorkerContext, index: VersionIndex) -> None:
        self._device = device
        self._bus = context.bus
        self._store = context.store
        self._worker = context.worker
        self._index = index
        self._policy: Policy | None = None
        self._loading: Policy | None = None
        """Version that a fragment waits for."""
        self._staging: tuple[Policy, asyncio.Task[StagedVersion]] | None = None
        self.newest = -1
        """Highest version that this worker knows to be published."""

    async def follow(self) -> None:
        """Stage each published version, without end; first the newest committed one."""
        record = await self._read(lambda: newest_commit(self._store, self._bus.run))
        if record is not None:
            self._published(record)
        subject = subjects.event_subject(self._bus.run, "policy_published")
        async for received in self._bus.follow(subjects.EVT, [subject]):
            event = received.message
            if isinstance(event, PolicyPublished) and event.policy.version > self.newest:
                await self._announced(event.policy)

    async def _announced(self, policy: Policy) -> None:
        """Stage the weights of the commit record: any process that may publish could announce wrong
        ones."""
        record = await self._read(lambda: read_commit(self._store, self._bus.run, policy.version))
        if record is None or record.policy != policy:
            ANNOUNCEMENTS_REFUSED.inc()
            log.error("announcement_without_commit", version=policy.version)
            return
        await self._measure_line()
        self._published(record)

    async def _measure_line(self) -> None:
        """Wait until the first bytes show the line's rate. If versions came faster than that, and
        each ended the fetch of the one before, the device would take no part, without a reason."""
        while self._staging is not None and self._store.traffic.down.rate is None:
            done, _ = await asyncio.wait({self._staging[1]}, timeout=WORKER_RETRY_S)
            if done:
                return

    def _published(self, record: CommitRecord) -> None:
        self.newest = record.policy.version
        self._stage_in_background(record)

    def prestage(self, policy: Policy, weights: ObjectRef | None) -> None:
        """Stage a version that a fragment names before it is committed. It may never be, so that
        the newest one stays what it is."""
        if weights is not None and policy.version > self.newest and self._is_own(weights):
            self._stage_in_background(Version(policy=policy, weights=weights))

    def _is_own(self, weights: ObjectRef) -> bool:
        """Whether an object is among the run's weights: a process that may announce weights could
        name other objects."""
        keys = [weights.key, *([weights.change.ref.key] if weights.change else [])]
        return all(key.startswith(f"{weights_folder(self._bus.run)}/") for key in keys)

    def _stage_in_background(self, version: CommitRecord | Version) -> None:
        """Stage a version concurrently with generation, unless it is present or being loaded."""
        staging, policy = self._staging, version.policy
        here = (self._policy, self._loading, None if staging is None else staging[0])
        if policy in here:
            return
        if staging is not None:
            staging[1].cancel()
        self._staging = policy, asyncio.create_task(self._stage(version))

    async def _read(
        self, read: Callable[[], Awaitable[CommitRecord | None]]
    ) -> CommitRecord | None:
        """Read a commit record, over outages of the store; None if none can be read."""
        try:
            return await patiently(read, "commits_unavailable")
        except ContractError as error:
            log.error("commit_unreadable", error=str(error))
            return None

    async def adopt(self, policy: Policy, weights: ObjectRef | None = None) -> bool:
        """Put ``policy`` in use, if it is not yet; retry until its weights are available.

        ``weights``: their location, if the fragment names it. False, and it need not be in use, if
        a newer version is published.

        Raises:
            IntegrityError: if the weights do not match ``policy``.
        """
        while self.newest <= policy.version:
            try:
                if self._policy != policy:
                    await self._adopt(policy, weights)
                return True
            except Unavailable as error:
                log.warning("weights_unavailable", error=str(error))
                await asyncio.sleep(WORKER_RETRY_S)
            except IntegrityError:  # those of an old version are deleted
                record = await self._read(lambda: newest_commit(self._store, self._bus.run))
                if record is None or record.policy.version <= policy.version:
                    raise
                if record.policy.version > self.newest:
                    self._published(record)
        return False

    async def _adopt(self, policy: Policy, weights: ObjectRef | None) -> None:
        """Exchange the weights between two fragments, without copying."""
        self._loading = policy
        try:
            with self._worker.doing("loading_weights"):
                staged = await self._staged(policy, weights)
        finally:
            self._loading = None
        if staged.digest != policy.weights_digest:
            raise IntegrityError(f"version {policy.version}: its weights have another digest")
        began = time.monotonic()
        with self._worker.doing("generating"):  # of the fragment that waits for it
            await staged.adopt()
        pause = time.monotonic() - began
        WEIGHTS_PAUSE_SECONDS.observe(pause)
        self._policy = policy
        self._worker.policy_version = policy.version
        log.info("policy_adopted", version=policy.version, pause_ms=round(1000 * pause, 3))

    async def _staged(self, policy: Policy, weights: ObjectRef | None) -> StagedVersion:
        staging, self._staging = self._staging, None
        if staging is not None and staging[0] == policy:
            try:
                return await staging[1]
            except DigenRLError as error:
                log.warning("staging_failed", version=policy.version, error=str(error))
        elif staging is not None:
            self._staging = staging
        if weights is not None:
            if not self._is_own(weights):
                raise IntegrityError(f"{weights.key} are no weights of this run")
            return await self._stage(Version(policy=policy, weights=weights))
        return await self._stage(await self._version(policy))

    async def _stage(self, version: CommitRecord | Version) -> StagedVersion:
        began = time.monotonic()
        digest = version.policy.weights_digest
        staged = await self._changed(version)
        if staged is None:
            weights = await open_tensors(self._store, version.weights, digest)
            staged = await self._device.stage(weights)
        WEIGHTS_LOAD_SECONDS.observe(time.monotonic() - began)
        self._worker.staged = version.policy.version
        self._worker.report_now()
        return staged

    async def _changed(self, version: CommitRecord | Version) -> StagedVersion | None:
        """Stage a version by its change from the one in use; None if that cannot be done."""
        change, policy = version.weights.change, self._policy
        if change is None or policy is None or policy.weights_digest != change.base:
            return None
        try:
            staged = await self._device.stage(await open_tensors(self._store, change.ref))
        except (ContractError, IntegrityError) as error:
            log.warning("change_unavailable", version=version.policy.version, error=str(error))
            return None
        is_right = staged.digest == version.policy.weights_digest
        return staged if is_right else None

    async def _version(self, policy: Policy) -> CommitRecord | Version:
        """Look up its weights in the index, or in the commit record if the index lacks them."""
        try:
            policy_record = await self._index.lookup(policy.version)
        except (DigenRLError, RedisError) as error:
            log.warning("version_index_unavailable", error=str(error))
            policy_record = None
        record = policy_record or await read_commit(self._store, self._bus.run, policy.version)
        if record is None or record.policy != policy:
            raise IntegrityError(f"version {policy.version} is not a committed one")
        return record
