"""Names what devices do in the words of the run's page and of the command line."""

from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.shell.api_models import WorkerView
    from shared.run.log_entries import Entry

USE_WORDS = {
    "generating": "generates", "training": "trains", "scoring": "scores",
    "committing": "exchanges gradients",
    "waiting_for_rollout": "waits for generation", "waiting_for_trainer": "waits for training",
    "waiting_for_reward": "waits for rewards", "waiting_for_weights": "loads weights",
    "waiting_for_conditions": "waits for encoded prompts", "tail": "nothing left in this batch",
    "paused": "paused",
}  # fmt: skip
"""Uses of devices, in the order of the legend."""


MIN_CHANGE = 5e-4
"""Smaller changes of a score are shown as 0."""
DRAIN_WORDS: Mapping[str, str] = {
    "draining": "finishes what it has, and gets nothing new",
    "drained": "has no work, and gets none",
}
"""Activity of a worker without new work."""

QUEUES = {
    "generation": ("given to no device yet", "devices are missing, or hang: see the workers"),
    "in_hand": ("at devices that generate", "the worker hangs or has become slow: drain it"),
    "scoring": ("waiting for rewards", "reward workers are too few, or hang: more reward.workers"),
    "training": ("waiting to be trained", "a device that trains hangs, or has become slow"),
}  # fmt: skip
"""Queues in the order in which samples go through them, and what it means if one is late."""


_CONTROLS = {
    number: f"<U+{number:04X}>"
    for number in (*range(32), *range(127, 160), 0x2028, 0x2029)
} | {ord("\n"): "\\n", ord("\t"): "\\t", ord("\r"): "\\r"}  # fmt: skip
_DIRECTIONS = {
    number: f"<U+{number:04X}>" for number in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Characters that make a terminal or a browser show what follows in another order."""


def visible(text: str, *, lines: bool = False) -> str:
    r"""Return a text with its control and direction characters spelled out, on one line.

    Args:
        lines: whether the text may have several lines and tabs.

    >>> print(visible("a cat\nFAKE \u202egnp"))
    a cat\nFAKE <U+202E>gnp
    """
    return text.translate(_DIRECTIONS if lines else _CONTROLS | _DIRECTIONS)


def clock(seconds: float) -> str:
    """Return how long something takes, in words.

    >>> clock(33507), clock(270), clock(45)
    ('9 h 18 min', '4 min 30 s', '45 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def time_left(seconds: float) -> str:
    """Return how long something still takes, as exactly as that can be known.

    >>> time_left(47437), time_left(4700), time_left(270)
    ('about 13 h', 'about 1 h 15 min', '4 min 30 s')
    """
    if seconds < 3600:
        return clock(seconds)
    step = 60 if seconds > 36000 else 15
    hours, minutes = divmod(round(seconds / 60 / step) * step, 60)
    return f"about {hours} h {minutes} min" if minutes else f"about {hours} h"


def figure(value: float) -> str:
    """Return a number to three significant digits, and never with an exponent.

    >>> figure(1213.4), figure(63.77), figure(0.0053271), figure(2e-7)
    ('1,210', '63.8', '0.00533', '0.0000002')
    """
    return f"{Decimal(f'{value:.3g}'):,f}"


def signed(value: float) -> str:
    """Return a change to two significant digits, with its sign.

    >>> signed(0.1234), signed(-3.21), signed(0.0), signed(1e-5)
    ('+0.12', '-3.2', '0', '0')
    """
    if abs(value) < MIN_CHANGE:
        return "0"
    return f"{Decimal(f'{value:.2g}'):+,f}"


KINDS = {
    "unreadable": "no message", "undelivered": "not finished", "failed": "attempt failed",
    "unscored": "no score", "refused": "not true",
}  # fmt: skip
"""Kinds of dead letters."""


def step_of(batch: int) -> str:
    """Return what a batch is called, by the optimizer step that it is for.

    >>> step_of(51)
    'step 52 (batch 51)'
    """
    return f"step {batch + 1} (batch {batch})"


def describe_work(worker: "WorkerView") -> str:
    """Return what a worker does or waits for, or why it gets nothing: the scheduler knows best what
    a device waits for, and the device knows best what it works on."""
    if worker.refused:
        return f"refused: {worker.refused}"
    if worker.drain != "no":
        return f"{worker.drain}: {DRAIN_WORDS[worker.drain]}"
    waits = worker.activity.startswith("waiting") and not worker.note
    use = worker.use if waits and worker.use else worker.activity
    lent = worker.lent and worker.service == "trainer"
    return USE_WORDS.get(use, use.replace("_", " ")) + (" (lent)" if lent else "")


def describe_shortage(worker: "WorkerView") -> str:
    """Return what did not fit a worker's memory, what it does since and the remedy; empty if
    everything has fitted."""
    shortage = worker.memory_shortage
    if not shortage:
        return ""
    return f"{shortage.what}; since then {shortage.since}; {shortage.remedy}"


def describe_line(worker: "WorkerView") -> str:
    """Return the measured rates and the round trip of a worker's line; empty before the first
    transfer."""
    rates = ((worker.mbits_up, "up"), (worker.mbits_down, "down"))
    known = [f"{rate:,.3g} Mbit/s {way}" for rate, way in rates if rate]
    if known and worker.round_trip_seconds:
        known.append(f"{1000 * worker.round_trip_seconds:.0f} ms")
    return ", ".join(known)


def drained_counts(workers: "Sequence[WorkerView]") -> dict[str, str]:
    """Return in words, by service, how many workers get nothing new; without other services."""
    counts: dict[str, Counter[str]] = {}
    for each in workers:
        if each.drain != "no":
            counts.setdefault(each.service, Counter())[each.drain] += 1
    return {
        service: ", ".join(f"{number} {drain}" for drain, number in sorted(drains.items()))
        for service, drains in counts.items()
    }


def worker_counts(workers: "Sequence[WorkerView]") -> str:
    """Return the number of workers of each service, and how many of these are drained."""
    drained = drained_counts(workers)
    return ", ".join(
        f"{number} {service}" + (f" ({drained[service]})" if service in drained else "")
        for service, number in Counter(each.service for each in workers).items()
    )


def gpu_words(worker: "WorkerView") -> str:
    """Return memory, utilisation and power of a worker's GPUs; empty if they are not known."""
    use = worker.gpu_use
    if use is None:
        return ""
    of = f" of {worker.memory_bytes / 2**30:.0f}" if worker.memory_bytes else ""
    memory = f"{use.memory_bytes / 2**30:.0f}{of} GiB"
    return f"{memory}, {use.utilisation:.0%} busy, {use.watts:.0f} W"


def event_words(entry: "Entry") -> str:
    """Return what an entry of a run's log means for its devices; empty for other entries."""
    match entry.event:
        case "alarm":
            return (
                f"alarm {entry.what}: {entry.reason}" if entry.firing else f"{entry.what} is over"
            )
        case "dead_letter":
            return f"failed work: {entry.reason}"
        case "phase":
            return f"{entry.phase}: {entry.failure}" if entry.failure else entry.phase
    return ""
