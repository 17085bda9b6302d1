"""What the parts of a member share: the version in use, its lock, and what others say of it."""

import asyncio
from dataclasses import dataclass, field

from services.trainer.fluid.ledger import Ledger
from shared.messages.contracts import Policy
from shared.messages.fluid import ExchangeSums
from shared.messages.workers import Holds
from shared.process.worker import Worker


@dataclass(frozen=True, slots=True)
class Reference:
    """What a version has to be: as its committer has made it."""

    policy: Policy
    checksum: str
    worker: str
    """Address of that one."""


@dataclass(frozen=True, slots=True)
class HeldTotal:
    """The total of a round, which this member could step from."""

    message: ExchangeSums
    total: object
    """`services.trainer.fluid.sums.Term`"""


@dataclass(slots=True)
class MemberState:
    worker: Worker
    ledger: Ledger
    available: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be work for the device."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever uses the device: for a fragment, a piece, or a step."""
    policy: Policy | None = None
    """The version in use, committed or not."""
    checksum: str | None = None
    references: dict[int, Reference] = field(default_factory=dict)
    """The newest two, by their versions."""
    held: HeldTotal | None = None

    @property
    def version(self) -> int:
        return -1 if self.policy is None else self.policy.version

    def use(self, policy: Policy, checksum: str) -> None:
        """Note that the device holds another version: all of it, ready for the next step. The
        caller holds the device."""
        self.policy, self.checksum, self.held = policy, checksum, None
        self.ledger.use(policy.version)
        self.worker.policy_version = policy.version
        self.worker.holds = Holds(version=policy.version, checksum=checksum)
        self.worker.report_now()
        self.available.set()

    def change(self) -> None:
        """Note that the device is between two versions, until `use`."""
        self.policy = None

    def lose(self) -> None:
        """Note that the device holds nothing that others can rely on, until `use`."""
        self.policy = self.checksum = self.held = None
        self.ledger.use(-1)
        self.doubt()

    def doubt(self) -> None:
        """Note that nobody may count on a step from what the device holds."""
        self.worker.holds = None
        self.worker.report_now()

    def holds_total_of(self, batch: int) -> bool:
        return self.held is not None and self.held.message.batch == batch

    def refer(self, reference: Reference) -> None:
        """Note what a version has to be."""
        self.references[reference.policy.version] = reference
        for version in sorted(self.references)[:-2]:
            del self.references[version]

    @property
    def differs(self) -> Reference | None:
        """What the version in use has to be, if it is something else."""
        found = self.references.get(self.version)
        if found is None or (found.policy, found.checksum) == (self.policy, self.checksum):
            return None
        return found
