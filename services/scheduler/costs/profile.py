"""A cost profile: what generating and training one model costs on each kind of device, as data.

One file per model in the folder profiles calibrates planner, simulator and emulated cluster alike;
its README.md defines each field. Seconds are measured on an H100; GB are 1e9 bytes.

    a denoising step of n samples:  max(host, forwards x (o + c n))
    a training pass of r rows:      max(host, forwards x rho x (f o + r ((1 - f) o / G + c)))

with the host's seconds to launch their kernels (`costs.host`), o the fixed seconds of a call, c the
seconds of each sample in it, G the group size, forwards 2 with classifier-free guidance, rho the
ratio of the forward and backward pass of a trained step to a step of a rollout that generates whole
groups, and f the ratio of their fixed parts. Passes have as many rows as a group has samples, or as
fit the device (`costs.capacity`); rows that a group computes once go along, or have a pass each if
there is no other. Samples of one group may share some of their steps, which a fragment then
computes once, and of their trained steps, which a group computes once (`costs.seconds`).
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from services.scheduler.costs.devices import FORECASTS
from services.scheduler.costs.devices import Device as Device
from services.scheduler.costs.host import UNKNOWN_HOST, HostCosts, Launches
from services.scheduler.costs.shape import Shape
from services.scheduler.costs.sizes import (
    GIB_TO_GB,
    Factor,
    Memory,
    NetworkWork,
    NotNegative,
    Positive,
)
from shared.errors import UserError
from shared.messages.records import Record, Seconds, Text, Token

PROFILES = Path(__file__).parent / "profiles"

Role = Literal["rollout", "trainer", "member"]
"""trainer: it only trains; member: it generates as well."""
VariantName = Literal["lora", "full"]
OWN_GATHERS = 2
"""Times that a training pass gathers a network that ranks share: forward, and backward with what is
computed again."""
PUBLISHED_GB_PER_SECOND = 8.0
"""Speed at which all weights are published and fetched, for profiles without that field."""


class Rollout(Record):
    call_seconds: Seconds
    """Fixed seconds of one forward call: o."""
    sample_seconds: Factor
    """Seconds of each sample in a forward call: c."""
    decode_seconds: Seconds
    """Seconds to decode the latents of a sample."""
    encode_seconds: Seconds = 0.0
    """Seconds to encode the prompt of a fragment; 0 where processes of their own do."""
    reward_seconds: Seconds
    """Seconds to score a sample on the device that generated it."""
    noise_cv: Annotated[float, Field(ge=0, lt=1)]
    """Standard deviation of a fragment's service time over its mean."""
    handoff_seconds: Seconds
    """Seconds from one service's result to the start of the next one's work, per hop."""
    memory_gib: Factor
    """Memory that a device needs. A profile's file has weights, decoder and activations with cached
    conditioning, as in the study; `digenrl.trace.memory` replaces it by what a run takes."""
    held_gib: NotNegative = 0.0
    """Part of the memory that is held all the time; 0 if unknown."""
    sample_gib: NotNegative = 0.0
    """Part of the peak that each sample of a fragment takes while it is denoised."""


class Variant(Record):
    """Trained weights and their layout: a LoRA adapter, or all weights, on every device or in shard
    groups."""

    forwards_per_step: Literal[1, 2]
    """Forward passes per step: 2 with classifier-free guidance, in rollout and training."""
    rho: Factor
    """Ratio of a trained step's forward and backward pass to a step of a rollout."""
    call_factor: NotNegative = 1.0
    """The fixed seconds of a training pass, over rho times the fixed seconds of a rollout's call. A
    trainer also reads, and goes back through, what no row adds to."""
    memory_gib: Factor
    """Memory that each device needs that only trains."""
    member_gib: NotNegative = 0.0
    """Memory that it needs if it generates as well; 0 if unknown: what either takes at most."""
    pass_gib: NotNegative = 0.0
    """Memory of a device that only trains, without the rows of a pass."""
    member_pass_gib: NotNegative = 0.0
    """The same of one that generates as well."""
    row_gib: NotNegative = 0.0
    """Memory of each row of a training pass; 0 if unknown: a whole group's rows fit."""
    pass_sizes: tuple[Positive, ...] = ()
    """Rows of the passes that a trainer chooses from, ascending; empty: any."""
    training_gib: NotNegative = 0.0
    """Part of it, gradients and sums included, that a rollout device does not hold."""
    offload_gib: NotNegative = 0.0
    """Memory of the host for each row of a training pass, which goes there and comes back."""
    host_gib: NotNegative = 0.0
    """Fixed memory of the host."""
    streamed_gb: NotNegative = 0.0
    """Weights that come from the host each time a device that trains computes a velocity."""
    ranks: Positive = 1
    """Devices that share the weights: a shard group, which is one member."""
    network_gb: NotNegative = 0.0
    """Size of the network as ranks gather it; 0: the size in the table of memory."""
    gathers: NotNegative = OWN_GATHERS
    """Times that a training pass gathers it, or that its blocks come from the host."""
    optimizer_seconds: Seconds
    """Seconds of one optimizer update."""
    published_gb: Factor
    publish_seconds: Seconds
    """Seconds from the last update to weights that rollout devices can load."""
    adopt_seconds: Seconds
    """Seconds that a rollout device pauses to load them."""
    switch_seconds: Seconds
    """Seconds that a training device takes to change to generating, or back."""
    exchange_seconds: Seconds | None = None
    """Seconds in which fluid devices form the total of their gradients; by default from its bytes
    (`costs.fluid`)."""
    step_seconds: Seconds | None = None
    """Seconds of a fluid device's optimizer step; by default from the bytes that it moves."""


