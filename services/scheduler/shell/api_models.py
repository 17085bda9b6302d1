"""Requests and answers of the HTTP API. The text below a field is its description in `/docs`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.scheduler.core.state import Phase
from shared.messages.contracts import TagMode
from shared.messages.workers import Activity, Service
from shared.run.usage import DeviceUse

Drain = Literal["no", "draining", "drained"]
WaitsFor = Literal["rollout", "reward", "trainer", "operator", "nothing"]


class View(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


def example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


EXAMPLE_DECISION = {
    "batch": 12, "groups": 3, "reason": "scan", "predicted_seconds": 3.9, "predicted_gain": 0.08,
    "measured_seconds": 4.0, "measured_gain": 0.06,
}  # fmt: skip


class RunView(View):
    """Where a run is, and what it waits for."""

    model_config = example(
        run="digits", release="0.2.0", phase="running", step=12, steps=30, policy_version=12,
        reward_mean=0.71,
        effective_sample_share=1.0, seconds_per_step=4.1, eta_seconds=73.8, waiting_for="rollout",
        missing_workers=[],
        num_workers={"rollout": 2, "reward": 1, "trainer": 1}, num_quarantined=0,
        num_dead_letters=0, pause_at_failure=False, failure=None, alarms=[],
        max_staleness=0, max_staleness_reason="the recipe says so",
    )  # fmt: skip

    run: str
    """Name of the run."""
    release: str
    """Release of DigenRL that runs it."""
    phase: Phase
    """waiting: for the trainer's first version. failed: `failure` has the reason."""
    step: int
    """Optimizer steps committed."""
    steps: int
    """Optimizer steps that the recipe asks for."""
    policy_version: int | None
    """The newest committed version; null before the first."""
    reward_mean: float | None
    """Mean reward of the newest committed batch."""
    effective_sample_share: float | None
    """Share of its number that the newest committed batch's samples count as, by their weights."""
    seconds_per_step: float | None
    """Median over the newest steps."""
    eta_seconds: float | None
    """Seconds until the last step, at that pace."""
    waiting_for: WaitsFor
    """Service that the run waits for. operator: a request to resume."""
    num_workers: dict[Service, int]
    """Number of workers that report, by service."""
    missing_workers: list[Service]
    """Services that the run needs and that no worker provides."""
    num_quarantined: int
    """Number of received payloads that were no message."""
    num_dead_letters: int
    """Number of open dead letters: an operator may act on them."""
    pause_at_failure: bool
    """Whether the run will be paused as soon as an attempt fails."""
    failure: str | None
    """Why the run has failed, if it has."""
    alarms: list[str]
    """Why the run gets nowhere: no device works, or the newest batches trained nothing."""
    max_staleness: int
    """Steps that a sample may be stale by; "auto" is decided when a run begins."""
    max_staleness_reason: str | None
    """Why it is that number."""


EXAMPLE_SHORTAGE = {
    "what": "a denoising step of 8 samples of 1024 x 1024 x 1",
    "since": "4 at a time, which takes longer", "remedy": "schedule.fragment_size of at most 4",
    "count": 1,
}  # fmt: skip


class MemoryShortageView(View):
    """A worker whose device ran out of memory."""

    model_config = example(**EXAMPLE_SHORTAGE)

    what: str
    """The work that did not fit."""
    since: str
    """How the device works since then."""
    remedy: str
    """Recipe keys that avoid it."""
    count: int
    """How often the worker ran out of memory since its start."""


class GpuUseView(View):
    """Memory, utilisation and power of a worker's GPUs, as their driver counts them."""

    model_config = example(memory_bytes=61_000_000_000, utilisation=0.97, watts=640.0)

    memory_bytes: int
    """Bytes in use, also by other processes."""
    utilisation: float
    """Share of the last second in which a kernel ran, from 0 to 1."""
    watts: float
    """Power."""


