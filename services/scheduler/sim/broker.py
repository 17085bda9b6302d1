"""The bus as services see it: slots that take one message, streams in order, late delivery."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from services.scheduler.sim.world import Process, World
from shared.messages import subjects
from shared.messages.contracts import (
    Command,
    GenerateFragment,
    Message,
    SetDevice,
)
from shared.messages.epochs import Fence
from shared.messages.fluid import CommitVersion, TrainPiece
from shared.messages.subjects import Stream, subject_of

RUN = "sim"
STREAMS = {stream.subjects[0].split(".")[2]: stream for stream in subjects.STREAMS}
"""Word in a subject -> stream."""
ADDRESSED = GenerateFragment | SetDevice | TrainPiece | CommitVersion
"""Commands to one worker."""
Receive = Callable[[Message], None]
Delay = Callable[[], float]


@dataclass(slots=True)
class Subscription:
    process: Process
    life: int
    receive: Receive
    wanted: Callable[[Message], bool]
    kinds: frozenset[type] | None = None
    """Types of messages that it is given; None: all."""
    address: str | None = None
    """Whose it is: commands to others are not given to it."""

    @property
    def is_alive(self) -> bool:
        return self.life == self.process.life

    def cancel(self) -> None:
        self.life = -1


@dataclass(slots=True)
class Routes:
    """The subscriptions of a stream, and which of them a message goes to: found without looking at
    those of all devices."""

    subscriptions: list[Subscription] = field(default_factory=list)
    _of_kind: dict[type, list[Subscription]] = field(default_factory=dict)
    _open: dict[type, list[tuple[int, Subscription]]] = field(default_factory=dict)
    _of_address: dict[str, list[tuple[int, Subscription]]] = field(default_factory=dict)

    def add(self, subscription: Subscription) -> None:
        if self._of_kind or self._open:  # some may have ended since
            self.subscriptions = [s for s in self.subscriptions if s.is_alive]
        self.subscriptions.append(subscription)
        self._of_kind, self._open, self._of_address = {}, {}, {}

    def of(self, message: Message) -> Iterator[Subscription]:
        """Yield those that may want a message, in the order in which they were made."""
        if isinstance(message, ADDRESSED):
            yield from self._of_command(message)
            return
        kind = type(message)
        if kind not in self._of_kind:
            self._of_kind[kind] = [
                s for s in self.subscriptions if s.kinds is None or kind in s.kinds
            ]
        yield from self._of_kind[kind]

    def _of_command(self, message: Message) -> Iterator[Subscription]:
        kind = type(message)
        if not self._of_address and not self._open:
            for number, each in enumerate(self.subscriptions):
                if each.address is not None:
                    self._of_address.setdefault(each.address, []).append((number, each))
        if kind not in self._open:
            self._open[kind] = [
                (number, s) for number, s in enumerate(self.subscriptions)
                if s.address is None and (s.kinds is None or kind in s.kinds)
            ]  # fmt: skip
        own = self._of_address.get(message.worker, [])  # type: ignore[union-attr,arg-type]
        for _, each in sorted([*self._open[kind], *own], key=lambda pair: pair[0]):
            yield each


@dataclass(slots=True)
class Queue:
    """A durable consumer that a pool of workers shares."""

    subscription: Subscription
    offered: dict[str, float] = field(default_factory=dict)
    """Subject -> when it was last given to a worker."""
    acked: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Broker:
    world: World
    delay: Delay
    """Seconds of one delivery; drawn anew for each."""
    stored: dict[str, list[Message]] = field(default_factory=dict)
    """Stream -> messages, in stored order."""
    slots: set[str] = field(default_factory=set)
    fence: Fence = field(default_factory=Fence)
    """The newest epoch that a scheduler has marked, in all streams of commands at once."""
    _void: set[str] = field(default_factory=set)
    """Slots that refused commands took."""
    _named: dict[str, float] = field(default_factory=dict)
    """When a message of each name was kept."""
    _routes: dict[str, Routes] = field(default_factory=dict)
    _queues: dict[str, Queue] = field(default_factory=dict)

    def begin_epoch(self, epoch: int) -> None:
        """A scheduler begins to command: what those before it send is refused from now on."""
        self.fence = self.fence.raised(epoch)

    def publish(self, message: Message, epoch: int = 0) -> bool:
        """Returns False if the slot is taken. ``epoch``: of the scheduler whose command this is."""
        subject = subject_of(RUN, message)
        stream = STREAMS[subject.split(".", 3)[2]]
        if isinstance(message, Command) and not self.fence.passes(epoch):
            return self._refuse(stream, subject, epoch)
        if subject in self._void:
            self._free(subject)
        taken = stream.slots and subject in self.slots
        if taken:
            return False
        if stream.slots:
            self.slots.add(subject)
        self.stored.setdefault(stream.name, []).append(message)
        self._forward(stream, subject, message)
        return True

    def _refuse(self, stream: Stream, subject: str, epoch: int) -> bool:
        """Stores a command that nobody heeds; it may take a slot."""
        if not stream.slots or subject in self.slots:
            return False
        self.slots.add(subject)
        self._void.add(subject)
        return True

    def _free(self, subject: str) -> None:
        """Gives a slot that a refused command took to who commands now."""
        self._void.discard(subject)
        self.slots.discard(subject)

    def _forward(self, stream: Stream, subject: str, message: Message) -> None:
        routes = self._routes.get(stream.name)
        if routes is not None:
            for subscription in routes.of(message):
                if subscription.is_alive and subscription.wanted(message):
                    self._deliver(subscription, message)
        queue = self._queues.get(stream.name)
        if queue is not None:
            self._offer(queue, subject, message)

    def send(self, sender: Process, message: Message, once: str | None = None) -> None:
        """Publish from a process.

        ``once``: of messages of the same name, others are dropped for two minutes.
        """
        now = self.world.now
        if once is not None and now - self._named.get(once, -math.inf) < subjects.SAME_NAME_S:
            return
        if once is not None:
            self._named[once] = now
        self.publish(message)

    def subscribe(
        self,
        process: Process,
        stream: Stream,
        receive: Receive,
        wanted: Callable[[Message], bool] = lambda _: True,
        *,
        after: int = 0,
        kinds: Collection[type] | None = None,
        address: str | None = None,
    ) -> Subscription:
        """Every stored message but the first ``after``, and every new one, for this life.

        Args:
            kinds: types of the messages that it may want; None: all.
            address: whose it is, if it wants no commands to others.
        """
        only = None if kinds is None else frozenset(kinds)
        subscription = Subscription(process, process.life, receive, wanted, only, address)
        self._routes.setdefault(stream.name, Routes()).add(subscription)
        for message in self.stored.get(stream.name, [])[after:]:
            if (only is None or type(message) in only) and wanted(message):
                self._deliver(subscription, message)
        return subscription

    def consume(self, process: Process, stream: Stream, receive: Receive) -> None:
        """Take part in the stream's queue: what is not acknowledged comes again."""
        subscription = Subscription(process, process.life, receive, lambda _: True)
        queue = self._queues.setdefault(stream.name, Queue(subscription))
        queue.subscription = subscription
        for message in self.stored.get(stream.name, []):
            subject = subject_of(RUN, message)
            if subject not in queue.acked:
                self._offer_at(self.world.now, queue, subject, message)

    def ack(self, stream: Stream, message: Message) -> None:
        self._queues[stream.name].acked.add(subject_of(RUN, message))

    def is_acked(self, stream: Stream, message: Message) -> bool:
        return subject_of(RUN, message) in self._queues[stream.name].acked

    def _offer(self, queue: Queue, subject: str, message: Message) -> None:
        if subject in queue.acked or not queue.subscription.is_alive:
            return
        queue.offered[subject] = self.world.now
        self._deliver(queue.subscription, message)

    def _offer_at(self, time: float, queue: Queue, subject: str, message: Message) -> None:
        before = queue.offered.get(subject)

        def again() -> None:
            if queue.offered.get(subject) == before:
                self._offer(queue, subject, message)

        self.world.at(time, again)

    def _deliver(self, subscription: Subscription, message: Message) -> None:
        if subscription.is_alive:
            receive = subscription.receive
            subscription.process.after(self.delay(), lambda: receive(message))
