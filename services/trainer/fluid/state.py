"""State that the parts of a member share: the version in use, its lock, and reports of other
members."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.trainer.fluid.exchange import Place
from services.trainer.fluid.ledger import Ledger
from shared.messages.contracts import Policy
from shared.messages.fluid import ExchangeSums, Share
from shared.messages.workers import Holds
from shared.process.worker import Worker


@dataclass(frozen=True, slots=True)
class ReferenceVersion:
    """The reference for a version, as its committer made it."""

    policy: Policy
    checksum: str
    worker: str
    """Address of that one."""
    update: int = 0
    """Updates of the batch that were taken since, where they have made no version yet."""


@dataclass(frozen=True, slots=True)
class HeldTotal:
    """The total of a round, which this member could step from."""

    message: ExchangeSums
    total: object
    """`services.trainer.fluid.sums.Term`"""


@dataclass(frozen=True, slots=True)
class Updates:
    """The updates of a batch that were taken, where they have made no version yet."""

    attempt: int
    """The attempt at the batch in which they were taken."""
    checksum: str
    """The checksum of the weights and optimizer state after the updates."""
    shares: tuple[Share, ...]
    """The shares that the updates were made of."""
    metrics: tuple[Mapping[str, float], ...]
    """The metrics of each step."""

    @property
    def number(self) -> int:
        return len(self.metrics)


@dataclass(slots=True)
class MemberState:
    """Versions, total and updates that the device holds; each change is reported."""

    worker: Worker
    ledger: Ledger
    place: Place
    sum_bytes: int
    """Bytes of a sum of gradients."""
    available: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be work for the device."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the device is used: for a fragment, a piece, or a change of its weights."""
    sums: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held, within `lock` if both are, while the sum is changed, copied or stepped."""
    policy: Policy | None = None
    """The version in use, committed or not."""
    checksum: str | None = None
    before: Policy | None = None
    """The version before, if its weights are kept and still generate."""
    ahead: tuple[Policy, str] | None = None
    """Version and checksum of a finished concurrent step, until it is taken."""
    steps_concurrently: bool = False
    """Whether the version in use stays as it is while the batch's updates are taken."""
    updates: Updates | None = None
    """Those that were taken since the newest version."""
    references: dict[tuple[int, int], ReferenceVersion] = field(default_factory=dict)
    """The newest two, by their versions and updates."""
    held: HeldTotal | None = None

    @property
    def newest(self) -> Policy | None:
        """The newest version that the device holds, in use or not yet."""
        return self.policy if self.ahead is None else self.ahead[0]

    @property
    def newest_checksum(self) -> str | None:
        if self.updates is not None:
            return self.updates.checksum
        return self.checksum if self.ahead is None else self.ahead[1]

    @property
    def version(self) -> int:
        """Number of the newest version that the device holds; -1 for none."""
        return -1 if self.newest is None else self.newest.version

    @property
    def version_in_use(self) -> int:
        return -1 if self.policy is None else self.policy.version

    def use(self, policy: Policy, checksum: str) -> None:
        """Note that the device holds another version: all of it, ready for the next step. The
        caller holds the device."""
        self.policy, self.checksum, self.held = policy, checksum, None
        self.before = self.ahead = self.updates = None
        self._hold(policy, checksum)

    def go_on(self, policy: Policy, updates: Updates) -> None:
        """Note that the device has taken an update that makes no version. Unless it is kept, the
        batch's version generates nothing from now on."""
        self.policy, self.updates, self.held = policy, updates, None
        self.ledger.go_on()
        self._report_held(policy.version, updates.checksum, updates.number)
        self.available.set()

    def make(self, policy: Policy, checksum: str) -> None:
        """Record that the device has made a version next to the one in use."""
        self.ahead, self.held, self.updates = (policy, checksum), None, None
        self._hold(policy, checksum)

    def take(self) -> None:
        """Record that the new version is in use, and that the previous one is kept. The caller
        holds the device."""
        assert self.ahead is not None
        self.before = self.policy
        (self.policy, self.checksum), self.ahead = self.ahead, None
        self.worker.policy_version = self.policy.version
        self.worker.report_now()
        self.available.set()

    def _hold(self, policy: Policy, checksum: str) -> None:
        self.ledger.use(policy.version)
        if self.ahead is None:
            self.worker.policy_version = policy.version
        self._report_held(policy.version, checksum, 0)
        self.available.set()

    def _report_held(self, version: int, checksum: str, update: int) -> None:
        self.worker.holds = Holds(
            version=version, checksum=checksum, update=update, host=self.place.host,
            site=self.place.site, sum_bytes=self.sum_bytes,
        )  # fmt: skip
        self.worker.report_now()

    def can_generate(self, policy: Policy) -> bool:
        """Whether the weights of a version are here."""
        if self.updates is not None and not self.steps_concurrently:
            return False
        return policy in (self.policy, self.before)

    def change(self) -> None:
        """Note that the device is between two versions, until `use`."""
        self.policy = None

    def lose(self) -> None:
        """Note that the device holds nothing that others can rely on, until `use`."""
        self.policy = self.checksum = self.held = self.before = self.ahead = self.updates = None
        self.ledger.use(-1)
        self.doubt()

    def doubt(self) -> None:
        """Record that no step from the device's state can be relied on."""
        self.worker.holds = None
        self.worker.report_now()

    def trust(self) -> None:
        """Note that what the device holds is right after all."""
        assert self.newest_checksum is not None
        update = 0 if self.updates is None else self.updates.number
        self._report_held(self.version, self.newest_checksum, update)

    def holds_total_of(self, batch: int) -> bool:
        return self.held is not None and self.held.message.batch == batch

    def refer(self, reference: ReferenceVersion) -> None:
        """Note what a version, or an update, has to be."""
        self.references[reference.policy.version, reference.update] = reference
        for version in sorted(self.references)[:-2]:
            del self.references[version]

    @property
    def differs(self) -> ReferenceVersion | None:
        """The reference of the version in use, if it differs."""
        number = 0 if self.updates is None else self.updates.number
        reference = self.references.get((self.version, number))
        here = self.newest, self.newest_checksum
        if reference is None or (reference.policy, reference.checksum) == here:
            return None
        return reference
