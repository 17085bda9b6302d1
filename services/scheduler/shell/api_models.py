"""Requests and answers of the HTTP API. The text below a field is its description in `/docs`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.scheduler.core.state import Phase
from services.scheduler.core.usage import Use
from shared.messages.contracts import TagMode
from shared.messages.workers import Activity, Service
from shared.run.dead_letters import Kind as LetterKind
from shared.run.dead_letters import Letters

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
        effective_sample_share=1.0, seconds_per_step=4.1, eta_seconds=73.8, waiting_for="rollout",
        missing_workers=[],
        num_workers={"rollout": 2, "reward": 1, "trainer": 1}, num_quarantined=0,
        num_dead_letters=0, failure=None,
        max_staleness=0, max_staleness_reason="the recipe says so",
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
    """Number of dead letters that nobody has settled."""
    failure: str | None
    """Why the run has failed, if it has."""
    max_staleness: int
    """Steps that a sample may be stale by; "auto" is decided when a run begins."""
    max_staleness_reason: str | None
    """Why it is that number."""


A_SHORTAGE = {
    "what": "a denoising step of 8 samples of 1024 x 1024 x 1",
    "since": "4 at a time, which takes longer", "remedy": "schedule.fragment_size of at most 4",
    "count": 1,
}  # fmt: skip


class MemoryShortageView(View):
    """A worker whose device ran out of memory."""

    model_config = example(**A_SHORTAGE)

    what: str
    """What did not fit."""
    since: str
    """What the device does since."""
    remedy: str
    """Recipe keys that avoid it."""
    count: int
    """How often the worker ran out of memory since its start."""


class WorkerView(View):
    """A live worker, and what it does."""

    model_config = example(
        worker="rollout-0", address="rollout-0-1f3a5c7e", service="rollout", host="node7",
        url="http://10.0.0.7:8000", device="NVIDIA H100 80GB HBM3", gpu="0",
        memory_bytes=85_000_000_000, activity="generating", use="generating", policy_version=12,
        note="", num_done=96, busy_seconds=310.2, num_quarantined=0, refused=None, lent=False,
        seconds_per_sample=0.42, num_in_hand=2, trains_group=None, seconds_per_gradient=None,
        seconds_since_seen=0.3, memory_shortage=None,
    )  # fmt: skip

    worker: str
    """Name of the worker."""
    address: str
    """Address of this start of the worker; one that is restarted has another."""
    service: Service
    """Service that the worker provides."""
    host: str
    """Name of the machine that it runs on."""
    url: str
    """URL of its probes and metrics; empty if not reported."""
    device: str
    """Kind of its device, as the maker calls it."""
    gpu: str
    """Accelerators of its host that it uses; empty if none."""
    memory_bytes: int
    """Memory of its device."""
    activity: Activity
    """What the worker reports that it does."""
    note: str
    """What the worker lacks and which setting decides that; empty if it lacks nothing."""
    use: Use | None
    """What the worker does as the scheduler sees it and, if it waits, for whom."""
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
    lent: bool
    """TAG: whether the trainer's device is lent for generation."""
    seconds_per_sample: float | None
    """Measured seconds per generated sample; null if it has not generated."""
    num_in_hand: int
    """Number of fragments that the worker has."""
    trains_group: int | None
    """Group of the current batch whose gradient it computes for the trainer."""
    seconds_per_gradient: float | None
    """Measured seconds per group; null if it has not computed a gradient."""
    seconds_since_seen: float
    """Seconds since its newest report."""
    memory_shortage: MemoryShortageView | None
    """The newest shortage of its device's memory; null if everything has fitted."""


class TagDecisionView(View):
    """What was decided about trainer-assisted generation for one batch."""

    model_config = example(**A_DECISION)

    batch: int
    """Number of the batch."""
    groups: int
    """Groups that the trainer may generate."""
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
        mode="auto", groups=0, lent=False, generation=7, samples_left=4,
        costs={"help_per_sample": 0.5, "train_per_group": 0.9, "ready": 0.1, "commit": 0.2,
               "switch": 0.05},
        decisions=[A_DECISION],
    )  # fmt: skip

    mode: TagMode
    """Who chooses: the scheduler (auto), nobody (off), or an operator (fixed)."""
    groups: int
    """Groups per batch in mode fixed."""
    lent: bool
    """Whether the trainer's device is lent for generation."""
    generation: int
    """Loan number: that of the newest command to the trainer's device."""
    samples_left: int
    """Samples that the trainer may still take in the current batch."""
    costs: dict[str, float | None]
    """Learned seconds; null if nothing was measured."""
    decisions: list[TagDecisionView]
    """Newest first."""


class BatchView(View):
    """A batch, in flight or committed."""

    model_config = example(
        batch=12, status="committed", staleness={"0": 64}, reward_mean=0.71,
        metrics={"reward_mean": 0.71, "onpolicy_ratio_error": 0.0}, num_fragments={},
    )  # fmt: skip

    batch: int
    """Number of the batch; batch k turns version k into k + 1."""
    status: Literal["in_flight", "early", "committed"]
    """early: begun with the version before, while the batch before is trained."""
    staleness: dict[int, int]
    """Number of samples by staleness, so far."""
    reward_mean: float | None = None
    """Mean reward, once the batch is committed."""
    metrics: dict[str, float] = {}
    """Metrics of its optimizer step, once the batch is committed."""
    num_fragments: dict[str, int] = {}
    """Number of fragments by stage, while the batch is in flight."""


