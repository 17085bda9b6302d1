"""Results of a trace of one model, at one shape of its samples: a record that can be kept as JSON,
and the resulting figures of a cost profile. Imports no torch."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from digenrl.trace.memory import FIGURES_BYTES
from services.scheduler.costs.host import Launches
from services.scheduler.costs.sizes import Memory, NetworkWork, Positive
from shared.messages.records import Count, Record, Text
from shared.models.memory import ITEM_BYTES

GIB = 2**30
Flops = dict[str, Count]
"""Floating-point operations by type."""
Rows = Annotated[int, Field(gt=0)]


class Shape(Record):
    """Traced configuration: two runs of the same shape share a trace."""

    height: Positive
    width: Positive
    frames: Positive
    text_tokens: Positive
    forwards: Literal[1, 2]
    """Rows of the network per sample: 2 with classifier-free guidance."""
    dtype: str
    trained: Literal["lora", "full"]
    rank: Count
    """Rank of the adapter; 0 if all weights are trained."""
    targets: tuple[str, ...]
    """Names of the adapted layers; empty for the family's."""
    gradient_checkpointing: bool | Literal["selective", "offloaded"]
    cfg_gradient: Literal["both", "conditional"] = "both"
    """Halves of classifier-free guidance that a training pass has a gradient by."""
    has_kl: bool


class Weights(Record):
    """Bytes that a process holds of each part."""

    network: Count
    """Without what is trained, if that is an adapter, and as if nothing were quantised."""
    saved: Count = 0
    """Memory saved by quantisation."""
    streamed: Count
    """Part of the network that a device holds at a time if its blocks are streamed."""
    linear: Count
    """Part of the network that can be quantised: the matrices of its blocks."""
    trained: Count
    """Adapter, or the whole network once more where all of it is trained."""
    text: dict[str, Count]
    """Text encoders by name."""
    decoder: Count


class MeasuredPass(Record):
    """Measurements of one call: a denoising step of a number of samples, or the decoding of one."""

    rows: Rows
    peak_bytes: Count
    """Most that lives at a time beyond the weights."""
    flops: Flops
    launches: Count
    """Kernels that a host launches for it on a GPU, for any rows."""


class TrainingPass(Record):
    rows: Rows
    peak_bytes: Count
    """Most that lives at a time beyond weights and optimizer state: activations, gradients."""
    offloaded_bytes: Count = 0
    """Inputs of blocks that the host's memory holds at a time."""
    forward: Flops
    backward: Flops
    """Operations of the backward pass, and of blocks computed again if gradients are
    checkpointed."""
    kl: Flops
    """Passes without a gradient: of the network without its adapter for a KL term, and of the
    unconditional half if that is to have none."""
    launches: Count
    """Kernels that a host launches for all of it on a GPU, for any rows."""

    @property
    def flops(self) -> int:
        return sum(sum(each.values()) for each in (self.forward, self.backward, self.kl))


class Training(Record):
    passes: Annotated[tuple[TrainingPass, ...], Field(min_length=1)]
    """Passes that were traced, by ascending rows."""
    gradients: Count
    """Bytes of the gradients, which are part of the peaks."""
    optimizer: Count
    """Bytes that are held besides the weights: masters, moments, averages."""
    step_peak: Count
    """Most that lives at a time in an optimizer step, beyond weights, gradients and optimizer."""

    def peak_bytes(self, rows: int) -> float:
        """Return the peak of a pass of this many rows, on a line through two traced ones."""
        fixed, each = affine([(each.rows, each.peak_bytes) for each in self.passes])
        return max(fixed + each * rows, self.gradients + self.step_peak)


class RankMemory(Record):
    """Holds what one of several ranks takes, which share the weights (FSDP2)."""

    ranks: Positive
    network: Count
    """Bytes of this rank's share of the network."""
    training: Training


class StoredBytes(Record):
    """Counts the bytes that a run writes to the object store."""

    trajectory: Count
    """Bytes of a sample's denoising path."""
    media: Count
    """Bytes of a sample as it is decoded."""
    conditions: Count
    """Bytes of a prompt's conditions."""
    weights: Count
    """Bytes of a version's weights."""
    checkpoint: Count
    """Bytes of the optimizer's state for resuming from a version."""

    def batch(self, groups: int, group_size: int) -> int:
        samples = groups * group_size
        return (
            samples * (self.trajectory + self.media)
            + groups * self.conditions
            + self.weights
            + self.checkpoint
        )