class Streaming(Record):
    """Costs of generation on a kind of device to which the network's blocks come from host memory,
    in place of the profile's figures."""

    memory_gib: Factor
    held_gib: Factor
    host_gib: Factor
    """The weights, which cross to the device in each denoising step, however many samples it
    has."""


class ProfileSource(Record):
    kind: Literal["recipe", "measured", "traced", "fitted", "assumed"]
    """recipe: a choice, not a cost; traced: counted from the model's configuration."""
    note: Text


class _Costs(Record):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Text
    shape: Shape
    embeds_guidance: bool = False
    """Whether the network receives the guidance scale, so that guidance needs no second pass."""
    rollout: Rollout
    memory: Memory | None = None
    work: NetworkWork | None = None
    launches: Launches | None = None
    host: HostCosts = UNKNOWN_HOST
    devices: Annotated[dict[Token, Device], Field(min_length=1)]
    sources: dict[str, ProfileSource]
    """Origin of each number, by dotted path or a prefix of one."""


class Profile(_Costs):
    """Holds the costs of one model, trained in one way."""

    variant: Variant
    streaming: Annotated[dict[Token, Streaming], Field(default_factory=dict)]
    """Kinds of device that generate so."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a device's memory that may be planned with: an estimate leaves out what allocator
    and kernels take."""

    @field_validator("devices")
    @classmethod
    def _with_forecasts(cls, devices: dict[str, Device]) -> dict[str, Device]:
        return {**devices, **FORECASTS, **devices}

    @property
    def forward_seconds(self) -> float:
        """Seconds of a denoising step per sample of a whole group, guidance included."""
        return self.step_seconds(self.shape.group_size) / self.shape.group_size

    def step_seconds(self, samples: int) -> float:
        """Return the seconds of a denoising step of this many samples in one call, with
        guidance."""
        seconds = self.rollout.call_seconds + self.rollout.sample_seconds * samples
        return self.variant.forwards_per_step * seconds


class ProfileFile(_Costs):
    variants: Annotated[dict[VariantName, Variant], Field(min_length=1)]

    def trained(self, variant: Variant) -> Profile:
        """Return the costs of the model, trained in one of the ways."""
        plain: dict[str, Any] = {field: getattr(self, field) for field in _Costs.model_fields}
        return Profile(**plain, variant=variant)


def load_profile(name_or_path: str | Path, variant: VariantName = "lora") -> Profile:
    """Read a profile of the package by its name, or any other by the path of its JSON file.

    Raises:
        UserError: one line that names the known profiles, or the file and the fault in it.
    """
    path = Path(name_or_path)
    if path.suffix != ".json":
        path = PROFILES / f"{name_or_path}.json"
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"no cost profile {name_or_path}; {_known()}") from error
    try:
        costs = ProfileFile.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise UserError(f"{path}: {where}: {fault['msg']}") from error
    if variant == "full" and variant not in costs.variants:
        return costs.trained(_full_weight_costs(path, costs))
    if variant not in costs.variants:
        raise UserError(f"{path}: no variant {variant}; it has {', '.join(costs.variants)}")
    return costs.trained(costs.variants[variant])


def _full_weight_costs(path: Path, costs: ProfileFile) -> Variant:
    """Return what training all weights takes, from the costs of an adapter and the network's
    size."""
    if costs.memory is None:
        raise UserError(f"{path}: no variant full, and no memory that it would follow from")
    size = costs.memory.network_gib * GIB_TO_GB
    changes = {
        "rho": costs.variants["lora"].rho + 1,  # the backward pass of the weights
        "published_gb": size,
        "publish_seconds": size / PUBLISHED_GB_PER_SECOND,
    }
    return costs.variants["lora"].model_copy(update=changes)


def profile_names() -> list[str]:
    """Return the names of the package's profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def _known() -> str:
    names = profile_names()
    choices = f"known are {', '.join(names)}" if names else f"there are none in {PROFILES}"
    return f"{choices}; or give the path of a JSON file"


def device(profile: Profile, kind: str) -> Device:
    """Return the profile's device of this kind.

    Raises:
        UserError: if the profile has no such kind.
    """
    if kind not in profile.devices:
        raise UserError(f"no device kind {kind} in {profile.name}; {', '.join(profile.devices)}")
    return profile.devices[kind]