class GroupView(View):
    """The samples of one prompt in a batch."""

    model_config = example(**A_GROUP)

    group: int
    """Number of the group in its batch."""
    attempt: int
    """How often the group was sent to the trainer in vain."""
    policy_version: int | None
    """Version that generated the group."""
    stages: list[str]
    """Stage of each of its fragments."""
    trained_by: str | None
    """Address of the rollout device that computes its gradient; null: the trainer."""
    rewards: list[float | None]
    """Rewards of its samples, in order; null for one that could not be scored."""


class BatchDetail(BatchView):
    """A batch with its groups."""

    model_config = example(
        batch=13, status="in_flight", staleness={"0": 4}, reward_mean=None, metrics={},
        num_fragments={"pending": 0, "issued": 0, "generated": 1, "scored": 1},
        groups=[A_GROUP],
    )  # fmt: skip

    groups: list[GroupView]
    """Groups of the batch, in order."""


class UsageView(View):
    """What the devices did from the opening of a batch to its commit."""

    model_config = example(
        batch=12, seconds=4.2, devices={"rollout-0": {"generating": 3.1, "tail": 1.1}}
    )  # fmt: skip

    batch: int
    """Number of the batch."""
    seconds: float
    """Seconds from its opening to its commit."""
    devices: dict[str, dict[Use, float]]
    """Seconds by worker and by what it did."""


class TimelineView(View):
    """When the devices changed what they did, from the opening of a batch to its commit."""

    model_config = example(
        batch=12, seconds=4.2, devices={"rollout-0": [[0.0, "generating"], [3.1, "tail"]]}
    )  # fmt: skip

    batch: int
    """Number of the batch."""
    seconds: float
    """Seconds from its opening to its commit, or to now while it is in flight."""
    devices: dict[str, tuple[tuple[float, Use | None], ...]]
    """By worker, in order: seconds since the batch was opened, and what the worker did from then
    on; null: it was not there."""


class VersionView(View):
    """A committed policy version."""

    model_config = example(
        version=12, weights_digest="0" * 63 + "c", weights="digits/weights/5e88.safetensors",
        trained_from_batch=11, onpolicy_ratio_error=0.0,
    )  # fmt: skip

    version: int
    """Number of optimizer steps taken."""
    weights_digest: str
    """SHA-256 of its parameters."""
    weights: str
    """Key of its adapter or weights in the object store."""
    trained_from_batch: int | None
    """Batch of its optimizer step; null for version 0."""
    onpolicy_ratio_error: float | None
    """How far the ratio of on-policy samples was from 1."""


A_LETTER = {
    "number": 3, "kind": "failed", "state": "open", "stream": "DG_EVT",
    "subject": "dg.digits.evt.fragment_failed", "reason": "reward: the image has no pixels",
    "work": {"batch": 12, "group": 3, "first_sample": 8, "attempt": 0}, "found": 1795447812.4,
    "num_bytes": 212,
}  # fmt: skip


class WorkView(View):
    """The piece of work that a dead letter is about."""

    model_config = example(batch=12, group=3, first_sample=8, attempt=0)

    batch: int
    """Number of the batch."""
    group: int
    """Group of the batch."""
    first_sample: int | None
    """First sample of the fragment; null: the whole group."""
    attempt: int
    """Which attempt at it has failed."""


class DeadLetterView(View):
    """A message that nobody could use, or an attempt at a piece of work that failed."""

    model_config = example(**A_LETTER)

    number: int
    """Number of the letter, from 1 on."""
    kind: LetterKind
    """unreadable: bytes that are no message. undelivered: work that nobody finished. failed: an
    attempt that a worker gave up. unscored: samples without a score. refused: a message that is
    not true."""
    state: Letters
    """open: nobody has settled it. retried: its work is done again. dropped: nobody cares for it
    any more."""
    stream: str
    """Stream that the message was in."""
    subject: str
    """Subject under which the message came; empty if that is not known any more."""
    reason: str
    """Why it is here."""
    work: WorkView | None
    """Work that it is about; null if none."""
    found: float
    """When it was found, in seconds of the Unix clock."""
    num_bytes: int
    """Size of the message."""


class DeadLetterDetail(DeadLetterView):
    """A dead letter with its bytes."""

    model_config = example(**A_LETTER, data="gaRraW5krw==")

    data: str
    """The message's bytes, in base64."""


class Settled(View):
    """What was done about a dead letter."""

    model_config = example(number=3, state="retried", note="it is being done again")

    number: int
    """Number of the letter."""
    state: Letters
    """What it is now."""
    note: str
    """What happens, in words."""


class Accepted(View):
    """The request is on its way; its effect shows in `/v1/run` or `/v1/tag`."""

    model_config = example(action="pause", id="8c1f0a5be0c64d1c9d6a3d2f5f1f7a10")

    action: Literal["pause", "resume", "stop", "tag"]
    """Action that was requested."""
    id: str
    """Identifier of this request in the logs."""


class TagBody(View):
    """A mode for TAG, which applies from the next batch on; off applies at once."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"mode": "fixed", "groups": 3}]}
    )

    mode: TagMode
    """Who chooses: the scheduler (auto), nobody (off), or you (fixed)."""
    groups: Annotated[int, Field(ge=0)] | None = None
    """fixed: number of groups per batch that the trainer generates."""
