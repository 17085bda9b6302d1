"""Estimates the memory that a run takes of its devices: what they hold, and their peak.

Figures belong to a profile, for one shape of the model's samples. Activations of another shape
scale with the number of latents, activations of another type with its size.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from digenrl.trace.encoding import encoding_seconds
from services.scheduler.costs.profile import Profile, Streaming
from services.scheduler.costs.sizes import GIB_TO_GB, Memory
from shared.devices.chunks import MEMORY_SHARE as MEMORY_SHARE
from shared.models.memory import Form, Quantised, TrainedSets

FIGURES_BYTES = 2
"""Bytes of a weight in a profile's figures of network and text encoders."""
TRAINED_BYTES = 4
"""Least bytes of a weight that is trained, of its gradient and of each of Adam's moments."""
QUANTISED_BYTES = {"int8": (1.0, 1500), "w8a8": (1.0, 1500), "fp8": (1.0, 1500), "nf4": (0.5, 64)}
"""Bytes of a quantised weight, and the fewest weights that share a scale."""
DECODING_PEAK = 1.6
"""Peak of decoding over its traced one: convolutions have work spaces. Measured for SD3.5-M's
decoder on an H200, taken for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """How a run uses its model."""

    height: int
    width: int
    frames: int
    forwards: int
    """Forward passes per step: 2 with classifier-free guidance."""
    item_bytes: int
    """Bytes of a weight of `model.dtype`."""
    rank: int
    """Rank of the adapter; 0 if all weights are trained."""
    rows: int
    """Smallest number of rows of a training pass."""
    passes: tuple[int, ...] = ()
    """Rows of the passes that a trainer chooses from, ascending; empty: any."""
    fragment: int
    """Number of samples that a device generates at a time."""
    ranks: int = 1
    """Number of ranks that share the weights."""
    sets: TrainedSets = field(default_factory=TrainedSets)
    """Sets of the trained weights that a device holds in addition to its network's."""
    encodes: bool = True
    """Whether devices that generate hold the text encoders; if not, a process of its own does."""
    tiles: bool = False
    """Whether samples are decoded in tiles."""
    streams: bool = False
    """Whether the network's blocks come to rollout devices one after the other."""
    trainer_streams: bool = False
    """The same of devices that train."""
    offloads: bool = False
    """Whether the inputs of blocks are in the host's memory until the backward pass."""
    base: Quantised | None = None
    """Form of the network under the adapter that is trained, if it is quantised."""
    weights: Form | None = None
    """Form of the network on rollout devices, if it differs from the training devices'."""
    has_importance_weights: bool = True
    """Whether importance weights can correct samples of quantised weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Holds the memory that one device needs, in GiB."""

    network: float
    text: float
    decoder: float
    trained: float
    """Memory beyond the network: adapter, gradients, optimizer state and the next version."""
    peak: float
    """Peak of work beyond what is held."""
    host: float = 0.0
    """Memory of its host that it takes besides, and keeps pinned."""

    @property
    def held(self) -> float:
        return self.network + self.text + self.decoder + self.trained

    @property
    def total(self) -> float:
        return self.held + self.peak

    def __str__(self) -> str:
        parts = {
            "network": self.network,
            "text encoders": self.text,
            "decoder": self.decoder,
            "what is trained": self.trained,
            "at work": self.peak,
        }
        text = " + ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib)
        besides = f", and {self.host:.1f} GiB of its host's memory" if self.host else ""
        return f"{self.total:.1f} GiB ({text}){besides}"


def rollout_needs(memory: Memory, use: ModelUse) -> DeviceMemory:
    """Return the memory of a generating device; it loads the next version next to the one in
    use."""
    network, host = _held_network(memory, use)
    return DeviceMemory(
        network=network,
        text=_text(memory, use) if use.encodes else 0.0,
        decoder=memory.decoder_gib,
        trained=2 * _adapter(memory, use) if use.rank else network,
        peak=max(_denoise(memory, use), _decode(memory, use)),
        host=host,
    )


