"""The messages that services exchange; nothing else crosses a service boundary.

Events are facts ("this happened"), commands are requests ("do this"), and a status describes a
worker at present (workers.py). A message holds no tensors: it names objects in the store.

    GenerateFragment      scheduler -> one device  sample this fragment under this policy version
    FragmentGenerated     device -> reward, scheduler
    FragmentReleased      device -> scheduler      returned, not begun or not finished
    FragmentScored        reward -> scheduler
    FragmentFailed        any -> scheduler         the fragment needs another attempt
    TrainGroup            scheduler -> members     a whole, scored group with its advantages
    GroupFailed           any -> scheduler         the group must be sent again
    PolicyPublished       member -> everybody      an optimizer step is committed
    RunFailed             member -> scheduler      the batch cannot be trained, and why
    SetDevice             scheduler -> one member  TAG: what its device is to be used for
    OperatorRequest       API -> scheduler         pause, resume, stop
    TagRequest            API -> scheduler         TAG: auto, off or fixed
    WorkerRequest         API -> scheduler         give a worker nothing new, or work again
    GroupRequest          API -> scheduler         generate again what failed in a group
    TrainPiece, ...       scheduler -> members     pieces, sums and steps: see fluid.py
    WorkerStatus          every worker -> scheduler, once a second and at changes, not stored
    WorkerRefused         scheduler -> one worker  it takes no part, and ends; not stored
"""

import json
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import Field, FiniteFloat, JsonValue, field_validator, model_validator

from shared.limits import MAX_GROUP_SIZE, MAX_METADATA, MAX_METADATA_DEPTH, MAX_SCORE, MAX_SCORERS
from shared.messages.fluid import Checksum, FluidCommand, FluidEvent
from shared.messages.records import Count, Digest, Record, Seconds, Text, Token, is_none, wire_name
from shared.messages.records import ObjectRef as ObjectRef
from shared.messages.records import Policy as Policy
from shared.messages.workers import DeviceMode, Transient

Score = Annotated[float, Field(ge=-MAX_SCORE, le=MAX_SCORE, allow_inf_nan=False)] | None
"""Score, None if the sample could not be scored; squares of larger ones would swamp all others."""


