"""The recipe's table of the trainer: how it steps, and on which devices."""

from typing import Annotated, Literal

from pydantic import Field

from shared.messages.records import ChosenLevel
from shared.models.memory import Residence
from shared.recipe.fields import Positive, Rate, Table


class Exchange(Table):
    """How many bits of weights and gradients cross slow lines (docs/far-apart.md)."""

    down: ChosenLevel = "exact"
    """How the change from one version to the next is rounded: `exact`, to `int8` or to `int4`, a
    quarter or an eighth of the bytes. Rounded, the optimizer steps masters, and samples and
    gradients are computed at the published weights. `auto`: the least rounding whose transfer is
    hidden. LoRA only."""
    up: ChosenLevel = "exact"
    """How the sum of gradients that a member, or a host's members together, sends to the others is
    rounded; the error is added to its next sum, and with `trainer.deterministic` to none. The sums
    go through the object store."""


class Trainer(Table):
    learning_rate: Annotated[float, Field(gt=0, lt=1)]
    """Learning rate of AdamW."""
    decay_steps: Positive | None = None
    """Number of batches in which the learning rate falls to 0 along a cosine. Default: constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    weight_decay: Rate = 1e-4
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Norm at which the gradient is clipped."""
    updates: Positive = 1
    """Optimizer steps per batch, each with an equal share of the groups; it has to divide
    `batch.groups`. Later steps train samples of weights that have changed since."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of the trained weights. The average is evaluated and exported."""
    ema_warmup: bool = True
    """Whether the decay rises with the optimizer steps: at most (1 + k) / (10 + k) after k
    steps."""
    gradient_checkpointing: bool | Literal["selective", "offloaded"] = False
    """Whether the backward pass recomputes activations instead of keeping them: a third more time,
    a fraction of the memory. `selective` keeps the output of the attention. `offloaded` keeps the
    inputs of blocks in the host's memory."""
    memory: Residence = "resident"
    """`streamed`: where devices train, the blocks of the network stay on the host and are copied to
    the device one after another, for training and for generation. Gradients and samples do not
    change. LoRA only, with `trainer.gradient_checkpointing`, without `trainer.shard_devices`."""
    micro_batch: Positive | Literal["auto"] = "auto"
    """Samples per training pass; a number has to divide `batch.group_size`. `auto`: measured."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory in GiB that `auto` passes may use. Default: 0.92 of the device."""
    deterministic: bool = False
    """Whether gradients are summed in the order of the groups, so that one seed gives the same
    bytes with any number of workers."""
    threads: Positive = 1
    """CPU threads of each trainer process."""
    devices: Positive = 1
    """Number of devices that train and that `digenrl up` starts, a process each; more may join from
    other hosts."""
    exchange: Literal["auto", "store", "group"] = "auto"
    """Transport of the sums of devices that train: `group` (process group, NCCL or gloo) or `store`
    (object store). `auto`: a process group on GPUs."""
    shard_devices: Positive = 1
    """Number of devices that form a shard group: each holds a share of the weights (FSDP2).
    It has to divide `trainer.devices`. Shard groups and devices with all weights train in one
    run."""

    @property
    def is_sharded(self) -> bool:
        return self.shard_devices > 1
