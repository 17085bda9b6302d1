"""From the messages of a run, as they are heard, to intervals of work on its devices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.two_devices.bound import Speed
from shared.messages.contracts import (
    FragmentGenerated,
    FragmentScored,
    GradientComputed,
    GroupTrained,
    Message,
    PolicyPublished,
)

Use = Literal["generate", "train", "commit", "score"]
IN_ORDER: tuple[Use, ...] = ("train", "score", "generate", "commit")
"""Training is unbroken; a lent device generates before and after; publication overlaps both."""

NOTHING = 1e-9
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Heard:
    at: float
    """Monotonic seconds of the listener."""
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work that a device reports to have done."""

    device: str
    use: Use
    end: float
    """When it was heard of."""
    seconds: float
    """That it took, without interruptions."""
    samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    device: str
    use: Use
    begin: float
    end: float


def device_of(address: str) -> str:
    """The worker's name, without what tells its starts apart."""
    return address.rpartition("-")[0]


def jobs_of(heard: Iterable[Heard], *, group_size: int) -> list[Job]:
    """What took time on a device, in the order in which it was heard of."""
    found = (_job(each.message, each.at, group_size) for each in heard)
    return [job for job in found if job is not None and job.seconds > 0]


def _job(message: Message, at: float, group_size: int) -> Job | None:
    match message:
        case FragmentGenerated(fragment=fragment, worker=worker):
            return _of(worker, "generate", at, message.seconds, fragment.num_samples)
        case FragmentScored(fragment=fragment, worker=worker):
            return _of(worker, "score", at, message.seconds, fragment.num_samples)
        case GroupTrained(worker=worker):
            return _of(worker, "train", at, message.seconds, group_size)
        case GradientComputed(contribution=contribution):
            return _of(contribution.worker, "train", at, message.seconds, group_size)
        case PolicyPublished(worker=worker):
            return _of(worker, "commit", at, message.seconds, 0)
        case _:
            return None


def _of(address: str, use: Use, at: float, seconds: float, samples: int) -> Job:
    return Job(device=device_of(address), use=use, end=at, seconds=seconds, samples=samples)


def published_at(heard: Iterable[Heard]) -> dict[int, float]:
    """When each policy version was first announced."""
    times: dict[int, float] = {}
    for each in heard:
        if isinstance(each.message, PolicyPublished):
            times.setdefault(each.message.policy.version, each.at)
    return times


def speeds_of(jobs: Sequence[Job], devices: Iterable[str], *, least: int) -> dict[str, Speed]:
    """Seconds per sample of each device; of what it did with fewer than ``least``, nothing."""
    return {
        device: Speed(
            generate=_pace(jobs, device, "generate", least),
            train=_pace(jobs, device, "train", least),
        )
        for device in devices
    }


def _pace(jobs: Sequence[Job], device: str, use: Use, least: int) -> float:
    mine = [job for job in jobs if (job.device, job.use) == (device, use)]
    samples = sum(job.samples for job in mine)
    return sum(job.seconds for job in mine) / samples if samples >= least else float("inf")


def busy_seconds(jobs: Sequence[Job], devices: Iterable[str]) -> Mapping[str, dict[Use, float]]:
    """Of each device, by use."""
    return {
        device: {
            use: sum(job.seconds for job in jobs if (job.device, job.use) == (device, use))
            for use in IN_ORDER
        }
        for device in devices
    }


def intervals_of(jobs: Sequence[Job]) -> list[Interval]:
    """When each job was worked on.

    A job is heard of when its result is stored, and may have been interrupted; so it is laid from
    its end backwards into what its device has free, unbroken kinds of work first.
    """
    laid: dict[str, list[Interval]] = {}
    for use in IN_ORDER:
        for job in sorted(jobs, key=lambda job: -job.end):
            if job.use == use:
                taken = laid.setdefault(job.device, [])
                taken.extend(_lay(job, taken))
    return sorted((i for each in laid.values() for i in each), key=lambda i: (i.device, i.begin))


def _lay(job: Job, taken: Sequence[Interval]) -> list[Interval]:
    left, end, parts = job.seconds, job.end, []
    for other in sorted(taken, key=lambda interval: -interval.end):
        begin = max(other.end, end - left)
        if begin < end:
            parts.append(Interval(device=job.device, use=job.use, begin=begin, end=end))
            left -= end - begin
        end = min(end, other.begin)
        if left < NOTHING:
            return parts
    parts.append(Interval(device=job.device, use=job.use, begin=end - left, end=end))
    return parts