class TracedWork(Record):
    """Holds what a cost profile needs besides a trace."""

    work: NetworkWork
    whole: MeasuredPass
    """Decoding one sample as a whole."""
    tiled: MeasuredPass
    """The same in tiles, or as a whole if the decoder knows none."""


class Trace(Record):
    model: Text
    """Name of the model's folder."""
    is_published: bool
    """Whether the configuration comes from this package, not from a folder."""
    shape: Shape
    weights: Weights
    denoise: Annotated[tuple[MeasuredPass, ...], Field(min_length=1)]
    """Traced denoising steps, by ascending samples; the last one has a fragment's samples."""
    decode: MeasuredPass
    train: Training | None
    """Training on a device that holds all weights; None if they are shared."""
    sharded: RankMemory | None
    stored: StoredBytes
    counted: TracedWork | None = None
    """Further inputs of a cost profile, if requested."""

    @property
    def training(self) -> Training:
        trace = self.sharded.training if self.sharded else self.train
        assert trace is not None
        return trace

    def denoise_peak(self, samples: int) -> float:
        """Return the peak of a denoising step of this many samples, beyond the weights."""
        fixed, each = affine([(each.rows, each.peak_bytes) for each in self.denoise])
        return fixed + each * samples

    @property
    def step_flops(self) -> float:
        """Floating-point operations of a denoising step per sample, guidance included."""
        last = self.denoise[-1]
        return sum(last.flops.values()) / last.rows

    @property
    def row_flops(self) -> float:
        """Floating-point operations of a trained row."""
        last = self.training.passes[-1]
        return last.flops / last.rows

    @property
    def rho(self) -> float:
        """Trained row over denoising step, as in a cost profile: forward, backward and KL pass."""
        return self.row_flops / self.step_flops

    @property
    def launches(self) -> Launches:
        """Kernels that the host launches for a step and for a training pass."""
        step, last = self.denoise[-1], self.training.passes[-1]
        return Launches(step=step.launches, training_pass=last.launches)

    def memory(self, *, fragment: int) -> Memory:
        """Returns a cost profile's memory table. Its figures are exact for fragments of this many
        samples, at this shape; figures of decoding assume tiles if the recipe decodes in tiles."""
        shape, weights = self.shape, self.weights
        scale = ITEM_BYTES[shape.dtype] / FIGURES_BYTES
        last = self.training.passes[-1]
        fixed, row = affine([(each.rows, each.peak_bytes) for each in self.training.passes])
        offloaded = last.offloaded_bytes / last.rows
        if shape.trained == "full":
            fixed -= self.training.gradients
        if self.sharded:  # the table's figures are those of whole weights
            fixed -= weights.streamed * (1 - 1 / self.sharded.ranks)
        return Memory(
            height=shape.height,
            width=shape.width,
            frames=shape.frames,
            forwards=shape.forwards,
            network_gib=weights.network / scale / GIB,
            streamed_gib=max(weights.streamed, 1) / scale / GIB,
            linear_gib=max(weights.linear, 1) / scale / GIB,
            text_gib=max(sum(weights.text.values()), 1) / scale / GIB,
            decoder_gib=weights.decoder / GIB,
            adapter_gib=weights.trained / GIB,
            adapter_rank=shape.rank or 1,
            denoise_gib=self.denoise_peak(fragment) / fragment / scale / GIB,
            decode_gib=self.decode.peak_bytes / GIB,
            tiled_gib=self.decode.peak_bytes / GIB,
            train_gib=max(0.0, fixed) / GIB,
            row_gib=(row + offloaded) / scale / GIB,
            offloaded_row_gib=row / scale / GIB if offloaded else 0.0,
            offload_gib=offloaded / scale / GIB,
        )


def affine(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the fixed part and the part of each row, from (rows, bytes).

    >>> affine([(1, 30), (3, 70)])
    (10.0, 20.0)
    >>> affine([(2, 30)])
    (0.0, 15.0)
    """
    (rows, size), *others = sorted(points)
    if not others:
        return 0.0, size / rows
    most, largest = others[-1]
    each = max(0.0, (largest - size) / (most - rows))
    fixed = size - each * rows
    return (fixed, each) if fixed >= 0 else (0.0, max(size / rows, largest / most))
