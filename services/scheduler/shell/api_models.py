"""What the HTTP API takes and gives. The words under each field are its description in `/docs`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.scheduler.core.state import Phase
from services.scheduler.core.usage import Use
from shared.messages.contracts import TagMode
from shared.messages.workers import Activity, Service

WaitsFor = Literal["rollout", "reward", "trainer", "operator", "nothing"]


class View(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


def example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


A_DECISION = {
    "batch": 12, "groups": 3, "reason": "scan", "predicted_seconds": 3.9, "predicted_gain": 0.08,
    "measured_seconds": 4.0, "measured_gain": 0.06,
}  # fmt: skip
A_GROUP = {
    "group": 3, "attempt": 0, "policy_version": 12, "stages": ["scored", "generated"],
    "trained_by": None, "rewards": [0.2, 0.9, None, 0.4],
}  # fmt: skip


class RunView(View):
    """Where a run is, and what it waits for."""

    model_config = example(
        run="digits", phase="running", step=12, steps=30, policy_version=12, reward_mean=0.71,
        seconds_per_step=4.1, eta_seconds=73.8, waiting_for="rollout", missing_workers=[],
        num_workers={"rollout": 2, "reward": 1, "trainer": 1}, num_quarantined=0, failure=None,
    )  # fmt: skip

    run: str
    """Name of the run."""
    phase: Phase
    """waiting: for the trainer's first version. failed: `failure` says why."""
    step: int
    """Optimizer steps committed."""
    steps: int
    """Optimizer steps that the recipe asks for."""
    policy_version: int | None
    """The newest committed version; null before the first."""
    reward_mean: float | None
    """Mean reward of the newest committed batch."""
    seconds_per_step: float | None
    """Median over the newest steps."""
    eta_seconds: float | None
    """Until the last step, at that pace."""
    waiting_for: WaitsFor
    """What the run goes on with. operator: a request to resume."""
    num_workers: dict[Service, int]
    """Workers that report, by service."""
    missing_workers: list[Service]
    """Services without which the run cannot go on, and of which no worker takes part."""
    num_quarantined: int
    """Received bytes that were no message."""
    failure: str | None
    """Why the run has failed, if it has."""


class WorkerView(View):
    """A live worker, and what it does."""

    model_config = example(
        worker="rollout-0", address="rollout-0-1f3a5c7e", service="rollout", host="node7",
        url="http://10.0.0.7:8000", device="NVIDIA H100 80GB HBM3", gpu="0",
        memory_bytes=85_000_000_000, activity="generating", use="generating", policy_version=12,
        num_done=96, busy_seconds=310.2, num_quarantined=0, refused=None, lent=False,
        seconds_per_sample=0.42, num_in_hand=2, trains_group=None, seconds_per_gradient=None,
        seconds_since_seen=0.3,
    )  # fmt: skip

    worker: str
    """Its name."""
    address: str
    """This start of it: a worker that is started again has another one."""
    service: Service
    """What it is."""
    host: str
    """Name of the machine that it runs on."""
    url: str
    """Of its probes and metrics; empty if it has not said."""
    device: str
    """Kind of its device, as its maker calls it."""
    gpu: str
    """Which of its host's accelerators; empty if it uses none."""
    memory_bytes: int
    """Of its device."""
    activity: Activity
    """What it says that it does."""
    use: Use | None
    """What the scheduler sees it do, and if it waits, for whom."""
    policy_version: int | None
    """Whose weights it has loaded."""
    num_done: int
    """Pieces of work that it has finished."""
    busy_seconds: float
    """Time spent on work since it was started."""
    num_quarantined: int
    """Received bytes that were no message."""
    refused: str | None
    """Why it takes no part, if it does not."""
    lent: bool
    """TAG: a trainer's device that generates."""
    seconds_per_sample: float | None
    """Of generation on this device, as measured; null if it has not generated."""
    num_in_hand: int
    """Fragments that it has."""
    trains_group: int | None
    """Group of the current batch whose gradient it computes for the trainer."""
    seconds_per_gradient: float | None
    """Of a whole group on this device, as measured."""
    seconds_since_seen: float
    """Since its newest report."""


