"""The connections between simulated members, over which they exchange sums past the broker."""

from collections.abc import Iterable, Sequence
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
        sites = dict.fromkeys(each.site for each in members if each.site is not None)
        awaited = [each for each in members if each.site is not None]

        def come() -> None:
            if awaited:
                awaited.pop()
            if not awaited:
                self._give_total(members, sites, command)

        for site in sites:
            site.num_sums += 1
            far = {each.address: come for each in members if each.site is site}
            site.cross(site.up, self.sum_bytes, far)
        if not sites:
            come()

    def _give_total(
        self, members: Sequence[Exchanging], sites: Iterable[SimSite], command: ExchangeSums
    ) -> None:
        for each in members:
            if each.site is None:
                self._deliver(each, command)
        for site in sites:
            far = {m.address: partial(m.received, command) for m in members if m.site is site}
            site.cross(site.down, self.sum_bytes, far)

    def _deliver(self, member: Exchanging, command: ExchangeSums) -> None:
        self.world.after(self.seconds, lambda: member.received(command))
