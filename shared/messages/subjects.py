"""Where each message goes: streams, and one subject ("slot") per piece of work.

    dg.<run>.task.<address>.<batch>.<group>.<first>.<attempt>  DG_TASK    GenerateFragment
    dg.<run>.traj.<address>.<batch>.<group>.<first>.<attempt>  DG_TRAJ    FragmentGenerated
    dg.<run>.rew.<address>.<batch>.<group>.<first>.<attempt>   DG_REW     FragmentScored
    dg.<run>.train.<batch>.<group>.<attempt>                   DG_TRAIN   TrainGroup
    dg.<run>.fluid.<batch>.piece.<address>.<piece>             DG_FLUID   TrainPiece
    dg.<run>.fluid.<batch>.trained.<piece>                     DG_FLUID   PieceTrained, -Released
    dg.<run>.fluid.<batch>.exchange.<attempt>.<round>          DG_FLUID   ExchangeSums
    dg.<run>.fluid.<batch>.sum.<attempt>.<round>.<address>     DG_FLUID   SumHeld, ExchangeMissed
    dg.<run>.fluid.<batch>.step.<attempt>[.<update>]           DG_FLUID   TakeStep
    dg.<run>.fluid.<batch>.stepped.<attempt>.<address>[.<update>]       DG_FLUID  Stepped
    dg.<run>.fluid.<batch>.reference.<attempt>.<address>[.<update>]     DG_FLUID  Stepped
    dg.<run>.fluid.<batch>.stored.<attempt>.<address>          DG_FLUID   WeightsStored
    dg.<run>.fluid.<batch>.commit.<attempt>.<number>           DG_FLUID   CommitVersion
    dg.<run>.fluid.<batch>.again.<attempt>                     DG_FLUID   BeginAgain
    dg.<run>.device.<address>                                  DG_DEVICE  SetDevice
    dg.<run>.evt.<kind>                                        DG_EVT     everything else
    dg.<run>.evt.fragment_failed.<stage>                       DG_EVT     FragmentFailed
    dg.<run>.<task|train|fluid|device>.epoch.<epoch>           same       mark of a new epoch
    dg.<run>.quarantine.<stream>.<sequence>                    DG_DLQ     bytes that are no
        message
    dg.<run>.quarantine.unscored.<fragment>                    DG_DLQ     why samples have no
        score
    dg.<run>.live.<service>.<worker>                           (none)     WorkerStatus
    dg.<run>.refused.<worker>                                  (none)     WorkerRefused

A piece is <group>.<its attempt>.<number>, and behind it the attempt at the batch, unless it is the
first. The first five streams keep one message per subject and refuse a second, also after restarts:
a worker that repeats a piece of work finds its slot taken. Tasks and results name the worker, so no
worker takes the slot of another's result; the scheduler uses the first of several. All of a batch
that concerns fluid devices is in one stream, so that a scheduler that is started again reads it in
the order in which it happened. DG_DEVICE keeps the newest message per subject: the state that a
device shall have.
"""

import re
from dataclasses import dataclass

from shared.limits import MAX_MESSAGE_BYTES, MAX_SUMS_BYTES
from shared.messages.contracts import (
    FragmentFailed,
    FragmentGenerated,
    FragmentScored,
    FragmentSlot,
    GenerateFragment,
    Message,
    SetDevice,
    TrainGroup,
)
from shared.messages.fluid import (
    BeginAgain,
    CommitVersion,
    ExchangeMissed,
    ExchangeSums,
    FluidMessage,
    PieceReleased,
    PieceTrained,
    Stepped,
    SumHeld,
    TakeStep,
    TrainPiece,
    UpdateMessage,
    WeightsStored,
)
from shared.messages.workers import WorkerRefused, WorkerStatus

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Stream:
    name: str
    subjects: tuple[str, ...]
    max_bytes: int
    slots: bool
    """Whether a subject takes one message only; otherwise old messages make room."""
    newest: bool = False
    """Whether only the newest message of a subject is kept."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Most bytes of a message's body."""


ADVISORIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.*.*"
TASK = Stream("DG_TASK", ("dg.*.task.>",), 64 * MIB, slots=True)
TRAJ = Stream("DG_TRAJ", ("dg.*.traj.>",), 64 * MIB, slots=True)
REW = Stream("DG_REW", ("dg.*.rew.>",), 64 * MIB, slots=True)
TRAIN = Stream("DG_TRAIN", ("dg.*.train.>",), 64 * MIB, slots=True)
FLUID = Stream(
    "DG_FLUID", ("dg.*.fluid.>",), 64 * MIB, slots=True, max_message_bytes=MAX_SUMS_BYTES
)
DEVICE = Stream("DG_DEVICE", ("dg.*.device.>",), 16 * MIB, slots=False, newest=True)
EVT = Stream("DG_EVT", ("dg.*.evt.>",), 64 * MIB, slots=False)
DLQ = Stream(
    "DG_DLQ", (ADVISORIES, "dg.*.quarantine.>"), 64 * MIB, slots=False,
    max_message_bytes=MAX_SUMS_BYTES,
)  # fmt: skip
ALL_SUBJECTS = "dg.>"
"""Prefix of the subjects of all streams."""
STREAMS = (TASK, TRAJ, REW, TRAIN, FLUID, DEVICE, EVT, DLQ)
ADDRESSED_STREAMS = (TASK, TRAJ, REW)
"""Streams whose subjects name the device before the batch."""
COMMANDED = (TASK, TRAIN, FLUID, DEVICE)
"""Streams with commands of the scheduler, in which epochs are marked (epochs.py)."""

_FRAGMENT = re.compile(
    r"\Adg\.[^.]+\.(?:task|traj|rew)\.[^.]+\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})\Z"
)
_MARK = re.compile(r"\Adg\.[^.]+\.[a-z]+\.epoch\.(\d{1,18})\Z", re.ASCII)
_GROUP = re.compile(r"\Adg\.[^.]+\.train\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})\Z")


UNSCORED = "unscored"
"""Stands for a stream where it is samples of a fragment that have failed."""


def unscored_subject(run: str, slot: FragmentSlot) -> str:
    return f"dg.{run}.quarantine.{UNSCORED}.{_numbers(slot).replace('.', '-')}"


def is_unscored(subject: str) -> bool:
    """Return whether a dead letter explains why samples have no score: no fragment has failed."""
    return subject.split(".")[2:4] == ["quarantine", UNSCORED]


def message_subject(run: str, message: Message) -> str:
    match message:
        case GenerateFragment(fragment=fragment):
            return task_subject(run, message.worker, fragment)
        case FragmentGenerated(fragment=fragment):
            return f"dg.{run}.traj.{message.worker}.{_numbers(fragment)}"
        case FragmentScored(fragment=fragment):
            return f"dg.{run}.rew.{message.worker}.{_numbers(fragment)}"
        case TrainGroup():
            return f"dg.{run}.train.{message.batch}.{message.group}.{message.attempt}"
        case FluidMessage():
            return _fluid_subject(run, message)
        case _:
            return _subject_without_slot(run, message)


def _fluid_subject(run: str, message: FluidMessage) -> str:
    match message:
        case TrainPiece(worker=worker):
            slot = f"piece.{worker}.{_piece(message)}"
        case PieceTrained() | PieceReleased():
            slot = f"trained.{_piece(message)}"
        case _:
            slot = _shared_slot(message)
    return f"dg.{run}.fluid.{message.batch}.{slot}"


def _shared_slot(message: FluidMessage) -> str:
    """Return the slot of what concerns all members; the first update's has no number."""
    number = message.update if isinstance(message, UpdateMessage) else 0
    update = f".{number}" if number else ""
    match message:
        case ExchangeSums():
            return f"exchange.{message.attempt}.{message.round}"
        case SumHeld(worker=worker) | ExchangeMissed(worker=worker):
            return f"sum.{message.attempt}.{message.round}.{worker}"
        case TakeStep():
            return f"step.{message.attempt}{update}"
        case Stepped(worker=worker):
            who = "reference" if message.is_reference else "stepped"
            return f"{who}.{message.attempt}.{worker}{update}"
        case WeightsStored(worker=worker):
            return f"stored.{message.attempt}.{worker}"
        case CommitVersion():
            return f"commit.{message.attempt}.{message.number}"
        case BeginAgain():
            return f"again.{message.attempt}"
        case _:
            raise AssertionError(message.kind)


