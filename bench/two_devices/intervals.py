"""From the messages of a run, as they are heard, to intervals of work on its devices."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.runner.figures import Interval, Use
from bench.runner.watch import Heard
from shared.messages.contracts import FragmentGenerated, FragmentScored, Message, PolicyPublished
from shared.messages.fluid import PieceTrained

IN_ORDER: tuple[Use, ...] = ("train", "score", "generate", "commit")
"""Training is unbroken; a lent device generates before and after; publication overlaps both."""
NOTHING_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work that a device reports to have done."""

    device: str
    use: Use
    end: float
    """When it was heard of."""
    seconds: float
    """Seconds that it took, without interruptions."""
    samples: int = 0


def device_of(address: str) -> str:
    """Returns the worker's name, without what tells its starts apart."""
    return address.rpartition("-")[0]


def jobs_of(heard: Iterable[Heard]) -> list[Job]:
    """Returns what took time on a device, in the order in which it was heard of."""
    found = (_job(each.message, each.at) for each in heard)
    return [job for job in found if job is not None and job.seconds > 0]


def _job(message: Message, at: float) -> Job | None:
    match message:
        case FragmentGenerated(fragment=fragment, worker=worker):
            return _of(worker, "generate", at, message.seconds, fragment.num_samples)
        case FragmentScored(fragment=fragment, worker=worker):
            return _of(worker, "score", at, message.seconds, fragment.num_samples)
        case PieceTrained(worker=worker, piece=piece):
            return _of(worker, "train", at, message.seconds, piece.num_samples)
        case PolicyPublished(worker=worker):
            return _of(worker, "commit", at, message.seconds, 0)
        case _:
            return None


def _of(address: str, use: Use, at: float, seconds: float, samples: int) -> Job:
    return Job(device=device_of(address), use=use, end=at, seconds=seconds, samples=samples)


def intervals_of(jobs: Sequence[Job]) -> list[Interval]:
    """Returns when each job was worked on.

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

    def part(begin: float, end: float) -> Interval:
        samples = job.samples * (end - begin) / job.seconds
        return Interval(job.device, job.use, begin, end, samples)

    for other in sorted(taken, key=lambda interval: -interval.end):
        begin = max(other.end, end - left)
        if begin < end:
            parts.append(part(begin, end))
            left -= end - begin
        end = min(end, other.begin)
        if left < NOTHING_S:
            return parts
    return [*parts, part(end - left, end)]
