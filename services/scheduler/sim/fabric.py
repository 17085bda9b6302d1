"""The connections between simulated members, over which they exchange sums past the broker."""

from dataclasses import dataclass, field
from typing import Protocol

from services.scheduler.sim.world import World
from shared.messages.fluid import ExchangeSums


class Exchanging(Protocol):
    """Interface of a member to its connections."""

    def received(self, command: ExchangeSums) -> None:
        """Take the total of a round."""


@dataclass(slots=True)
class Fabric:
    world: World
    seconds: float
    """Seconds that an exchange takes from the last member's arrival."""
    _waiting: list[Exchanging] = field(default_factory=list)
    """Members that have joined the round."""

    def join(self, member: Exchanging, command: ExchangeSums) -> None:
        """Bring a sum to the round; the exchange begins when the last one is there."""
        self._waiting.append(member)
        if len(self._waiting) == len(command.shares):
            members, self._waiting = self._waiting, []
            for each in members:
                self._deliver(each, command)

    def _deliver(self, member: Exchanging, command: ExchangeSums) -> None:
        self.world.after(self.seconds, lambda: member.received(command))
