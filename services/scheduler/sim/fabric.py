"""The connections between simulated members, over which they exchange sums past the broker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from services.scheduler.sim.sites import SimSite
from services.scheduler.sim.world import World
from shared.messages.fluid import ExchangeSums


class Exchanging(Protocol):
    """Interface of a member to its connections."""

    address: str
    site: SimSite | None
    """None: the home site."""

    def received(self, command: ExchangeSums) -> None:
        """Take the total of a round."""


Members = Sequence[Exchanging]


def addresses(members: Members) -> list[str]:
    return [each.address for each in members]


@dataclass(slots=True)
class Fabric:
    world: World
    seconds: float
    """Seconds that an exchange takes from the last member's arrival."""
    sum_bytes: int = 0
    _waiting: list[Exchanging] = field(default_factory=list)
    """Members that have joined the round."""

    def join(self, member: Exchanging, command: ExchangeSums) -> None:
        """Bring a sum to the round; the exchange begins when the last one is there. One sum of each
        site crosses its line, and the total comes back."""
        self._waiting.append(member)
        if len(self._waiting) < len(command.shares):
            return
        members, self._waiting = self._waiting, []
        sites = {s: [m for m in members if m.site is s] for m in members if (s := m.site)}
        awaited = set(sites)

        def come(site: SimSite) -> None:
            awaited.remove(site)
            if not awaited:
                self._give_total(members, sites, command)

        for site, far in sites.items():
            site.num_sums += 1
            site.cross(site.up, self.sum_bytes, addresses(far), partial(come, site))
        if not sites:
            self._give_total(members, sites, command)

    def _give_total(
        self, members: Members, sites: Mapping[SimSite, Members], command: ExchangeSums
    ) -> None:
        def receive(far: Members) -> None:
            for each in far:
                each.received(command)

        for each in members:
            if each.site is None:
                self._deliver(each, command)
        for site, far in sites.items():
            site.cross(site.down, self.sum_bytes, addresses(far), partial(receive, far))

    def _deliver(self, member: Exchanging, command: ExchangeSums) -> None:
        self.world.after(self.seconds, lambda: member.received(command))
