"""The table of a recipe that says how gradients are computed, and what is made of them."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from shared.recipe.fields import Positive, Rate, Renamed, Table


class Trainer(Table):
    RENAMED: ClassVar = (Renamed("order", "deterministic", (("arrival", False), ("index", True))),)

    learning_rate: Annotated[float, Field(gt=0, lt=1)]
    decay_steps: Positive | None = None
    """Optimizer steps over which the learning rate falls to 0 as a cosine; without it, it stays."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Rate = 1e-4
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    updates: Positive = 1
    """Optimizer steps per batch, each of as many of its groups, in index order. From the second one
    on, samples are by weights that have moved since."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of what is trained, which is then what is exported."""
    ema_warmup: bool = True
    """Whether the decay rises with the optimizer steps, so that the average of a short run does not
    remember the untrained weights."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes a block's activations again instead of keeping them."""
    micro_batch: Positive | Literal["auto"] = "auto"
    """Samples per forward and backward pass, each with `schedule.tsp_steps` of its steps."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """What "auto" chunks may take of the device; by default most of what it has."""
    deterministic: bool = False
    """Whether gradients are summed in the order of the groups, so that the same seed gives the same
    adapter to the last bit, however many workers there are."""
    threads: Positive = 1
    devices: Positive = 1
    """GPUs of this host that train together, each with all weights. On a CPU, replicas of the
    network in one process."""
    ranks: Positive = 1
    """Processes that torchrun starts, on one host or several, with a GPU each."""
    sharded: bool = False
    """Whether every rank holds a share of the weights (FSDP2), or all of them."""
