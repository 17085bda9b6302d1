"""The bus as services see it: slots that take one message, streams in order, late delivery."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from services.scheduler.sim.world import World
from shared.messages import subjects
from shared.messages.contracts import GenerateFragment, Message, SetDevice
from shared.messages.fluid import TrainPiece
from shared.messages.subjects import Stream, message_subject

RUN = "sim"
STREAMS = {stream.subjects[0].split(".")[2]: stream for stream in subjects.STREAMS}
"""Word in a subject -> stream."""
AddressedCommand = GenerateFragment | SetDevice | TrainPiece
"""Commands to one worker."""
Receive = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class Subscription:
    receive: Receive
    kinds: tuple[type, ...]
    """Types of messages that it receives; empty: all."""
    address: str | None
    """Worker of the subscription, which receives no commands to other workers."""


@dataclass(slots=True)
class Subscriptions:
    """Subscriptions of a stream; a command finds its worker without a look at all devices."""

    subscriptions: list[Subscription] = field(default_factory=list)
    _matching: dict[tuple[type, str | None], list[Subscription]] = field(default_factory=dict)

    def add(self, subscription: Subscription) -> None:
        self.subscriptions.append(subscription)
        self._matching = {}

    def matching(self, message: Message) -> list[Subscription]:
        """Return the subscriptions that receive a message, in the order of their making."""
        worker = message.worker if isinstance(message, AddressedCommand) else None
        key = type(message), worker
        if key not in self._matching:
            self._matching[key] = [
                each for each in self.subscriptions
                if (not each.kinds or key[0] in each.kinds)
                and (worker is None or each.address in (None, worker))
            ]  # fmt: skip
        return self._matching[key]


@dataclass(slots=True)
class Broker:
    world: World
    delay: float
    """Seconds of a delivery."""
    stored: dict[str, list[Message]] = field(default_factory=dict)
    """Stream -> messages, in stored order."""
    _slots: set[str] = field(default_factory=set)
    _routes: dict[str, Subscriptions] = field(default_factory=dict)

    def publish(self, message: Message) -> None:
        """Store a message and deliver it, unless its slot is taken."""
        subject = message_subject(RUN, message)
        stream = STREAMS[subject.split(".", 3)[2]]
        if stream.slots:
            if subject in self._slots:
                return
            self._slots.add(subject)
        self.stored.setdefault(stream.name, []).append(message)
        routes = self._routes.get(stream.name)
        for subscription in () if routes is None else routes.matching(message):
            self._deliver(subscription.receive, message)

    def subscribe(
        self,
        stream: Stream,
        receive: Receive,
        *,
        kinds: Collection[type] = (),
        address: str | None = None,
    ) -> None:
        """Deliver every message that is stored from now on.

        Args:
            kinds: types of messages to deliver; empty: all.
            address: worker that receives them, and no commands to other workers.
        """
        routes = self._routes.setdefault(stream.name, Subscriptions())
        routes.add(Subscription(receive, tuple(kinds), address))

    def _deliver(self, receive: Receive, message: Message) -> None:
        self.world.after(self.delay, lambda: receive(message))
