"""The messages that services exchange. Nothing else crosses a service boundary.

Events are facts ("this happened"), commands are requests ("do this"), a status says what a worker
does right now. Tensors never travel here: a message names objects in the store.

    GenerateFragment      scheduler -> one device  sample this fragment under this policy version
    FragmentGenerated     device -> reward, scheduler
    FragmentReleased      device -> scheduler      given back, not begun or not finished
    FragmentScored        reward -> scheduler
    FragmentFailed        any -> scheduler         the fragment needs another attempt
    TrainGroup            scheduler -> trainer     a whole, scored group with its advantages
    ComputeGradient       scheduler -> one device  compute the gradient of a whole group
    GradientComputed      device -> scheduler      it is stored, to be added up at the commit
    GradientReleased      device -> scheduler      given back, not computed
    GroupTrained          trainer -> scheduler     its gradient is added up
    GroupFailed           any -> scheduler         the group must be sent to the trainer again
    PolicyPublished       trainer -> everybody     an optimizer step is committed
    RunFailed             trainer -> scheduler     the batch cannot be trained, and why
    SetDevice             scheduler -> trainer     TAG: what a trainer's device is to be used for
    OperatorRequest       API -> scheduler         pause, resume, stop
    TagRequest            API -> scheduler         TAG: auto, off or fixed
    WorkerStatus          every worker -> scheduler, once a second and at changes, not stored
    WorkerRefused         scheduler -> one worker  it takes no part, and ends; not stored
"""

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from shared.messages.records import Count, Digest, Record, Seconds, Text, Token, wire_name
from shared.messages.workers import DeviceMode, Transient

MAX_MESSAGE_BYTES = 64 * 1024
MAX_GROUP_SIZE = 1024
MAX_FRAGMENTS_PER_GROUP = 64
MAX_SCORERS = 32
MAX_METADATA = 16 * 1024
"""Bytes of a prompt's metadata, names and texts together."""

MAX_SCORE = 1e6
Score = Annotated[float, Field(ge=-MAX_SCORE, le=MAX_SCORE, allow_inf_nan=False)] | None
"""None: the sample could not be scored. Squares of larger ones would drown all others."""


class ObjectRef(Record):
    """An object in the store, with what its reader must find there."""

    key: Annotated[str, Field(max_length=512)]
    sha256: Digest
    size: Count


class Prompt(Record):
    text: Text
    metadata: dict[str, str | int | float | bool] = Field(default_factory=dict, max_length=32)
    """What scorers need to know about the prompt."""

    @field_validator("metadata")
    @classmethod
    def _fits_a_message(
        cls, metadata: dict[str, str | int | float | bool]
    ) -> dict[str, str | int | float | bool]:
        for name, value in metadata.items():
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} has more than 64 bits; write it as text")
        texts = [text for text in (*metadata, *metadata.values()) if isinstance(text, str)]
        length = len("".join(texts).encode())
        if length > MAX_METADATA:
            raise ValueError(f"{length} bytes are too many; at most {MAX_METADATA}")
        return metadata


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
    worker: Token
    """Address of the device that is to generate it."""


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
    """Address of the device that generated it."""
    seconds: Seconds
    """On the device, from the first denoising step to the decoded media."""


class FragmentReleased(Record):
    kind: Literal["fragment_released"] = "fragment_released"
    slot: FragmentSlot
    worker: Token
    reason: Literal["stale", "returned", "draining"]
    """stale: a newer version was published before it began. returned: the device trains again."""


class FragmentScored(Record):
    kind: Literal["fragment_scored"] = "fragment_scored"
    fragment: Fragment
    policy: Policy
    stored: Trajectories
    rewards: Annotated[tuple[Score, ...], Field(max_length=MAX_GROUP_SIZE)]
    """The weighted sum per sample, in order."""
    parts: dict[Token, tuple[Score, ...]] = Field(max_length=MAX_SCORERS)
    """Each scorer's own values, by its name in the recipe."""
    generated_by: Token
    """Address of the device that generated it."""
    worker: Token
    seconds: Seconds

    @model_validator(mode="after")
    def _one_score_per_sample(self) -> Self:
        for name, scores in {"rewards": self.rewards, **self.parts}.items():
            if len(scores) != self.fragment.num_samples:
                raise ValueError(f"{len(scores)} {name} for {self.fragment.num_samples} samples")
        return self


