"""What a worker says about itself once a second, and the answer that it takes no part.

None of it is stored: it is lost while the broker is away.
"""

from typing import Annotated, Literal

from pydantic import Field

from shared.messages.records import Count, Record, Seconds, Text, Token, wire_name

DeviceMode = Literal["train", "generate"]
Service = Literal["rollout", "reward", "trainer", "scheduler"]
Activity = Literal[
    "starting", "generating", "scoring", "training", "committing", "loading_weights",
    "waiting_for_rollout", "waiting_for_reward", "waiting_for_trainer", "refused", "stopping",
]  # fmt: skip


class Device(Record):
    """What a worker registers with."""

    kind: Text = "cpu"
    """As its maker calls it."""
    memory_bytes: Count = 0
    needs_bytes: Count = 0
    """What the worker will hold of the model."""
    concurrency: Annotated[int, Field(ge=0, le=4096), wire_name("slots")] = 0
    """Fragments that it generates at the same time; 0 if it cannot generate."""
    independent_devices: Annotated[bool, wire_name("fluid")] = False
    """A trainer of several devices, each with all weights: each finishes the fragment that it has
    and then trains, whatever the others do. If not, all of them change over together."""
    can_train: bool = False
    """A rollout device that computes gradients of whole groups if it is asked to."""
    gpu: Text = ""
    """Which of its host's accelerators, as CUDA_VISIBLE_DEVICES counts them ("2", "4,5"); empty if
    it uses none."""

    @property
    def refusal(self) -> str | None:
        """Why it cannot take part."""
        if self.needs_bytes <= self.memory_bytes:
            return None
        needs, has = (f"{size / 2**30:.2f} GiB" for size in (self.needs_bytes, self.memory_bytes))
        return f"the model needs {needs}, this {self.kind} has {has}"


class DeviceLoan(Record):
    """What a trainer's device is used for, as the device itself reports it."""

    loan_number: Annotated[Count, wire_name("generation")]
    mode: DeviceMode


class WorkerStatus(Record):
    kind: Literal["worker_status"] = "worker_status"
    service: Service
    worker: Token
    address: Token
    """The worker's name and this start of it: a worker that is started again has another one."""
    activity: Activity
    policy_version: Count | None = None
    num_done: Count = 0
    num_quarantined: Count = 0
    busy_seconds: Seconds = 0.0
    seconds: dict[Activity, Seconds] = Field(default_factory=dict)
    """Spent on each activity since it was started."""
    device: Device = Device()
    loan: DeviceLoan | None = None
    host: Text = ""
    """Name of the machine that it runs on."""
    url: Text = ""
    """Of its probes and metrics, as http://10.0.0.3:8000; empty if it serves none."""


class WorkerRefused(Record):
    """Refuses a worker; repeated after every status that the worker sends."""

    kind: Literal["worker_refused"] = "worker_refused"
    worker: Token
    """Address of the worker."""
    reason: Text


Transient = WorkerStatus | WorkerRefused
"""Messages that are not stored."""
