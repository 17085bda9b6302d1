"""Messages about workers: their status, once a second, and the refusal of one that takes no part.

They are not stored, and lost while the broker is away.
"""

from typing import Annotated, Literal

from pydantic import Field

from shared.messages.records import Count, Record, Seconds, Text, Token, wire_name

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
    independent_devices: Annotated[bool, wire_name("fluid")] = False
    """Whether each of a trainer's devices has all weights: it finishes its fragment and trains,
    whatever the others do. Otherwise all of them switch together."""
    can_train: bool = False
    """Whether a rollout device computes gradients of whole groups on request."""
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
    """Reports what a trainer's device is used for."""

    loan_number: Annotated[Count, wire_name("generation")]
    mode: DeviceMode


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
    url: Text = ""
    """Address of its probes and metrics, such as http://10.0.0.3:8000; empty if it serves none."""
    note: Text = ""
    """What it lacks and which setting decides that, in words; empty if it lacks nothing."""


class WorkerRefused(Record):
    """Refuses a worker; repeated after every status that the worker sends."""

    kind: Literal["worker_refused"] = "worker_refused"
    worker: Token
    """Address of the worker."""
    reason: Text


Transient = WorkerStatus | WorkerRefused
"""Messages that are not stored."""