def trainer_needs(memory: Memory, use: ModelUse) -> DeviceMemory:
    """Return what a device needs that only trains: a peak has the gradient.

    Ranks that share the weights hold a part each, and gather one block after the other. If all
    weights are trained, they are kept in float32: the parts of ranks are these, and gathered as
    `model.dtype`; a single device holds them in addition to the weights for computation.
    """
    network, adapter = _network(memory, use) / use.ranks, _adapter(memory, use)
    host = use.sets.on_host * _network(memory, use) + _offloaded(memory, use)
    if use.trainer_streams:
        network, host = _blocks(memory, use), host + network
    if use.rank:
        trained = adapter + use.sets.size(adapter, adapter)
    else:
        masters = _trained_weights(memory, use)
        network = masters if use.ranks > 1 else network
        trained = use.sets.size(network, masters)
    return DeviceMemory(
        network=network, text=0.0, decoder=0.0, trained=trained, peak=_train(memory, use), host=host
    )


def member_needs(memory: Memory, use: ModelUse) -> DeviceMemory:
    """Return what a device needs that generates as well, and keeps its gradient meanwhile. A rank
    gathers the whole network for that, and generates its part of a fragment; the first one of a
    shard group encodes prompts."""
    trains, each = trainer_needs(memory, use), -(-use.fragment // use.ranks)
    gathered = _network(memory, use) if use.ranks > 1 else 0.0
    works = max(_denoise(memory, replace(use, fragment=each)), _decode(memory, use))
    return replace(
        trains,
        text=_text(memory, use) if use.encodes else 0.0,
        decoder=memory.decoder_gib,
        peak=max(trains.peak, _gradients(memory, use) + gathered + works),
    )


def encoder_needs(memory: Memory, use: ModelUse) -> DeviceMemory:
    """Return what a device needs that only encodes prompts, without the activations of one."""
    return DeviceMemory(network=0.0, text=_text(memory, use), decoder=0.0, trained=0.0, peak=0.0)


def usual(memory: Memory) -> ModelUse:
    """Return the use that the figures are for: one sample, and one row, at a time."""
    return ModelUse(
        height=memory.height,
        width=memory.width,
        frames=memory.frames,
        forwards=memory.forwards,
        item_bytes=FIGURES_BYTES,
        rank=memory.adapter_rank,
        rows=1,
        fragment=1,
    )


def with_memory(profile: Profile, use: ModelUse, streams: Collection[str] = ()) -> Profile:
    """Return the profile with the memory of such a run, if it has a table. ``streams``: kinds of
    device that stream the network's blocks, if ``use`` does not stream them on all."""
    if profile.memory is None:
        return profile
    resident = rollout_needs(profile.memory, replace(use, streams=False))
    row, empty = replace(use, rows=1), replace(use, rows=0)
    trainer, member = trainer_needs(profile.memory, use), member_needs(profile.memory, use)
    at_work = _gradients(profile.memory, use)
    if use.ranks > 1:
        at_work += _network(profile.memory, use)
    streaming, network = _streaming(profile.memory, use), _network(profile.memory, use)
    rollout = {
        "memory_gib": resident.total,
        "held_gib": resident.held,
        "sample_gib": _denoise(profile.memory, use) / use.fragment,
        "encode_seconds": encoding_seconds(profile) if use.encodes else 0.0,
    }
    variant = {
        "memory_gib": trainer.total,
        "member_gib": member.total,
        "pass_gib": trainer.held + _train(profile.memory, empty),
        "member_pass_gib": member.held + _train(profile.memory, empty),
        "row_gib": _rows(profile.memory, row),
        "pass_sizes": use.passes,
        "training_gib": member.held + at_work - resident.held,
        "offload_gib": _offloaded(profile.memory, row),
        "host_gib": trainer_needs(profile.memory, empty).host,
        "streamed_gb": use.trainer_streams * network * GIB_TO_GB,
        "ranks": use.ranks,
        "network_gb": network * GIB_TO_GB,
    }
    return profile.model_copy(
        update={
            "rollout": profile.rollout.model_copy(update=rollout),
            "variant": profile.variant.model_copy(update=variant),
            "streaming": dict.fromkeys(profile.devices if use.streams else streams, streaming),
            "memory_share": MEMORY_SHARE,
        }
    )


def _streaming(memory: Memory, use: ModelUse) -> Streaming:
    needed = rollout_needs(memory, replace(use, streams=True))
    return Streaming(memory_gib=needed.total, held_gib=needed.held, host_gib=needed.host)


def _network(memory: Memory, use: ModelUse) -> float:
    return _in_form(memory, use, memory.network_gib, use.base)


def _held_network(memory: Memory, use: ModelUse) -> tuple[float, float]:
    """Return the parts of the network that a rollout device and its host hold."""
    form = use.weights or use.base
    network = _in_form(memory, use, memory.network_gib, form)
    if not use.streams:
        return network, 0.0
    return _in_form(memory, use, memory.streamed_gib, form), network


def _in_form(memory: Memory, use: ModelUse, gib: float, form: Form | None) -> float:
    """Return the size in a form of the network, or of what a device holds of a streamed one, with
    all that cannot be quantised."""
    if form is None or form == "bf16":
        return gib if form else gib * use.item_bytes / FIGURES_BYTES
    size, sharing = QUANTISED_BYTES[form]
    weight = size + use.item_bytes / sharing
    plain = min(gib, memory.network_gib - memory.linear_gib)
    return (plain * use.item_bytes + (gib - plain) * weight) / FIGURES_BYTES


def _text(memory: Memory, use: ModelUse) -> float:
    return memory.text_gib * use.item_bytes / FIGURES_BYTES


def _adapter(memory: Memory, use: ModelUse) -> float:
    return memory.adapter_gib * use.rank / memory.adapter_rank


def _trained_weights(memory: Memory, use: ModelUse) -> float:
    """Return a rank's share of the weights where all are trained, as they are kept."""
    item_bytes = max(use.item_bytes, TRAINED_BYTES)
    return memory.network_gib * item_bytes / FIGURES_BYTES / use.ranks


def _latents(memory: Memory, use: ModelUse) -> float:
    """Return the ratio of a sample's latents to the figures' latents."""
    figures = memory.height * memory.width * memory.frames
    return use.height * use.width * use.frames / figures


def _activations(memory: Memory, use: ModelUse) -> float:
    """Return the ratio of a step's or a row's activations to the figures."""
    rows = use.forwards / memory.forwards
    return _latents(memory, use) * rows * use.item_bytes / FIGURES_BYTES


def _denoise(memory: Memory, use: ModelUse) -> float:
    return use.fragment * memory.denoise_gib * _activations(memory, use)


def _decode(memory: Memory, use: ModelUse) -> float:
    peak = memory.decode_gib * _latents(memory, use)
    if use.tiles:
        peak = min(peak, memory.tiled_gib * max(1.0, _latents(memory, use)))
    return DECODING_PEAK * peak


def _gradients(memory: Memory, use: ModelUse) -> float:
    return _adapter(memory, use) if use.rank else _trained_weights(memory, use)


def _train(memory: Memory, use: ModelUse) -> float:
    """Return the peak of a training pass; figures have the gradient of an adapter."""
    fixed = max(0.0, memory.train_gib - memory.adapter_gib)
    return _gradients(memory, use) + fixed + _rows(memory, use) + _gathered(memory, use)


def _rows(memory: Memory, use: ModelUse) -> float:
    """Return what the rows of a pass take of the device."""
    row = memory.offloaded_row_gib if use.offloads else 0.0
    return use.rows * (row or memory.row_gib) * _activations(memory, use)


def _offloaded(memory: Memory, use: ModelUse) -> float:
    """Return what they take of the host."""
    rows = use.rows if use.offloads else 0
    return rows * memory.offload_gib * _activations(memory, use)


def _blocks(memory: Memory, use: ModelUse) -> float:
    """Return what is held at a time of a network whose blocks come one after the other."""
    return _in_form(memory, use, memory.streamed_gib, use.base)


def _gathered(memory: Memory, use: ModelUse) -> float:
    """Return what a pass gathers of the other ranks' weights at a time."""
    return _blocks(memory, use) * (1 - 1 / use.ranks)