class SourceImage(Record):
    """Names the source image of a prompt, by its file's digest; `shared.run.layout.source_ref` has
    its key in the store."""

    sha256: Digest
    size: Count
    """Bytes of the file."""


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value of metadata as JSON has it, with the wire's tuples as lists."""
    if depth > MAX_METADATA_DEPTH:
        raise ValueError(f"has more than {MAX_METADATA_DEPTH} lists or tables within one another")
    if isinstance(value, dict):
        return {key: _plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("has more than 64 bits; write it as text")
    return value


class Prompt(Record):
    text: Text
    metadata: dict[str, JsonValue] = Field(default_factory=dict, max_length=32)
    """Facts about the prompt that scorers need."""
    negative_prompt: Text | None = Field(default=None, exclude_if=is_none)
    """Negative prompt, where it differs from the recipe's."""
    image: SourceImage | None = Field(default=None, exclude_if=is_none)
    """The image that it edits, or begins with; None: samples are made from the text alone."""

    @field_validator("metadata", mode="before")
    @classmethod
    def _is_json(cls, metadata: Any) -> Any:
        if not isinstance(metadata, dict):
            return metadata
        plain = {}
        for name, value in metadata.items():
            try:
                plain[name] = _plain(value)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
        return plain

    @field_validator("metadata")
    @classmethod
    def _fits_a_message(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        texts = list(metadata)
        for value in metadata.values():
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, list | dict):
                texts.append(json.dumps(value, ensure_ascii=False, allow_nan=False))
        length = len("".join(texts).encode())
        if length > MAX_METADATA:
            raise ValueError(f"{length} bytes are too many; at most {MAX_METADATA}")
        return metadata


class FragmentSlot(Record):
    """Names a piece of rollout work and the attempt at it."""

    batch: Count
    group: Count
    first_sample: Count
    attempt: Count


class Fragment(FragmentSlot):
    """Describes the unit of rollout work: a slice of a group's samples, by one policy version."""

    num_samples: Annotated[int, Field(gt=0, le=MAX_GROUP_SIZE)]

    @property
    def slot(self) -> FragmentSlot:
        return FragmentSlot(
            batch=self.batch, group=self.group, first_sample=self.first_sample, attempt=self.attempt
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
    """First stochastic, and trained, denoising step of this group."""
    worker: Token
    """Address of the device that is to generate it."""
    weights: ObjectRef | None = Field(default=None, exclude_if=is_none)
    """Location of the policy's weights, if no commit record names them yet."""


class Trajectories(Record):
    """Names what rollout leaves in the store for one fragment."""

    trajectory: ObjectRef
    conditions: ObjectRef
    media: ObjectRef
    weights_digest: Digest
    """Digest of the parameters that the network really had when it generated the fragment."""


class FragmentGenerated(Record):
    kind: Literal["fragment_generated"] = "fragment_generated"
    fragment: Fragment
    policy: Policy
    prompt: Prompt
    stored: Trajectories
    worker: Token
    """Address of the device that generated it."""
    seconds: Seconds
    """Device time from the first denoising step to the decoded media."""


class FragmentReleased(Record):
    kind: Literal["fragment_released"] = "fragment_released"
    slot: FragmentSlot
    worker: Token
    reason: Literal["stale", "returned", "draining"]
    """stale: a newer version was published before it began; returned: the device trains again."""


class FragmentScored(Record):
    kind: Literal["fragment_scored"] = "fragment_scored"
    fragment: Fragment
    policy: Policy
    stored: Trajectories
    rewards: Annotated[tuple[Score, ...], Field(max_length=MAX_GROUP_SIZE)]
    """Weighted sum of the scores per sample, in order."""
    parts: Annotated[dict[Token, tuple[Score, ...]], Field(max_length=MAX_SCORERS)]
    """Scores of each scorer, by its name in the recipe."""
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
    """Names the role by whose rights it is sent: admission is a trainer's, delivery the scheduler's
    own."""
    reason: Text
    worker: Annotated[Token | None, Field(default=None, exclude_if=is_none)]
    """Address of the device that was to generate it."""


class GroupFields(TypedDict):
    batch: int
    group: int
    attempt: int


class GroupMessage(Record):
    """A message about an attempt at a group; the common fields come first on the wire."""

    kind: str
    batch: Count
    group: Count
    attempt: Count

    @property
    def answer_fields(self) -> GroupFields:
        return {"batch": self.batch, "group": self.group, "attempt": self.attempt}


class TrainGroup(GroupMessage):
    kind: Literal["train_group"] = "train_group"
    policy: Policy
    """Version that generated the whole group."""
    fragments: Annotated[tuple[FragmentScored, ...], Field(max_length=MAX_GROUP_SIZE)]
    """Fragments of the group, in the order of their samples."""
    advantages: Annotated[tuple[FiniteFloat, ...], Field(max_length=MAX_GROUP_SIZE)]
    """Advantage of each sample, in order; 0 if it could not be scored."""
    dropped: Text | None = None
    """Reason not to train on the group: too many of its samples could not be scored."""


class GroupFailed(GroupMessage):
    kind: Literal["group_failed"] = "group_failed"
    reason: Text


class RunFailed(Record):
    """A batch cannot be trained at any attempt, until the run is resumed."""

    kind: Literal["run_failed"] = "run_failed"
    batch: Count
    worker: Token
    """Address of the member that reports it."""
    reason: Text


class PolicyPublished(Record):
    kind: Literal["policy_published"] = "policy_published"
    policy: Policy
    weights: ObjectRef
    worker: Token
    seconds: Seconds
    """Time from the beginning of the optimizer step to this message; 0 without a step."""
    checksum: Annotated[Checksum | None, Field(default=None, exclude_if=is_none)]
    """Checksum of weights, moments and average, which members compare."""


class SetDevice(Record):
    """States what a device shall do; the highest loan number that it has seen is what holds."""

    kind: Literal["set_device"] = "set_device"
    worker: Token
    """Address of the member."""
    loan_number: Annotated[Count, wire_name("generation")]
    mode: DeviceMode
    max_seconds: Seconds = 0.0
    """Longest time, by the device's own clock, before a borrowed device returns by itself."""
    keep: bool = True
    """Whether fragments begun or waiting are kept for the next loan, with mode "train"."""


Action = Literal["pause", "pause_at_failure", "resume", "stop"]
"""
pause               issue nothing more; what is begun is finished
pause_at_failure    pause as soon as an attempt at work of an open batch fails; asked of a paused
                    run, after it is resumed
resume              continue; for a running run, a pause at a failure is cancelled
stop                end the run where it is
"""


class OperatorRequest(Record):
    kind: Literal["operator_request"] = "operator_request"
    action: Action
    id: Token


TagMode = Literal["auto", "off", "fixed"]


class TagRequest(Record):
    kind: Literal["tag_request"] = "tag_request"
    mode: TagMode
    groups: Count = 0
    """Number of groups of every batch that members generate, with mode "fixed"."""
    id: Token


class WorkerRequest(Record):
    kind: Literal["worker_request"] = "worker_request"
    action: Literal["drain", "undrain"]
    worker: Token
    """Name of the worker, whichever start of it."""
    id: Token


class GroupRequest(Record):
    kind: Literal["group_request"] = "group_request"
    action: Literal["again"]
    batch: Count
    group: Count
    id: Token


Event = (
    FragmentGenerated
    | FragmentReleased
    | FragmentScored
    | FragmentFailed
    | GroupFailed
    | PolicyPublished
    | RunFailed
    | OperatorRequest
    | TagRequest
    | WorkerRequest
    | GroupRequest
    | FluidEvent
)
Command = GenerateFragment | TrainGroup | SetDevice | FluidCommand
Message = Annotated[Event | Command | Transient, Field(discriminator="kind")]
