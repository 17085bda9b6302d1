"""A trainer of several devices that each hold all weights: work flows to whichever is free.

Each device generates the fragments that it was given first, unbroken, and otherwise trains: it
takes the next samples of the groups that are ready, in the order of their arrival, whatever the
others do. They meet at the optimizer step only. To change over takes no time.

    device 0  |fragment        |s|s|s|s|s| optimizer |
    device 1  |fragment          |s|s|s|s| optimizer |     s: a sample's gradient
    device 2  |s|s|s|s|s|s|s|s|s|s|s|s|s|  optimizer |
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.sim.batches import Trainer
from services.scheduler.sim.devices import result_of
from services.scheduler.sim.timing import Timing
from shared.devices.loan import may_generate
from shared.devices.slices import num_last_groups, slice_group
from shared.messages.contracts import GenerateFragment, Message, TrainGroup


@dataclass(slots=True)
class Lane:
    """One of the devices."""

    name: str
    drawn_as: str
    """Whatever the life of the trainer."""
    kind: str
    can_generate: bool
    task: GenerateFragment | None = None
    """Under way."""
    use: int = 0
    """Counts what it has begun: what was broken off does not end."""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a group's gradient, which one device computes."""

    samples: range
    part: float
    """Share of the gradient of these samples; of the whole group's, where its samples share a
    step."""
    num_parts: int
    """Pieces that each of these samples is in."""


def pieces_of(size: int, num_devices: int, timing: Timing, *, is_last: bool) -> list[Piece]:
    """Cut a group as the trainer does: trained steps that it computes once are the first piece."""
    merged, steps = timing.merged_steps, timing.trained_steps
    slices = slice_group(
        size, num_devices, steps, is_last=is_last, merged_steps=merged,
        divides_steps=timing.divides_steps,
    )  # fmt: skip
    if not merged:
        return [
            Piece(each.samples, len(each.steps(steps)) / steps, each.num_parts) for each in slices
        ]
    first, *others = slices
    if not others:
        return [Piece(first.samples, 1.0, 1)]
    apart, num_parts = size * (steps - merged), others[0].num_parts + 1
    return [
        Piece(first.samples, timing.merged_part, num_parts),
        *(
            Piece(
                each.samples,
                (1 - timing.merged_part) * len(each.samples) * len(each.steps(steps)) / apart,
                num_parts,
            )
            for each in others
        ),
    ]


@dataclass(slots=True)
class Share:
    """A group that is being trained."""

    group: TrainGroup
    waiting: deque[Piece]
    """Pieces that no device has begun."""
    parts: Counter[int] = field(default_factory=Counter)
    """Sample -> parts of its gradient that are added up."""
    added: int = 0
    """Samples whose gradient is complete."""
    seconds: float = 0.0
    """Device-seconds spent on it."""

    def add(self, piece: Piece) -> None:
        self.parts.update(piece.samples)
        self.added += sum(self.parts[sample] == piece.num_parts for sample in piece.samples)


@dataclass(slots=True)
class IndependentTrainer(Trainer):
    lanes: tuple[Lane, ...] = ()
    _free: list[Lane] = field(default_factory=list)
    _waiting: deque[GenerateFragment] = field(default_factory=deque)
    _shares: deque[Share] = field(default_factory=deque)
    """Shares that have pieces which nobody has begun with."""

    def __post_init__(self) -> None:
        self._free = list(self.lanes)

    def _act(self) -> None:
        """Give every free device something to do."""
        if self._stepping:
            return
        if self._is_complete:
            self._commit()
            return
        free, self._free = deque(self._free), []
        while free and (self._waiting or (self._shares and not self._holds)):
            self._next(free.popleft())
        self._free.extend(free)

    def _take(self, group: TrainGroup) -> None:
        size = self.plan.group_size
        last = num_last_groups(size, len(self.lanes))
        is_last = self.plan.num_groups - len(self._ready) <= last
        pieces = pieces_of(size, len(self.lanes), self.timing, is_last=is_last)
        self._shares.append(Share(group, deque(pieces)))
        Trainer._take(self, group)

    def _next(self, lane: Lane) -> None:
        if self._stepping:
            self._free.append(lane)
        elif self._may_begin(lane):
            self._generate(lane, self._waiting.popleft())
        elif self._shares and not self._holds:
            self._train(lane, self._shares[0])
        else:
            self._free.append(lane)

    def _may_begin(self, lane: Lane) -> bool:
        """A fragment, for there is one, and the devices are lent."""
        if not self._waiting or not lane.can_generate:
            return False
        return may_generate(self.loan, self.process.world.now)

    def _generate(self, lane: Lane, task: GenerateFragment) -> None:
        assert self.policy is not None
        seconds = self.history.drawn(
            lane.drawn_as, self.timing.fragment(lane.kind, task.fragment.num_samples)
        )
        number = self.history.begins()
        lane.task = task

        def done() -> None:
            assert self.policy is not None
            lane.task = None
            digest = self.policy.weights_digest
            self.history.worked(lane.name, "generate", lane.since)
            self.broker.send(self.process, result_of(task, digest, self.address, seconds, number))
            self._next(lane)

        self._occupy(lane, seconds, done)

    def _train(self, lane: Lane, share: Share) -> None:
        """The next piece of a group."""
        piece = share.waiting.popleft()
        if not share.waiting:
            self._shares.popleft()
        seconds = self.history.drawn(lane.drawn_as, self._seconds(lane.kind, piece))

        def done() -> None:
            self.history.worked(lane.name, "train", lane.since)
            share.add(piece)
            share.seconds += seconds
            if share.added == self.plan.group_size:
                self._count(share.group, share.seconds / len(self.lanes))
            if self._is_complete:
                self._free.append(lane)
                self._act()
            else:
                self._next(lane)

        self._occupy(lane, seconds, done)

    def _seconds(self, kind: str, piece: Piece) -> float:
        whole = self.timing.merged_steps > 0
        samples = self.plan.group_size if whole else len(piece.samples)
        return piece.part * self.timing.gradient(kind, samples)

    def _occupy(self, lane: Lane, seconds: float, done: Callable[[], None]) -> None:
        lane.use += 1
        lane.since = self.process.world.now
        use = lane.use

        def act() -> None:
            if lane.use == use:
                done()

        self.process.after(seconds, act)

    def _uses_optimizer(self, seconds: float) -> None:
        """Nothing is left to be trained; what is still generated is nobody's concern any more."""
        self._break_off_all()
        for lane in self.lanes:
            self.history.commits(lane.name, seconds)

    def _break_off_all(self) -> None:
        free = {lane.name for lane in self._free}
        for lane in self.lanes:
            if lane.name not in free:
                self._break_off(lane)

    def _break_off(self, lane: Lane) -> None:
        self.history.worked(lane.name, "train" if lane.task is None else "generate", lane.since)
        if lane.task is not None:
            self._release(lane.task, "stale")
        lane.use += 1
        lane.task = None
        self._free.append(lane)

    def _given(self, message: Message) -> None:
        assert isinstance(message, GenerateFragment)
        if message.policy == self.policy:
            self._waiting.append(message)
            self._act()
        else:
            self._release(message, "stale")

    def _drop(self) -> None:
        for task in self._waiting:
            self._release(task, "returned")
        self._waiting.clear()

    def _drop_stale(self) -> None:
        self._shares.clear()
        self._break_off_all()
        waiting, self._waiting = self._waiting, deque()
        for task in waiting:
            if task.policy == self.policy:
                self._waiting.append(task)
            else:
                self._release(task, "stale")
