"""What happened in the simulated cluster: busy seconds for the planner, facts for the checker.

Facts are taken down where they happen, on the broker and on the devices, and not from what the
scheduler believes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from services.scheduler.sim.world import World
from shared.contracts import GenerateFragment, Message, SetDevice, TrainGroup

Use = Literal["generate", "train", "commit", "switch", "load"]


class Interval(NamedTuple):
    """A device in use."""

    device: str
    use: Use
    begin: float
    end: float
    what: str


class Stored(NamedTuple):
    """A message has reached the broker; not accepted: its slot was taken."""

    time: float
    subject: str
    message: Message
    accepted: bool


class Begun(NamedTuple):
    """A device begins a fragment. Its result names this generation."""

    time: float
    device: str
    task: GenerateFragment
    newest: int
    """Version that the device knew of."""
    weights: str
    """Digest of what it has really loaded."""
    generation: int


class Stepped(NamedTuple):
    """A borrowed device takes one denoising step of each of these generations."""

    time: float
    device: str
    generations: tuple[int, ...]
    weights: str


class Told(NamedTuple):
    """A command has reached a trainer's device, which may follow it or not."""

    time: float
    device: str
    command: SetDevice


class Expired(NamedTuple):
    """A loan has ended by its deadline."""

    time: float
    device: str
    loan: int


class Trained(NamedTuple):
    """A group's gradient is added up."""

    time: float
    device: str
    group: TrainGroup


class Committed(NamedTuple):
    """A trainer has asked for a commit; not accepted: the version exists."""

    time: float
    device: str
    version: int
    accepted: bool


class Fault(NamedTuple):
    """The nemesis or an operator has acted."""

    time: float
    what: str
    target: str


Fact = Stored | Begun | Stepped | Told | Expired | Trained | Committed | Fault


@dataclass(slots=True)
class History:
    world: World
    noise: float = 0.0
    keep_intervals: bool = False
    """Whether intervals and facts are kept."""
    busy: dict[tuple[str, Use], float] = field(default_factory=dict)
    """(device, use) -> seconds; a trainer's devices count one each while they generate."""
    commit_times: list[float] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    _num_generations: int = 0

    def noisy(self, seconds: float) -> float:
        if not self.noise or not seconds:
            return seconds
        return seconds * max(0.1, self.world.random.gauss(1.0, self.noise))

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

    def generates(self, device: str, load: float, seconds: float) -> None:
        self._use(device, "load", 0.0, load)
        self._use(device, "generate", load, seconds)

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
        if self.keep_intervals:
            self.facts.append(Stepped(self.world.now, device, generations, weights))

    def told(self, device: str, command: SetDevice) -> None:
        if self.keep_intervals:
            self.facts.append(Told(self.world.now, device, command))

    def expired(self, device: str, loan: int) -> None:
        if self.keep_intervals:
            self.facts.append(Expired(self.world.now, device, loan))

    def trains(self, device: str, group: TrainGroup, back: float, seconds: float) -> None:
        self._use(device, "switch", 0.0, back)
        self._use(device, "train", back, seconds, f"{group.batch}/{group.group}/{group.attempt}")

    def trained(self, device: str, group: TrainGroup) -> None:
        if self.keep_intervals:
            self.facts.append(Trained(self.world.now, device, group))

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

    def hash(self) -> str:
        """Of every fact in order: two runs with the same hash went the same way."""
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


def line_of(fact: Fact) -> str:
    """A fact for people."""
    return f"{fact.time:9.4f}  {_words(fact)}"


def _words(fact: Fact) -> str:
    match fact:
        case Stored(subject=subject, accepted=accepted):
            refused = "" if accepted else "  (slot taken)"
            return f"stored  {subject}{_details(fact.message)}{refused}"
        case Committed(device=device, version=version, accepted=accepted):
            return f"commit  {device} v{version}{'' if accepted else '  (refused: it exists)'}"
        case Fault(what=what, target=target):
            return f"FAULT   {what} {target}"
        case _:
            return _words_of_device(fact)


def _words_of_device(fact: Begun | Stepped | Told | Expired | Trained) -> str:
    match fact:
        case Begun(device=device, newest=newest, generation=number):
            task = fact.task
            return (
                f"begins  {device} {_place(task)} v{task.policy.version} "
                f"knows v{newest} holds {_short(fact.weights)} as #{number}"
            )
        case Stepped(device=device, generations=numbers, weights=weights):
            return f"steps   {device} {' '.join(f'#{n}' for n in numbers)} holds {_short(weights)}"
        case Told(device=device, command=command):
            return f"told    {device} {_loan(command)}"
        case Expired(device=device, loan=loan):
            return f"expired {device} loan {loan}"
        case Trained(device=device, group=group):
            return f"trained {device} {group.batch}/{group.group} attempt {group.attempt}"


def _details(message: Message) -> str:
    match message.kind:
        case "generate_fragment" | "fragment_generated" | "fragment_scored":
            by = f" by {message.worker}" if message.kind == "fragment_generated" else ""
            return f" x{message.fragment.num_samples} v{message.policy.version}{by}"
        case "fragment_released" | "fragment_failed":
            slot = message.slot
            place = f"{slot.batch}.{slot.group}.{slot.first_sample}.{slot.attempt}"
            return f" {place}: {message.reason}"
        case "group_trained" | "group_failed":
            return f" {message.batch}/{message.group} attempt {message.attempt}"
        case "policy_published":
            return f" v{message.policy.version} by {message.worker}"
        case "train_group":
            return f" v{message.policy.version}"
        case "set_device":
            return f" {_loan(message)}"
        case "operator_request" | "tag_request":
            return f" {message.model_dump(exclude={'kind', 'id'})}"
        case _:
            return ""


def _place(task: GenerateFragment) -> str:
    slot = task.fragment
    return f"{slot.batch}.{slot.group}.{slot.first_sample}.{slot.attempt}"


def _loan(command: SetDevice) -> str:
    kept = "" if command.keep else ", drop"
    return f"loan {command.generation}: {command.mode} {command.max_seconds:.1f} s{kept}"


def _short(digest: str) -> str:
    return digest[-6:]
