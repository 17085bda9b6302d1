"""Messages about workers: their status, once a second, and the refusal of one that takes no part.

They are not stored, and lost while the broker is away.
"""

from typing import Annotated, Literal, Self

from pydantic import Field

from shared.errors import OutOfMemory
from shared.limits import MAX_SHORTAGE_TEXT
from shared.messages.fluid import Checksum, Update
from shared.messages.records import (
    HOME,
    Count,
    Record,
    Seconds,
    Site,
    Text,
    Token,
    is_empty,
    is_none,
    wire_name,
)

DeviceMode = Literal["train", "generate"]
Service = Literal["rollout", "encoder", "reward", "trainer", "scheduler"]
Activity = Literal[
    "starting", "generating", "encoding", "scoring", "training", "committing", "loading_weights",
    "waiting_for_rollout", "waiting_for_reward", "waiting_for_trainer", "waiting_for_conditions",
    "refused", "stopping",
]  # fmt: skip


class Device(Record):
    """Describes the device that a worker registers."""

    kind: Text = "cpu"
    """The maker's name of the device."""
    memory_bytes: Count = 0
    needs_bytes: Count = 0
    """Bytes that the worker will hold of the model."""
    concurrency: Annotated[int, Field(ge=0, le=4096), wire_name("slots")] = 0
    """Fragments that it generates at the same time; 0 if it cannot generate."""
    ranks: Annotated[int, Field(ge=1, le=4096)] = 1
    """Processes that share its weights, a device of this kind each (a shard group)."""
    gpu: Text = ""
    """The host's accelerators that it uses, as CUDA_VISIBLE_DEVICES counts them ("2", "4,5")."""

    @property
    def refusal(self) -> str | None:
        """Reason why the device cannot take part."""
        if self.needs_bytes <= self.memory_bytes:
            return None
        needs, has = (f"{size / 2**30:.2f} GiB" for size in (self.needs_bytes, self.memory_bytes))
        return f"the model needs {needs}, this {self.kind} has {has}"


class DeviceLoan(Record):
    """Reports what a member's device is used for (TAG)."""

    loan_number: Annotated[Count, wire_name("generation")]
    mode: DeviceMode


class MemoryShortage(Record):
    """Reports that work did not fit the memory of a device, and what the device does since."""

    what: Text
    """Work that did not fit, such as "a denoising step of 8 samples of 1024 x 1024 x 1"."""
    since: Text
    """How the device works since then, such as "4 samples at a time"."""
    remedy: Text
    """Recipe keys that avoid it."""
    count: Annotated[int, Field(ge=1, lt=2**63)] = 1
    """How often this worker ran out of memory since its start."""

    @classmethod
    def from_error(cls, error: OutOfMemory, since: str) -> Self:
        """Return the report of an error, with what the device does since."""
        what, remedy = (text[:MAX_SHORTAGE_TEXT] for text in (error.what, error.remedy))
        return cls(what=what, since=since[:MAX_SHORTAGE_TEXT], remedy=remedy)


class GpuUse(Record):
    """Reports memory, utilisation and power of a worker's GPUs, as their driver counts them."""

    memory_bytes: Count
    """Bytes in use, also by other processes."""
    utilisation: Annotated[float, Field(ge=0, le=1)]
    """Share of the last second in which a kernel ran."""
    watts: Annotated[float, Field(ge=0)]


class Holds(Record):
    """The version whose weights, moments and average a fluid device has, to the last bit."""

    version: Count
    checksum: Checksum
    update: Update
    """Number of the batch's updates that were taken since, where they have made no version yet."""
    host: Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$", exclude_if=is_empty)] = ""
    """Name of a folder in its host's memory, by which members that share it add up their sums."""
    site: Annotated[str, Field(exclude_if=is_empty)] = ""
    """Site whose other hosts it can give its sum to; empty if there is no way."""
    sum_bytes: Annotated[Count, Field(default=0, exclude_if=is_empty)]
    """Bytes of a sum of gradients; 0 if they are not known."""


class Transferred(Record):
    """Reports what a worker has stored, or read, since its start: objects whose seconds are the
    line's."""

    num_bytes: Count
    seconds: Seconds
    """Seconds in which at least one object was under way."""


class WorkerStatus(Record):
    kind: Literal["worker_status"] = "worker_status"
    service: Service
    worker: Token
    address: Token
    """Name of the worker and of this start of it: after a restart it is another one."""
    activity: Activity
    policy_version: Count | None = None
    num_done: Count = 0
    num_quarantined: Count = 0
    busy_seconds: Seconds = 0.0
    seconds: dict[Activity, Seconds] = Field(default_factory=dict)
    """Seconds on each activity since the start."""
    device: Device = Device()
    loan: DeviceLoan | None = None
    host: Text = ""
    """Name of the machine."""
    site: Site = HOME
    url: Text = ""
    """Address of its probes and metrics, such as http://10.0.0.3:8000; empty if it serves none."""
    note: Text = ""
    """Missing inputs and the setting for them, or by how much its device differs from other
    kinds; empty otherwise."""
    memory_shortage: MemoryShortage | None = None
    """The newest shortage of memory; None if everything has fitted."""
    holds: Holds | None = Field(default=None, exclude_if=is_none)
    """State from which a fluid device could step, its own step included; None: it has yet to load
    it."""
    staged: Count | None = Field(default=None, exclude_if=is_none)
    """Newest version of which a device that only generates has the weights."""
    sent: Transferred | None = Field(default=None, exclude_if=is_none)
    received: Transferred | None = Field(default=None, exclude_if=is_none)
    round_trip: Seconds | None = Field(default=None, exclude_if=is_none)
    """Seconds of its quickest transfer: about a round trip to the object store."""
    gpu_use: GpuUse | None = Field(default=None, exclude_if=is_none)
    """None: not known."""
    versions: dict[Text, Text] = Field(default_factory=dict, max_length=64, exclude_if=is_empty)
    """Versions of the libraries that it computes with, and of Python."""


class WorkerRefused(Record):
    """Refuses a worker; repeated after every status that the worker sends."""

    kind: Literal["worker_refused"] = "worker_refused"
    worker: Token
    """Address of the worker."""
    reason: Text


Transient = WorkerStatus | WorkerRefused
"""Messages that are not stored."""