class FragmentFailed(Record):
    kind: Literal["fragment_failed"] = "fragment_failed"
    slot: FragmentSlot
    stage: Literal["rollout", "reward", "admission", "delivery"]
    reason: Text


class GroupGradientRef(Record):
    """The gradient of one whole group, computed by a device that is not the trainer's."""

    gradient: ObjectRef
    tally: dict[Token, FiniteFloat] = Field(max_length=32)
    """What happened to its rows: its part of the metrics of the optimizer step."""
    worker: Token
    """Address of the device."""


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
    """One per sample of the group, in order; 0 for one that could not be scored."""
    dropped: Text | None = None
    """Why nothing is to be learned of it: too many of its samples could not be scored."""
    contribution: GroupGradientRef | None = None
    """Its gradient, if that is computed already: the trainer only adds it."""


class ComputeGradient(Record):
    """For a rollout device that declares that it can train, while the trainer is behind."""

    kind: Literal["compute_gradient"] = "compute_gradient"
    group: TrainGroup
    policy: Policy
    """The version that the batch is trained from: the gradient is that of these weights."""
    worker: Token
    """Address of the device."""


class GradientComputed(Record):
    kind: Literal["gradient_computed"] = "gradient_computed"
    batch: Count
    group: Count
    attempt: Count
    policy: Policy
    """Whose gradient it is."""
    contribution: GroupGradientRef
    seconds: Seconds
    """On the device."""


class GradientReleased(Record):
    kind: Literal["gradient_released"] = "gradient_released"
    batch: Count
    group: Count
    attempt: Count
    worker: Token
    reason: Literal["stale", "draining", "failed"]
    """stale: its batch is committed. failed: this device is not asked again."""


class GroupTrained(Record):
    """Says that a group is in the trainer's gradient; it is trained when the batch is committed."""

    kind: Literal["group_trained"] = "group_trained"
    batch: Count
    group: Count
    attempt: Count
    worker: Token
    seconds: Seconds
    """On the device; 0 if its gradient is zero, or was computed elsewhere."""


class GroupFailed(Record):
    kind: Literal["group_failed"] = "group_failed"
    batch: Count
    group: Count
    attempt: Count
    reason: Text


class RunFailed(Record):
    """The batch cannot be trained, however often it is tried. The trainer waits to be resumed."""

    kind: Literal["run_failed"] = "run_failed"
    batch: Count
    worker: Token
    """Address of the trainer."""
    reason: Text


class PolicyPublished(Record):
    kind: Literal["policy_published"] = "policy_published"
    policy: Policy
    weights: ObjectRef
    worker: Token
    seconds: Seconds = 0.0
    """From the beginning of the optimizer step to this announcement; 0 if none was taken."""


class SetDevice(Record):
    """Desired state, not a call: the highest generation that a device has seen is what holds."""

    kind: Literal["set_device"] = "set_device"
    worker: Token
    """Address of the trainer."""
    loan_number: Annotated[Count, wire_name("generation")]
    mode: DeviceMode
    max_seconds: Seconds = 0.0
    """A borrowed device returns by itself after this long, by its own clock."""
    keep: bool = True
    """train: whether fragments that are begun or waiting are kept for the next loan, or dropped."""


class OperatorRequest(Record):
    kind: Literal["operator_request"] = "operator_request"
    action: Literal["pause", "resume", "stop"]
    id: Token


TagMode = Literal["auto", "off", "fixed"]


class TagRequest(Record):
    kind: Literal["tag_request"] = "tag_request"
    mode: TagMode
    groups: Count = 0
    """fixed: of every batch, how many groups the trainer generates."""
    id: Token


Slotted = (
    GenerateFragment | FragmentGenerated | FragmentScored | TrainGroup
    | ComputeGradient | GradientComputed
)  # fmt: skip
"""Messages with a slot of their own: stored at most once, whoever publishes them how often."""
Event = (
    FragmentGenerated
    | FragmentReleased
    | FragmentScored
    | FragmentFailed
    | GradientComputed
    | GradientReleased
    | GroupTrained
    | GroupFailed
    | PolicyPublished
    | RunFailed
    | OperatorRequest
    | TagRequest
)
Command = GenerateFragment | TrainGroup | ComputeGradient | SetDevice
Message = Annotated[Event | Command | Transient, Field(discriminator="kind")]