class WorkerView(View):
    """A live worker, and what it does."""

    model_config = example(
        worker="rollout-0", address="rollout-0-1f3a5c7e", service="rollout", host="node7",
        site="home", url="http://10.0.0.7:8000", device="NVIDIA H100 80GB HBM3", gpu="0",
        memory_bytes=85_000_000_000, activity="generating", use="generating", policy_version=12,
        note="", num_done=96, busy_seconds=310.2, num_quarantined=0, refused=None, drain="no",
        lent=False, loan_number=None,
        seconds_per_sample=0.42, num_in_hand=2, seconds_per_gradient=None,
        seconds_since_seen=0.3, memory_shortage=None,
        bytes_up=125_000_000, seconds_up=100.0, mbits_up=10.0, bytes_down=836_000_000,
        seconds_down=668.8, mbits_down=10.0, round_trip_seconds=0.05,
        declines="generates only: its sums would take 334 s at 10 Mbit/s",
        versions={"python": "3.11.9", "torch": "2.10.0", "diffusers": "0.42.1"},
        gpu_use={"memory_bytes": 61_000_000_000, "utilisation": 0.97, "watts": 640.0},
    )  # fmt: skip

    worker: str
    """Name of the worker."""
    address: str
    """Address of this start of the worker; one that is restarted has another."""
    service: Service
    """Service that the worker provides."""
    host: str
    """Name of the machine that it runs on."""
    site: str
    """Name of its host's site."""
    url: str
    """URL of its probes and metrics; empty if not reported."""
    device: str
    """Kind of its device, as the maker calls it."""
    gpu: str
    """Accelerators of its host that it uses; empty if none."""
    memory_bytes: int
    """Memory of its device."""
    gpu_use: GpuUseView | None = None
    """Null without a GPU, or without NVIDIA's library for Python (`nvidia-ml-py`)."""
    activity: Activity
    """Activity that the worker reports."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the libraries that it computes with, and of Python."""
    note: str
    """Missing inputs and the setting for them, or by how much its device differs from
    other kinds of devices; else empty."""
    use: DeviceUse | None
    """The worker's use as the scheduler sees it and, if it waits, the service that it waits for."""
    policy_version: int | None
    """Version whose weights are loaded."""
    num_done: int
    """Number of work items finished."""
    busy_seconds: float
    """Seconds spent on work since it was started."""
    num_quarantined: int
    """Number of received payloads that were no message."""
    refused: str | None
    """Why the worker is refused, if it is."""
    drain: Drain
    """draining: it is given nothing new, and finishes what it has. drained: it has finished."""
    lent: bool
    """TAG: whether its device is lent for generation."""
    loan_number: int | None
    """TAG: number of the newest command that it has followed; null if it is never lent."""
    seconds_per_sample: float | None
    """Measured seconds per generated sample; null if it has not generated."""
    num_in_hand: int
    """Number of fragments that the worker has."""
    seconds_per_gradient: float | None
    """Measured seconds per trained group; null if it has not trained."""
    seconds_since_seen: float
    """Seconds since its newest report."""
    memory_shortage: MemoryShortageView | None
    """The newest shortage of its device's memory; null if everything has fitted."""
    bytes_up: int = 0
    """Bytes of the objects that it has stored since its start."""
    seconds_up: float = 0.0
    """Seconds in which any object was under way."""
    mbits_up: float | None = None
    """Measured rate of its line on the way up, in Mbit/s; null before the first transfer."""
    bytes_down: int = 0
    """Bytes of the objects that it has read since its start."""
    seconds_down: float = 0.0
    """Seconds in which any object was under way."""
    mbits_down: float | None = None
    """Measured rate of its line on the way down, in Mbit/s; null before the first transfer."""
    round_trip_seconds: float | None = None
    """Seconds of its quickest transfer: about a round trip to the object store."""
    declines: str = ""
    """Work that it is not given because of its line, and why; empty if it is given all work."""


class TagDecisionView(View):
    """Decision about trainer-assisted generation for one batch."""

    model_config = example(**EXAMPLE_DECISION)

    batch: int
    """Number of the batch."""
    groups: int
    """Groups that members may generate."""
    reason: str
    """Why this number was chosen."""
    predicted_seconds: float | None
    """Predicted seconds of the batch with this help."""
    predicted_gain: float | None
    """Predicted gain over the batch without help, which takes 10 % longer at 0.1."""
    measured_seconds: float | None
    """Seconds that the batch took; null while it is in flight."""
    measured_gain: float | None
    """Gain over the time predicted without help."""


class TagView(View):
    """Trainer-assisted generation: the mode in force, and its decisions."""

    model_config = example(
        mode="auto", groups=0, lent=1, members=1, samples_left=4,
        costs={"help_per_sample": 0.5, "train_per_group": 0.9, "ready": 0.1, "commit": 0.2,
               "switch": 0.05},
        decisions=[EXAMPLE_DECISION],
    )  # fmt: skip

    mode: TagMode
    """Whose choice applies: the scheduler's (auto), none (off), or an operator's (fixed)."""
    groups: int
    """Groups per batch in mode fixed."""
    lent: int
    """Number of members that are lent for generation."""
    members: int
    """Number of members that can be lent."""
    samples_left: int
    """Samples that members may still take in the current batch."""
    costs: dict[str, float | None]
    """Learned seconds; null if nothing was measured."""
    decisions: list[TagDecisionView]
    """Newest first."""


class Accepted(View):
    """The request is on its way; its effect shows in `/v1/run`, `/v1/tag` or `/v1/workers`."""

    model_config = example(action="pause", id="8c1f0a5be0c64d1c9d6a3d2f5f1f7a10")

    action: Literal["pause", "pause_at_failure", "resume", "stop", "tag", "drain", "undrain"]
    """Action that was requested."""
    id: str
    """Identifier of this request in the logs."""


class TagBody(View):
    """A mode for TAG, which applies from the next batch on; off applies at once."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"mode": "fixed", "groups": 3}]}
    )

    mode: TagMode
    """Whose choice applies: the scheduler's (auto), none (off), or yours (fixed)."""
    groups: Annotated[int, Field(ge=0)] | None = None
    """fixed: number of groups per batch that members generate."""