class TagDecisionView(View):
    """What was decided about trainer-assisted generation for one batch."""

    model_config = example(**A_DECISION)

    batch: int
    """Its number."""
    groups: int
    """Groups that the trainer may generate."""
    reason: str
    """Why so many."""
    predicted_seconds: float | None
    """Of the batch, with this help."""
    predicted_gain: float | None
    """Over the batch without help: at 0.1 that one would take 10 % longer."""
    measured_seconds: float | None
    """That the batch took; null while it goes on."""
    measured_gain: float | None
    """Over what was predicted without help."""


class TagView(View):
    """Trainer-assisted generation: what holds, and how it was decided."""

    model_config = example(
        mode="auto", groups=0, lent=False, generation=7, samples_left=4,
        costs={"help_per_sample": 0.5, "train_per_group": 0.9, "ready": 0.1, "commit": 0.2,
               "switch": 0.05},
        decisions=[A_DECISION],
    )  # fmt: skip

    mode: TagMode
    """Who chooses: the scheduler (auto), nobody (off), or an operator (fixed)."""
    groups: int
    """Groups of every batch, of mode fixed."""
    lent: bool
    """Whether the trainer's device generates."""
    generation: int
    """Number of the newest command to the trainer's device."""
    samples_left: int
    """Samples that the trainer may still take in the current batch."""
    costs: dict[str, float | None]
    """Learned seconds; null where nothing was measured."""
    decisions: list[TagDecisionView]
    """Newest first."""


class BatchView(View):
    """A batch, in flight or committed."""

    model_config = example(
        batch=12, status="committed", staleness={"0": 64}, reward_mean=0.71,
        metrics={"reward_mean": 0.71, "onpolicy_ratio_error": 0.0}, num_fragments={},
    )  # fmt: skip

    batch: int
    """Its number; batch k turns version k into k + 1."""
    status: Literal["in_flight", "early", "committed"]
    """early: begun with the version before, while the batch before it is trained."""
    staleness: dict[int, int]
    """Samples by staleness, so far."""
    reward_mean: float | None = None
    """Once it is committed."""
    metrics: dict[str, float] = {}
    """Of its optimizer step, once it is committed."""
    num_fragments: dict[str, int] = {}
    """Fragments by stage, while the batch is in flight."""


class GroupView(View):
    """The samples of one prompt in a batch."""

    model_config = example(**A_GROUP)

    group: int
    """Its number in the batch."""
    attempt: int
    """How often it was sent to the trainer in vain."""
    policy_version: int | None
    """The version that generated it."""
    stages: list[str]
    """Stage of each of its fragments."""
    trained_by: str | None
    """Address of the rollout device that computes its gradient; null: the trainer."""
    rewards: list[float | None]
    """Of its samples, in order; null for one that could not be scored."""


class BatchDetail(BatchView):
    """A batch with its groups."""

    model_config = example(
        batch=13, status="in_flight", staleness={"0": 4}, reward_mean=None, metrics={},
        num_fragments={"pending": 0, "issued": 0, "generated": 1, "scored": 1},
        groups=[A_GROUP],
    )  # fmt: skip

    groups: list[GroupView]
    """In order."""


class VersionView(View):
    """A committed policy version."""

    model_config = example(
        version=12, weights_digest="0" * 63 + "c", weights="digits/weights/5e88.safetensors",
        trained_from_batch=11, onpolicy_ratio_error=0.0,
    )  # fmt: skip

    version: int
    """Optimizer steps taken."""
    weights_digest: str
    """SHA-256 over its parameters."""
    weights: str
    """Key of its adapter or weights in the object store."""
    trained_from_batch: int | None
    """The batch of its optimizer step; null of version 0."""
    onpolicy_ratio_error: float | None
    """How far the ratio of on-policy samples was from 1."""


class Accepted(View):
    """The request is on its way; its effect shows in `/v1/run` or `/v1/tag`."""

    model_config = example(action="pause", id="8c1f0a5be0c64d1c9d6a3d2f5f1f7a10")

    action: Literal["pause", "resume", "stop", "tag"]
    """What was asked."""
    id: str
    """Of this request, as the logs name it."""


class TagBody(View):
    """What an operator asks of TAG; it holds from the next batch on, off at once."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"mode": "fixed", "groups": 3}]}
    )

    mode: TagMode
    """Who chooses: the scheduler (auto), nobody (off), or you (fixed)."""
    groups: Annotated[int, Field(ge=0)] | None = None
    """fixed: groups of every batch that the trainer generates."""
