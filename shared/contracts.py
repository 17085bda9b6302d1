"""The messages that services exchange. Nothing else crosses a service boundary.

Events are facts ("this happened"), commands are requests ("do this"), a status says what a worker
does right now. Tensors never travel here: a message names objects in the store.

    GenerateFragment      scheduler -> rollout     sample this fragment under this policy version
    FragmentGenerated     rollout -> reward, scheduler
    FragmentScored        reward -> scheduler
    FragmentFailed        any -> scheduler         the fragment needs another attempt
    TrainGroup            scheduler -> trainer     a whole, scored group with its advantages
    GroupFailed           any -> scheduler         the group must be sent to the trainer again
    PolicyPublished       trainer -> scheduler     an optimizer step is committed
    OperatorRequest       API -> scheduler         pause, resume, stop
    WorkerStatus          every worker -> scheduler, once a second, not stored
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from shared.tokens import TOKEN_PATTERN

MAX_MESSAGE_BYTES = 64 * 1024
MAX_GROUP_SIZE = 1024

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Numbers things from zero, and fits the 64 bits that the wire has."""
Token = Annotated[str, Field(pattern=TOKEN_PATTERN)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=4096)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Record(BaseModel):
    """Immutable, strict, and closed to unknown fields: a misspelt field fails at the sender."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ObjectRef(Record):
    """An object in the store, with what its reader must find there."""

    key: Annotated[str, Field(max_length=512)]
    sha256: Digest
    size: Count


class Prompt(Record):
    text: Text
    metadata: dict[str, str | int | float | bool] = Field(default_factory=dict, max_length=32)
    """What scorers need to know about the prompt."""


class Policy(Record):
    """A policy version, and the weights that it stands for."""

    version: Count
    weights_digest: Digest


class FragmentSlot(Record):
    """Which piece of rollout work, and which attempt at it."""

    batch: Count
    group: Count
    first_sample: Count
    attempt: Count = 0


class Fragment(FragmentSlot):
    """The unit of rollout work: a slice of a group's samples, under one policy version."""

    num_samples: Annotated[int, Field(gt=0, le=MAX_GROUP_SIZE)]

    @property
    def slot(self) -> FragmentSlot:
        return FragmentSlot(
            batch=self.batch,
            group=self.group,
            first_sample=self.first_sample,
            attempt=self.attempt,
        )

    @property
    def samples(self) -> range:
        return range(self.first_sample, self.first_sample + self.num_samples)


class GenerateFragment(Record):
    kind: Literal["generate_fragment"] = "generate_fragment"
    fragment: Fragment
    policy: Policy
    prompt: Prompt
    window_start: Count
    """First stochastic (and trained) denoising step of this group."""


class Trajectories(Record):
    """What rollout leaves in the store for one fragment."""

    trajectory: ObjectRef
    conditions: ObjectRef
    media: ObjectRef
    weights_digest: Digest
    """Of the weights that really generated it, taken from the network's own parameters."""


class FragmentGenerated(Record):
    kind: Literal["fragment_generated"] = "fragment_generated"
    fragment: Fragment
    policy: Policy
    prompt: Prompt
    stored: Trajectories
    worker: Token
    seconds: Seconds
    """On the device, from the first denoising step to the decoded media."""


class FragmentScored(Record):
    kind: Literal["fragment_scored"] = "fragment_scored"
    fragment: Fragment
    policy: Policy
    stored: Trajectories
    rewards: Annotated[tuple[FiniteFloat, ...], Field(max_length=MAX_GROUP_SIZE)]
    """The weighted sum per sample, in order."""
    parts: dict[Token, tuple[FiniteFloat, ...]] = Field(max_length=32)
    """Each scorer's own values, by its name in the recipe."""
    worker: Token
    seconds: Seconds


class FragmentFailed(Record):
    kind: Literal["fragment_failed"] = "fragment_failed"
    slot: FragmentSlot
    stage: Literal["rollout", "reward", "admission", "delivery"]
    reason: Text


class TrainGroup(Record):
    kind: Literal["train_group"] = "train_group"
    batch: Count
    group: Count
    attempt: Count
    policy: Policy
    """The version that generated the whole group."""
    fragments: Annotated[tuple[FragmentScored, ...], Field(max_length=MAX_GROUP_SIZE)]
    """In the order of their samples."""
    advantages: Annotated[tuple[FiniteFloat, ...], Field(max_length=MAX_GROUP_SIZE)]
    """One per sample of the group, in order."""


class GroupFailed(Record):
    kind: Literal["group_failed"] = "group_failed"
    batch: Count
    group: Count
    attempt: Count
    reason: Text


class PolicyPublished(Record):
    kind: Literal["policy_published"] = "policy_published"
    policy: Policy
    weights: ObjectRef
    worker: Token


class OperatorRequest(Record):
    kind: Literal["operator_request"] = "operator_request"
    action: Literal["pause", "resume", "stop"]
    id: Token


Service = Literal["rollout", "reward", "trainer", "scheduler"]
Activity = Literal[
    "starting", "generating", "scoring", "training", "committing", "loading_weights",
    "waiting_for_rollout", "waiting_for_reward", "waiting_for_trainer", "stopping",
]  # fmt: skip


class WorkerStatus(Record):
    kind: Literal["worker_status"] = "worker_status"
    service: Service
    worker: Token
    activity: Activity
    policy_version: Count | None = None
    num_done: Count = 0
    num_quarantined: Count = 0
    busy_seconds: Seconds = 0.0
    device: Text = "cpu"


Slotted = GenerateFragment | FragmentGenerated | FragmentScored | TrainGroup
"""Messages with a slot of their own: stored at most once, whoever publishes them how often."""
Event = (
    FragmentGenerated
    | FragmentScored
    | FragmentFailed
    | GroupFailed
    | PolicyPublished
    | OperatorRequest
)
Command = GenerateFragment | TrainGroup
Message = Annotated[Event | Command | WorkerStatus, Field(discriminator="kind")]
