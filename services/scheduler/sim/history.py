"""What happened in the simulated cluster: busy seconds for the planner, facts for the checker.

Facts are taken down where they happen, on the broker and on the devices, and not from what the
scheduler believes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.costs.noise import Noise
from services.scheduler.sim.history_events import (
    Added,
    Begun,
    Committed,
    Computed,
    Expired,
    Fact,
    Fault,
    Interval,
    OfMember,
    Opened,
    Stepped,
    Stored,
    Told,
    Use,
    line_of,
)
from services.scheduler.sim.world import World
from shared.messages.contracts import (
    ComputeGradient,
    GenerateFragment,
    Message,
    SetDevice,
    TrainGroup,
)


@dataclass(slots=True)
class History:
    world: World
    noise: Noise = field(default_factory=Noise)
    keep_intervals: bool = False
    """Whether intervals and facts are kept."""
    busy: dict[tuple[str, Use], float] = field(default_factory=dict)
    """(device, use) -> seconds; the devices of a trainer that go together count one each while
    they generate."""
    commit_times: list[float] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    beyond_mean: dict[str, float] = field(default_factory=dict)
    """Device -> seconds that noise has added to its work so far, or taken from it."""
    _num_generations: int = 0

    def drawn(self, device: str, seconds: float) -> float:
        """What the device's next work takes, which takes so many seconds on average."""
        if not seconds:
            return 0.0
        drawn = seconds * self.noise.factor(device)
        self.beyond_mean[device] = self.beyond_mean.get(device, 0.0) + drawn - seconds
        return drawn

    def stored(self, subject: str, message: Message, accepted: bool) -> None:
        if self.keep_intervals:
            self.facts.append(Stored(self.world.now, subject, message, accepted))

    def begins(self, device: str, task: GenerateFragment, newest: int, weights: str) -> int:
        """Gives the number of this generation, under which its result is stored."""
        self._num_generations += 1
        if self.keep_intervals:
            now, number = self.world.now, self._num_generations
            self.facts.append(Begun(now, device, task, newest, weights, number))
        return self._num_generations

    def gradient_task(self, device: str, command: ComputeGradient, weights: str) -> int:
        """Gives the number under which the contribution is stored."""
        self._num_generations += 1
        if self.keep_intervals:
            now, number = self.world.now, self._num_generations
            self.facts.append(Computed(now, device, command, weights, number))
        return self._num_generations

    def works(self, device: str, use: Use, load: float, seconds: float) -> None:
        """Record a use that begins now, after a version is loaded."""
        self._use(device, "load", 0.0, load)
        self._use(device, use, load, seconds)

    def worked(self, device: str, use: Use, begin: float, what: str = "") -> None:
        """Record a use that ends now."""
        seconds = self.world.now - begin
        self._use(device, use, -seconds, seconds, what)

    def steps(
        self,
        device: str,
        setup: float,
        seconds: Sequence[float],
        generations: tuple[int, ...],
        weights: str,
    ) -> None:
        """One denoising step on every device of the trainer."""
        self._use(device, "switch", 0.0, setup)
        self._use(device, "generate", setup, max(seconds))
        extra = sum(seconds) - max(seconds)
        self._add(device, "generate", extra)
        self.stepped(device, generations, weights)

    def stepped(self, device: str, generations: tuple[int, ...], weights: str) -> None:
        if self.keep_intervals:
            self.facts.append(Stepped(self.world.now, device, generations, weights))

    def told(self, device: str, command: SetDevice) -> None:
        if self.keep_intervals:
            self.facts.append(Told(self.world.now, device, command))

    def expired(self, device: str, loan: int) -> None:
        if self.keep_intervals:
            self.facts.append(Expired(self.world.now, device, loan))

    def opened(self, device: str, version: int, weights: str, *, alone: bool) -> None:
        if self.keep_intervals:
            self.facts.append(Opened(self.world.now, device, version, weights, alone))

    def trains(self, device: str, group: TrainGroup, back: float, seconds: float) -> None:
        self._use(device, "switch", 0.0, back)
        self._use(device, "train", back, seconds, f"{group.batch}/{group.group}/{group.attempt}")

    def added(self, device: str, group: TrainGroup, samples: range) -> None:
        if self.keep_intervals:
            self.facts.append(Added(self.world.now, device, group, samples))

    def commits(self, device: str, seconds: float) -> None:
        self._use(device, "commit", 0.0, seconds)

    def committed(self, device: str, version: int, accepted: bool) -> None:
        if accepted:
            self.commit_times.append(self.world.now)
        if self.keep_intervals:
            self.facts.append(Committed(self.world.now, device, version, accepted))

    def fault(self, what: str, target: str = "") -> None:
        if self.keep_intervals:
            self.facts.append(Fault(self.world.now, what, target))

    def note(self, fact: OfMember) -> None:
        """Record what a fluid device has done."""
        if self.keep_intervals:
            self.facts.append(fact)

    def hash(self) -> str:
        """Hashes every fact in order: two runs with the same hash went the same way."""
        digest = hashlib.sha256()
        for fact in self.facts:
            digest.update(f"{line_of(fact)}\n".encode())
        return digest.hexdigest()

    def _use(self, device: str, use: Use, delay: float, seconds: float, what: str = "") -> None:
        if not seconds:
            return
        self._add(device, use, seconds)
        if self.keep_intervals:
            begin = self.world.now + delay
            self.intervals.append(Interval(device, use, begin, begin + seconds, what))

    def _add(self, device: str, use: Use, seconds: float) -> None:
        self.busy[device, use] = self.busy.get((device, use), 0.0) + seconds
