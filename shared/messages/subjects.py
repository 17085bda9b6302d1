"""Where each message goes: streams, and one subject ("slot") per piece of work.

    dg.<run>.task.<address>.<batch>.<group>.<first>.<attempt>  DG_TASK    GenerateFragment
    dg.<run>.traj.<batch>.<group>.<first sample>.<attempt>     DG_TRAJ    FragmentGenerated
    dg.<run>.rew.<batch>.<group>.<first sample>.<attempt>      DG_REW     FragmentScored
    dg.<run>.train.<batch>.<group>.<attempt>                   DG_TRAIN   TrainGroup
    dg.<run>.grad.<address>.<batch>.<group>.<attempt>          DG_GRAD    ComputeGradient
    dg.<run>.part.<batch>.<group>.<attempt>                    DG_PART    GradientComputed
    dg.<run>.device.<address>                                  DG_DEVICE  SetDevice
    dg.<run>.evt.<kind>                                        DG_EVT     everything else
    dg.<run>.quarantine.<stream>.<sequence>                    DG_DLQ     bytes that are no message
    dg.<run>.live.<service>.<worker>                           (none)     WorkerStatus
    dg.<run>.refused.<worker>                                  (none)     WorkerRefused

The first six streams keep one message per subject and refuse a second, for ever and over
restarts: whoever does a piece of work twice finds its slot taken. A task (fragment or gradient)
names its device: given to another device it has another slot, and still one slot for the result.
DG_DEVICE keeps the newest message per subject: the state that a device shall have.
"""

import re
from dataclasses import dataclass

from shared.messages.contracts import (
    ComputeGradient,
    Fragment,
    FragmentGenerated,
    FragmentScored,
    FragmentSlot,
    GenerateFragment,
    GradientComputed,
    Message,
    SetDevice,
    TrainGroup,
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


ADVISORIES = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.*.*"
TASK = Stream("DG_TASK", ("dg.*.task.>",), 64 * MIB, slots=True)
TRAJ = Stream("DG_TRAJ", ("dg.*.traj.>",), 64 * MIB, slots=True)
REW = Stream("DG_REW", ("dg.*.rew.>",), 64 * MIB, slots=True)
TRAIN = Stream("DG_TRAIN", ("dg.*.train.>",), 64 * MIB, slots=True)
GRAD = Stream("DG_GRAD", ("dg.*.grad.>",), 64 * MIB, slots=True)
PART = Stream("DG_PART", ("dg.*.part.>",), 64 * MIB, slots=True)
DEVICE = Stream("DG_DEVICE", ("dg.*.device.>",), 16 * MIB, slots=False, newest=True)
EVT = Stream("DG_EVT", ("dg.*.evt.>",), 64 * MIB, slots=False)
DLQ = Stream("DG_DLQ", (ADVISORIES, "dg.*.quarantine.>"), 64 * MIB, slots=False)
STREAMS = (TASK, TRAJ, REW, TRAIN, GRAD, PART, DEVICE, EVT, DLQ)
ADDRESSED = (TASK, GRAD)
"""Streams whose subjects name the device before the batch."""

_FRAGMENT = re.compile(
    r"\Adg\.[^.]+\.(?:task\.[^.]+|traj|rew)\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})\Z"
)
_GROUP = re.compile(r"\Adg\.[^.]+\.train\.(\d{1,9})\.(\d{1,9})\.(\d{1,9})\Z")


def subject_of(run: str, message: Message) -> str:
    match message:
        case GenerateFragment(fragment=fragment):
            return f"dg.{run}.task.{message.worker}.{_numbers(fragment)}"
        case FragmentGenerated(fragment=fragment):
            return f"dg.{run}.traj.{_numbers(fragment)}"
        case FragmentScored(fragment=fragment):
            return f"dg.{run}.rew.{_numbers(fragment)}"
        case ComputeGradient(group=group):
            return f"dg.{run}.grad.{message.worker}.{group.batch}.{group.group}.{group.attempt}"
        case GradientComputed():
            return f"dg.{run}.part.{message.batch}.{message.group}.{message.attempt}"
        case TrainGroup():
            return f"dg.{run}.train.{message.batch}.{message.group}.{message.attempt}"
        case _:
            return _subject_without_slot(run, message)


def _subject_without_slot(run: str, message: Message) -> str:
    match message:
        case SetDevice():
            return f"dg.{run}.device.{message.worker}"
        case WorkerStatus():
            return f"dg.{run}.live.{message.service}.{message.worker}"
        case WorkerRefused():
            return refusals_for(run, message.worker)
        case _:
            return f"dg.{run}.evt.{message.kind}"


def stream_of(subject: str) -> Stream:
    """Return the stream that a subject of one run belongs to."""
    kind = subject.split(".")[2]
    return next(stream for stream in STREAMS if stream.subjects[0] == f"dg.*.{kind}.>")


def batch_subject(run: str, stream: Stream, batch: int) -> str:
    """Match every slot of one batch in one stream."""
    kind = stream.subjects[0].split(".")[2]
    return f"dg.{run}.{kind}{'.*' if stream in ADDRESSED else ''}.{batch}.>"


def tasks_for(run: str, address: str) -> str:
    """Match every fragment that one device is to generate."""
    return f"dg.{run}.task.{address}.>"


def gradients_for(run: str, address: str) -> str:
    """Match every group whose gradient one device is to compute."""
    return f"dg.{run}.grad.{address}.>"


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
    found = _FRAGMENT.match(subject)
    if found is None:
        return None
    batch, group, first_sample, attempt = (int(number) for number in found.groups())
    return FragmentSlot(batch=batch, group=group, first_sample=first_sample, attempt=attempt)


def group_slot(subject: str) -> tuple[int, int, int] | None:
    """Return batch, group and attempt of a train subject."""
    found = _GROUP.match(subject)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _numbers(fragment: Fragment) -> str:
    return f"{fragment.batch}.{fragment.group}.{fragment.first_sample}.{fragment.attempt}"
