"""Simulates the direct connections over which members exchange sums."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from services.scheduler.core.fluid.levels import BYTES_SHARE
from services.scheduler.sim.sites import SimSite
from services.scheduler.sim.world import World
from shared.messages.fluid import ExchangeSums


class ExchangeMember(Protocol):
    """A member that exchanges sums."""

    address: str
    site: SimSite | None
    """Site of the member; None: the main site."""

    def received(self, command: ExchangeSums) -> None:
        """Receive the total of a round."""


@dataclass(slots=True)
class Fabric:
    world: World
    seconds: float
    """Seconds of an exchange after the last member has joined."""
    sum_bytes: int = 0
    _waiting: list[ExchangeMember] = field(default_factory=list)
    """Members that have joined the round."""

    def join(self, member: ExchangeMember, command: ExchangeSums) -> None:
        """Join the round; the exchange starts when all members have joined. Each remote site sends
        one sum over its link and receives the total."""
        self._waiting.append(member)
        if len(self._waiting) < len(command.shares):
            return
        members, self._waiting = self._waiting, []
        sites = dict.fromkeys(each.site for each in members if each.site is not None)
        remote = [each for each in members if each.site is not None]

        def receive_sum() -> None:
            if remote:
                remote.pop()
            if not remote:
                self._give_total(members, sites, command)

        for site in sites:
            site.num_sums += 1
            callbacks = {each.address: receive_sum for each in members if each.site is site}
            site.cross(site.up, self.sum_bytes * BYTES_SHARE[command.up], callbacks)
        if not sites:
            receive_sum()

    def _give_total(
        self, members: Sequence[ExchangeMember], sites: Iterable[SimSite], command: ExchangeSums
    ) -> None:
        for each in members:
            if each.site is None:
                self._deliver(each, command)
        for site in sites:
            callbacks = {m.address: partial(m.received, command) for m in members if m.site is site}
            site.cross(site.down, self.sum_bytes, callbacks)

    def _deliver(self, member: ExchangeMember, command: ExchangeSums) -> None:
        self.world.after(self.seconds, lambda: member.received(command))
