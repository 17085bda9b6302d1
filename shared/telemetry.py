"""Logs as one JSON object per line on stderr, and the metrics of every service."""

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO, cast
from urllib.parse import urlsplit

import structlog
from prometheus_client import Counter, Gauge, Histogram

QUARANTINED = Counter("digenrl_quarantined_total", "Messages that could not be decoded", ["stream"])

STREAM_FULL = Counter(
    "digenrl_stream_full_total", "Attempts to store a message in a full stream", ["stream"]
)

REDELIVERED = Counter("digenrl_redeliveries_total", "Work delivered more than once", ["stream"])

FRAGMENTS = Counter(
    "digenrl_fragments_total", "Fragments by stage and outcome", ["stage", "outcome"]
)

SAMPLES_FAILED = Counter(
    "digenrl_samples_failed_total", "Samples that a scorer could not score", ["scorer"]
)

STAGE_SECONDS = Histogram(
    "digenrl_stage_seconds", "Device seconds per fragment or group", ["stage"]
)

STEP = Gauge("digenrl_step", "Optimizer steps committed")

DLQ_MESSAGES = Gauge("digenrl_dlq_messages", "Quarantined messages of the run, by any service")

DEAD_LETTERS = Gauge("digenrl_dead_letters", "Dead letters about which something may be done")
DEAD_LETTERS_FOUND = Counter("digenrl_dead_letters_found_total", "Dead letters that were found")

PUBLISH_LAG = Histogram(
    "digenrl_publish_lag_seconds",
    "From an optimizer step to the first fragment generated with its result",
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)

ANNOUNCEMENTS_REFUSED = Counter(
    "digenrl_announcements_refused_total", "Versions announced of which there is no commit record"
)

SHARED_BYTES = Counter(
    "digenrl_shared_bytes_total",
    "Bytes of objects that several processes of a host read, by where they came from",
    ["source"],
)

TRANSFERRED_BYTES = Counter(
    "digenrl_transferred_bytes_total", "Bytes of objects stored (up) and read (down)", ["direction"]
)

TRANSFER_SECONDS = Counter(
    "digenrl_transfer_seconds_total",
    "Seconds in which at least one object was under way, by direction",
    ["direction"],
)

ROUND_TRIP_SECONDS = Gauge(
    "digenrl_round_trip_seconds", "Seconds of the quickest transfer of an object", ["direction"]
)

DIGESTED_BYTES = Counter(
    "digenrl_digested_bytes_total",
    "Bytes of which a sha256 was taken, of objects or of weights",
    ["of"],
)

WEIGHTS_LOAD_SECONDS = Histogram(
    "digenrl_weights_load_seconds", "Fetching and staging new weights, beside generation"
)

WEIGHTS_PAUSE_SECONDS = Histogram(
    "digenrl_weights_pause_seconds",
    "Between two fragments, putting new weights in use that are staged",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)

LOAN_RETURN_SECONDS = Histogram(
    "digenrl_loan_return_seconds",
    "From the command to return a borrowed device to its being free for training",
    buckets=(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)

LEADER = Gauge("digenrl_leader", "1 of the scheduler that commands, 0 of one that stands by")

LEASE_EPOCH = Gauge("digenrl_lease_epoch", "Epoch in which this scheduler commands")

FENCED_COMMANDS = Counter(
    "digenrl_fenced_total", "Commands and changes of a scheduler whose epoch is over", ["what"]
)

CORRUPT = Counter(
    "digenrl_corrupt_objects_total", "Stored objects found damaged, by what they are", ["what"]
)

ALARM = Gauge(
    "digenrl_alarm", "1 while something is wrong that a person may have to mend", ["what"]
)
NATS_STORES_NOTHING = "NATS answers and stores nothing"
"""Prefix of the readiness text in that state."""

STALENESS = Counter("digenrl_staleness_steps_total", "Trained samples by staleness", ["steps"])


def configure_logs(*, service: str, worker: str, run: str) -> None:
    """Send every log of this process to stderr, with its identity in each line."""

    def identity(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {"svc": service, "worker": worker, "run": run, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", key="ts"),
            structlog.processors.format_exc_info,
            identity,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(_stderr()),
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)


def quiet_logs() -> None:
    """Let a command that prints results log no more than warnings, to stderr."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(_stderr()),
    )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LossyText:
    """Writes the part that a stream accepts, and drops the rest: a service continues while the disk
    of its log is full, and after its reader has gone."""

    stream: TextIO

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()


def _stderr() -> TextIO:
    return cast(TextIO, LossyText(sys.stderr))


def public(url: str) -> str:
    """Return the address alone: no user, no password, no query.

    >>> public("nats://user:secret@nats:4222")
    'nats://nats:4222'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
