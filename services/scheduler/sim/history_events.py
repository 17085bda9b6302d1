"""What can happen in the simulated cluster, as it is taken down, and in words for people."""

from typing import Literal, NamedTuple

from shared.messages.contracts import (
    ComputeGradient,
    GenerateFragment,
    Message,
    SetDevice,
    TrainGroup,
)
from shared.messages.fluid import Piece

SumName = tuple[int, int, int, int]
"""Batch, attempt at it, update, and the number of the sum at its member."""
Use = Literal["generate", "train", "commit", "switch", "load", "exchange"]


class Interval(NamedTuple):
    """A device in use. Independent devices of a trainer have names of their own."""

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


class Computed(NamedTuple):
    """A rollout device begins the gradient of a group. Its contribution names this number."""

    time: float
    device: str
    command: ComputeGradient
    weights: str
    """Digest of what it has really loaded."""
    number: int


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


class Opened(NamedTuple):
    """A trainer begins a batch: no gradient is left of any other."""

    time: float
    device: str
    version: int
    weights: str
    alone: bool
    """Whether each of its devices works on its own."""


class Added(NamedTuple):
    """Some samples' gradient is added up, or a contribution, which is that of all of them."""

    time: float
    device: str
    group: TrainGroup
    samples: range
    """Empty: the group's contribution."""


class Committed(NamedTuple):
    """A trainer has asked for a commit; not accepted: the version exists."""

    time: float
    device: str
    version: int
    accepted: bool


class Summed(NamedTuple):
    """A fluid device has added a piece to its sum, or begins one anew."""

    time: float
    device: str
    sum: SumName
    piece: Piece | None
    """None: the sum is zero again."""
    weights: str
    """Digest of the weights at which the gradient was taken."""


class Totalled(NamedTuple):
    """A fluid device holds the total of sums."""

    time: float
    device: str
    batch: int
    attempt: int
    round: int
    sums: tuple[tuple[str, SumName], ...]
    """Whose sums it is made of, and which."""


class Moved(NamedTuple):
    """A fluid device has other weights, moments and average: by its step, or loaded."""

    time: float
    device: str
    batch: int
    attempt: int
    sum_id: str | None
    """Names the total that it has stepped with; None if it has loaded a version."""
    before: str
    after: str
    """Checksums."""
    beside: bool = False
    """Whether the device goes on with what it had, until it has taken this."""
    update: int = 0
    """Which of the batch's updates it has taken."""


class Taken(NamedTuple):
    """A fluid device uses the version that its step has made beside."""

    time: float
    device: str
    version: int


class Fault(NamedTuple):
    """The nemesis or an operator has acted."""

    time: float
    what: str
    target: str


OfMember = Summed | Totalled | Moved | Taken
OfDevice = Begun | Stepped | Computed | Told | Expired | Opened | Added
Fact = Stored | Committed | Fault | OfMember | OfDevice


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
        case Summed() | Totalled() | Moved() | Taken():
            return _words_of_member(fact)
        case Told(device=device, command=command):
            return f"told    {device} {_loan(command)}"
        case Expired(device=device, loan=loan):
            return f"expired {device} loan {loan}"
        case _:
            return _words_of_work(fact)


def _words_of_work(fact: Begun | Stepped | Computed | Opened | Added) -> str:
    match fact:
        case Begun(device=device, newest=newest, generation=number):
            task = fact.task
            return (
                f"begins  {device} {_place(task)} v{task.policy.version} "
                f"knows v{newest} holds {_short(fact.weights)} as #{number}"
            )
        case Stepped(device=device, generations=numbers, weights=weights):
            return f"steps   {device} {' '.join(f'#{n}' for n in numbers)} holds {_short(weights)}"
        case Computed(device=device, command=command, weights=weights, number=number):
            where = f"{_group(command.group)} v{command.policy.version}"
            return f"computes {device} {where} holds {_short(weights)} as #{number}"
        case Opened(device=device, version=version, weights=weights):
            return f"opens   {device} batch {version} holds {_short(weights)}"
        case Added(device=device, group=group, samples=samples):
            what = f"{samples.start} to {samples.stop}" if samples else "contribution"
            return f"adds    {device} {_group(group)} {what}"


def _words_of_member(fact: OfMember) -> str:
    match fact:
        case Summed(device=device, sum=name, piece=None):
            return f"zeros   {device} sum {name}"
        case Summed(device=device, sum=name, piece=piece):
            assert piece is not None
            where = f"{piece.group}/{piece.attempt}#{piece.number}"
            return f"sums    {device} {where} {piece.samples} {piece.steps} into {name}"
        case Totalled(device=device, sums=sums):
            place = f"{fact.batch} attempt {fact.attempt} round {fact.round}"
            return f"totals  {device} {place} of {sums}"
        case Moved(device=device, before=before, after=after):
            how = "loads" if fact.sum_id is None else "moves"
            return f"{how}   {device} batch {fact.batch} {_short(before)} to {_short(after)}"
        case Taken(device=device, version=version):
            return f"takes   {device} v{version}"


def _details(message: Message) -> str:
    match message.kind:
        case "generate_fragment" | "fragment_generated" | "fragment_scored":
            by = f" by {message.worker}" if message.kind == "fragment_generated" else ""
            return f" x{message.fragment.num_samples} v{message.policy.version}{by}"
        case "fragment_released" | "fragment_failed":
            slot = message.slot
            place = f"{slot.batch}.{slot.group}.{slot.first_sample}.{slot.attempt}"
            return f" {place}: {message.reason}"
        case "set_device":
            return f" {_loan(message)}"
        case "operator_request" | "tag_request" | "worker_request":
            return f" {message.model_dump(exclude={'kind', 'id'})}"
        case _:
            return _details_of_training(message)


def _details_of_training(message: Message) -> str:
    match message.kind:
        case "group_trained" | "group_failed":
            return f" {message.batch}/{message.group} attempt {message.attempt}"
        case "gradient_released":
            place = f"{message.batch}/{message.group} attempt {message.attempt}"
            return f" {place} by {message.worker}: {message.reason}"
        case "gradient_computed":
            return f" v{message.policy.version} by {message.contribution.worker}"
        case "policy_published":
            return f" v{message.policy.version} by {message.worker}"
        case "train_group":
            computed = "" if message.contribution is None else " with its gradient"
            return f" v{message.policy.version}{computed}"
        case "compute_gradient":
            return f" at v{message.policy.version}"
        case _:
            return ""


def _place(task: GenerateFragment) -> str:
    slot = task.fragment
    return f"{slot.batch}.{slot.group}.{slot.first_sample}.{slot.attempt}"


def _group(group: TrainGroup) -> str:
    return f"{group.batch}/{group.group} attempt {group.attempt}"


def _loan(command: SetDevice) -> str:
    kept = "" if command.keep else ", drop"
    return f"loan {command.loan_number}: {command.mode} {command.max_seconds:.1f} s{kept}"


def _short(digest: str) -> str:
    return digest[-6:]
