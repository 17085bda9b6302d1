"""How members form one total of their sums: the interface of a transport.

Two transports form the same total (docs/large-models.md): `StoreExchange` over the object store,
`GroupExchange` by a process group. `NearExchange` has the members of a host, and the hosts of a
site, add up theirs before either. All calls end by their deadline, even if members are lost.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

from services.trainer.fluid.residuals import Residuals
from shared.errors import DigenRLError
from shared.messages.fluid import ExchangeSums, Share
from shared.run.layout import exchange_folder

WHOLE_BATCH = -1
"""Key of a member's one sum; in deterministic mode each group has a sum of its own, by its
number."""

Sum = Mapping[int, Any]
"""`services.trainer.fluid.sums.Term` of each key."""


class ExchangeIncomplete(DigenRLError):
    """A round came to nothing here."""

    def __init__(self, reason: str, missing: tuple[str, ...] = ()) -> None:
        """``missing``: addresses of the members that did not respond."""
        super().__init__(reason)
        self.missing = missing


@dataclass(frozen=True, slots=True)
class MemberRound:
    """One round of an exchange as one member sees it."""

    run: str
    me: str
    message: ExchangeSums
    deadline: float
    """Monotonic time at which the round ends."""
    place: str = ""
    """Where its members meet within the round's folder."""
    by_group: bool = False
    """Whether every group has its own sum; sums are then added in the order of the groups."""
    residuals: Residuals = field(default_factory=Residuals)
    """Residuals of this process's sums."""

    @classmethod
    def from_message(
        cls, message: ExchangeSums, run: str, me: str, *, by_group: bool,
        residuals: Residuals | None = None,
    ) -> "MemberRound":  # fmt: skip
        deadline = time.monotonic() + message.max_seconds
        own = residuals or Residuals()
        return cls(run, me, message, deadline, by_group=by_group, residuals=own)

    @property
    def seconds(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def name(self) -> str:
        """Name of the round among all rounds of the run."""
        return f"{self.message.batch}.{self.message.attempt}.{self.message.round}"

    @property
    def folder(self) -> str:
        message = self.message
        folder = exchange_folder(self.run, message.batch, message.attempt, message.round)
        return folder + self.place

    @property
    def committer(self) -> str:
        return self.message.committer

    @property
    def is_committer(self) -> bool:
        return self.me == self.committer

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(share.worker for share in self.message.shares)

    @property
    def contributors(self) -> tuple[Share, ...]:
        """Shares of members with a sum, in the order of the addition."""
        return tuple(share for share in self.message.shares if share.pieces)

    @property
    def on_host(self) -> "MemberRound":
        """The same round of this host's members alone, with their leader as committer: the
        round's own, or the first of them. It has a folder named by the leader's address."""
        mine = next(each for each in self._by_host if self.me in [s.worker for s in each])
        leader = _leader(mine, self.committer)
        here = self._of(mine, leader, ())
        message = here.message.model_copy(update={"up": "exact"})
        return replace(here, message=message, place=f"{self.place}/{leader}")

    @property
    def among_hosts(self) -> "MemberRound":
        """The same round of the leaders, each with the pieces of its whole host. In it, a site
        takes the place of a host."""
        shares = []
        for each in self._by_host:
            leader = _leader(each, self.committer)
            [own] = [share for share in each if share.worker == leader]
            pieces = tuple(piece for share in each for piece in share.pieces)
            shares.append(own.model_copy(update={"pieces": pieces}))
        among = self._of(shares, self.committer, self.message.sites)
        return replace(among, place=f"{self.place}/leaders")

    @property
    def _by_host(self) -> list[tuple[Share, ...]]:
        shares = iter(self.message.shares)
        hosts = self.message.hosts or (1,) * len(self.message.shares)
        return [tuple(islice(shares, number)) for number in hosts]

    def _of(self, shares: Sequence[Share], committer: str, hosts: tuple[int, ...]) -> "MemberRound":
        changes = {"shares": tuple(shares), "committer": committer, "hosts": hosts, "sites": ()}
        return replace(self, message=self.message.model_copy(update=changes))

    @property
    def owner_of(self) -> dict[int, str]:
        """The member that has trained each group, in the order of the groups.

        Raises:
            ExchangeIncomplete: if several members have trained parts of a group that one member
                has to train.
        """
        owners: dict[int, str] = {}
        for share in self.contributors:
            for piece in share.pieces:
                if owners.setdefault(piece.group, share.worker) != share.worker:
                    raise ExchangeIncomplete(
                        f"group {piece.group} was trained by several, in parts"
                    )
        return dict(sorted(owners.items()))


def _leader(shares: Sequence[Share], committer: str) -> str:
    names = [share.worker for share in shares]
    return committer if committer in names else names[0]


class Place(NamedTuple):
    """Where a member's sum is added to others before all exchange theirs; empty: nowhere."""

    host: str = ""
    """Name of a host's shared memory."""
    site: str = ""


class Exchange(Protocol):
    @property
    def place(self) -> Place: ...

    @property
    def sum_bytes(self) -> int:
        """Bytes of a whole sum."""

    async def total(self, round_: MemberRound, own: Sum) -> Any:
        """Return the total (a `Term`) of what all members have summed; all get the same bits.

        Raises:
            ExchangeIncomplete: if a sum is missing at the deadline.
        """

    async def local_total(self, round_: MemberRound, sums: Mapping[str, Sum]) -> Any:
        """Return the total of sums of all members that this process has computed.

        Raises:
            ExchangeIncomplete: if the sums do not match their shares.
        """

    async def close(self) -> None:
        """Release what is kept between rounds."""
