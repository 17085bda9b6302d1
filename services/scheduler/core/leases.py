"""Decides who is alive: workers whose statuses arrive, and one worker per name.

Two processes may have been given one name by mistake, or a worker was started again under its name.
Both look alike at first: another address reports the same name. The first one keeps the name while
it reports. If it is heard alongside the other worker, the other worker is refused; if it is silent,
the other worker takes its place.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler import limits

LeaseDecision = Literal["known", "joined", "waits", "refused"]


@dataclass(frozen=True, slots=True)
class Lease:
    name: str
    at: float
    """When the worker was last heard."""


@dataclass(slots=True)
class Leases:
    """Holds leases by address. Times come from any monotonic clock, in seconds. They are kept by a
    clock that stops while no worker could be heard (`prolong`)."""

    _held: dict[str, Lease] = field(default_factory=dict)
    _by_name: dict[str, str] = field(default_factory=dict)
    """Name -> address of the worker that has it."""
    _others: dict[str, Lease] = field(default_factory=dict)
    """Address of a worker that wants a taken name -> when it was first heard."""
    _expected: dict[str, float] = field(default_factory=dict)
    """Addresses with work from before the scheduler restarted that are still silent."""
    _stood_still: float = 0.0
    """Seconds in which no worker could be heard."""

    def expect(self, addresses: Iterable[str], now: float) -> None:
        """Give these a lease although they have not been heard yet."""
        self._expected = dict.fromkeys(addresses, now - self._stood_still)

    def hear(self, address: str, name: str, now: float) -> LeaseDecision:
        """Record a status."""
        now -= self._stood_still
        if address not in self._held:
            holder = self._by_name.get(name)
            if holder is not None and now - self._held[holder].at < limits.NAME_TAKEOVER_S:
                return self._hear_another(address, name, self._held[holder], now)
            self.let_go(holder)
            self._by_name[name] = address
        is_known = address in self._held
        self._others.pop(address, None)
        self._expected.pop(address, None)
        self._held[address] = Lease(name, now)
        return "known" if is_known else "joined"

    def _hear_another(self, address: str, name: str, holder: Lease, now: float) -> LeaseDecision:
        first = self._others.setdefault(address, Lease(name, now))
        return "refused" if holder.at - first.at > limits.DUPLICATE_NAME_S else "waits"

    def let_go(self, address: str | None) -> None:
        """Drop a worker that has left, or whose name another has taken."""
        lease = None if address is None else self._held.pop(address, None)
        if lease is not None:
            del self._by_name[lease.name]

    def end(self, now: float) -> list[str]:
        """Drop the workers whose lease has ended, and return their addresses."""
        limit = now - self._stood_still - limits.LEASE_S
        ended = [address for address, lease in self._held.items() if lease.at < limit]
        ended += [address for address, at in self._expected.items() if at < limit]
        for address in ended:
            self._expected.pop(address, None)
            self.let_go(address)
        if self._others:
            self._others = {a: e for a, e in self._others.items() if e.name in self._by_name}
        return ended

    def prolong(self, seconds: float) -> None:
        """Extend all leases by the time in which the scheduler itself stood still."""
        self._stood_still += seconds
