"""Estimates the memory that a run takes of its devices: what they hold, and their peak.

Figures are those of a profile, for one shape of the model's samples. Activations of another shape
scale with the number of latents, those of another type with its size.
"""

from dataclasses import dataclass

from services.scheduler.costs.profile import Memory, Profile

FIGURES_BYTES = 2
"""Bytes of a weight in a profile's figures of network and text encoders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Says how a run uses its model."""

    height: int
    width: int
    frames: int
    forwards: int
    """Forward passes per step: 2 with classifier-free guidance."""
    item_bytes: int
    """Bytes of a weight that is not trained."""
    rank: int
    """Rank of the adapter; 0 if all weights are trained."""
    rows: int
    """Smallest number of rows of a training pass."""
    fragment: int
    """Number of samples that a device generates at a time."""
    ranks: int = 1
    """Number of ranks that share the weights."""
    helps: bool = True
    """Whether the trainer's devices also generate."""
    can_train: bool = False
    """Whether rollout devices also compute gradients."""
    averages: bool = False
    """Whether the trainer keeps a moving average of the trained weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Holds the memory that one device needs, in GiB."""

    network: float
    text: float
    decoder: float
    trained: float
    """Memory beyond the network: adapter, gradients, optimizer state and the next version."""
    peak: float
    """Peak of work beyond what is held."""

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
        told = " + ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib)
        return f"{self.total:.1f} GiB ({told})"


def rollout_needs(memory: Memory, use: Use) -> Needed:
    """Return what a generating device needs; it loads the next version beside the one in use."""
    network, adapter = _network(memory, use), _adapter(memory, use)
    peaks = [_denoise(memory, use), _decode(memory, use)]
    if use.can_train:
        peaks.append(_train(memory, use))
    return Needed(
        network=network,
        text=memory.text_gib * use.item_bytes / FIGURES_BYTES,
        decoder=memory.decoder_gib,
        trained=2 * adapter if use.rank else network,
        peak=max(peaks),
    )


def trainer_needs(memory: Memory, use: Use) -> Needed:
    """Return what a training device needs: a peak has the gradient, Adam keeps two moments."""
    network, adapter = _network(memory, use), _adapter(memory, use)
    peak = _train(memory, use)
    if use.helps:
        peak = max(peak, _denoise(memory, use), _decode(memory, use))
    state = (3.0 + use.averages) * adapter
    if not use.rank:
        whole, network = network, network / use.ranks
        # Every rank loads all weights, and shares them afterwards.
        state = max((2.0 + use.averages) * network, whole - network - peak)
    return Needed(
        network=network,
        text=memory.text_gib * use.item_bytes / FIGURES_BYTES if use.helps else 0.0,
        decoder=memory.decoder_gib if use.helps else 0.0,
        trained=state,
        peak=peak,
    )


def usual(memory: Memory) -> Use:
    """Return the use that the figures are for: one sample, and one row, at a time."""
    return Use(
        height=memory.height,
        width=memory.width,
        frames=memory.frames,
        forwards=memory.forwards,
        item_bytes=FIGURES_BYTES,
        rank=memory.adapter_rank,
        rows=1,
        fragment=1,
    )


def with_memory(profile: Profile, use: Use) -> Profile:
    """Return the profile with what such a run takes in place of its figures, if it has a table."""
    if profile.memory is None:
        return profile
    rollout, trainer = rollout_needs(profile.memory, use), trainer_needs(profile.memory, use)
    return profile.model_copy(
        update={
            "rollout": profile.rollout.model_copy(
                update={
                    "memory_gib": rollout.total,
                    "held_gib": rollout.held,
                    "sample_gib": _denoise(profile.memory, use) / use.fragment,
                }
            ),
            "variant": profile.variant.model_copy(
                update={
                    "memory_gib": trainer.total,
                    "optimizer_gib": max(0.0, trainer.held - rollout.held),
                }
            ),
        }
    )


def _network(memory: Memory, use: Use) -> float:
    return memory.network_gib * use.item_bytes / FIGURES_BYTES


def _adapter(memory: Memory, use: Use) -> float:
    return memory.adapter_gib * use.rank / memory.adapter_rank


def _latents(memory: Memory, use: Use) -> float:
    """Return the ratio of a sample's latents to those of the figures."""
    figures = memory.height * memory.width * memory.frames
    return use.height * use.width * use.frames / figures


def _activations(memory: Memory, use: Use) -> float:
    """Return the ratio of a step's or a row's activations to the figures."""
    rows = use.forwards / memory.forwards
    return _latents(memory, use) * rows * use.item_bytes / FIGURES_BYTES


def _denoise(memory: Memory, use: Use) -> float:
    return use.fragment * memory.denoise_gib * _activations(memory, use)


def _decode(memory: Memory, use: Use) -> float:
    return memory.decode_gib * _latents(memory, use)


def _train(memory: Memory, use: Use) -> float:
    gradients = 0.0 if use.rank else _network(memory, use) / use.ranks
    return gradients + memory.train_gib + use.rows * memory.row_gib * _activations(memory, use)