def _subject_without_slot(run: str, message: Message) -> str:
    match message:
        case SetDevice():
            return f"dg.{run}.device.{message.worker}"
        case WorkerStatus():
            return f"dg.{run}.live.{message.service}.{message.worker}"
        case WorkerRefused():
            return refusals_for(run, message.worker)
        case FragmentFailed():
            return f"{event_subject(run, message.kind)}.{message.stage}"
        case _:
            return f"dg.{run}.evt.{message.kind}"


def find_stream(subject: str) -> Stream:
    """Return the stream that a subject of one run belongs to."""
    kind = subject.split(".")[2]
    return next(stream for stream in STREAMS if stream.subjects[0] == f"dg.*.{kind}.>")


def batch_subject(run: str, stream: Stream, batch: int) -> str:
    """Match every slot of one batch in one stream."""
    kind = stream.subjects[0].split(".")[2]
    return f"dg.{run}.{kind}{'.*' if stream in ADDRESSED_STREAMS else ''}.{batch}.>"


def task_subject(run: str, address: str, fragment: FragmentSlot) -> str:
    """Return the slot of a device's task to generate a fragment."""
    return f"dg.{run}.task.{address}.{_numbers(fragment)}"


def tasks_for(run: str, address: str) -> str:
    """Match every fragment that one device is to generate."""
    return f"dg.{run}.task.{address}.>"


def pieces_for(run: str, address: str) -> str:
    """Match every piece that one member is to train."""
    return f"dg.{run}.fluid.*.piece.{address}.>"


def fluid_subjects(run: str) -> list[str]:
    """Match the messages to all members: exchanges, steps, commits and restarts; and, from
    committing members, which versions they have made."""
    kinds = ("exchange", "step", "commit", "again", "reference")
    return [f"dg.{run}.fluid.*.{kind}.>" for kind in kinds]


def fluid_events(run: str) -> list[str]:
    """Match what fluid devices report: not the commands, which are as many."""
    kinds = ("trained", "sum", "stepped", "reference", "stored")
    return [f"dg.{run}.fluid.*.{kind}.>" for kind in kinds]


def train_subject(run: str, batch: int, group: int, attempt: int) -> str:
    """Return the slot of one group that is to be trained."""
    return f"dg.{run}.train.{batch}.{group}.{attempt}"


def refusals_for(run: str, address: str) -> str:
    return f"dg.{run}.refused.{address}"


def device_subject(run: str, address: str) -> str:
    return f"dg.{run}.device.{address}"


def event_subject(run: str, kind: str) -> str:
    return f"dg.{run}.evt.{kind}"


def run_subjects(run: str, stream: Stream) -> list[str]:
    return [subject.replace("dg.*.", f"dg.{run}.") for subject in stream.subjects]


def fragment_slot(subject: str) -> FragmentSlot | None:
    """Return the fragment of a task, traj or rew subject."""
    match = _FRAGMENT.match(subject)
    if match is None:
        return None
    batch, group, first_sample, attempt = (int(number) for number in match.groups())
    return FragmentSlot(batch=batch, group=group, first_sample=first_sample, attempt=attempt)


def group_slot(subject: str) -> tuple[int, int, int] | None:
    """Return batch, group and attempt of a train subject."""
    match = _GROUP.match(subject)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def mark_subject(run: str, stream: Stream, epoch: int) -> str:
    """Return where the beginning of an epoch is marked in a stream of commands."""
    return f"{_marks(run, stream)}.{epoch}"


def marks_in(run: str, stream: Stream) -> str:
    """Match the marks of all epochs in a stream of commands."""
    return f"{_marks(run, stream)}.*"


def marked_epoch(subject: str) -> int | None:
    """Return the epoch that a subject marks, None if it belongs to a message."""
    match = _MARK.match(subject)
    return int(match[1]) if match else None


def _marks(run: str, stream: Stream) -> str:
    return f"dg.{run}.{stream.subjects[0].split('.')[2]}.epoch"


def _piece(message: TrainPiece | PieceTrained | PieceReleased) -> str:
    piece, attempt = message.piece, f".{message.attempt}" if message.attempt else ""
    return f"{piece.group}.{piece.attempt}.{piece.number}{attempt}"


def _numbers(fragment: FragmentSlot) -> str:
    return f"{fragment.batch}.{fragment.group}.{fragment.first_sample}.{fragment.attempt}"
