"""The recipe's table of the trainer: how it steps, and on which devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from shared.recipe.fields import Positive, Rate, Renamed, Table


@dataclass(frozen=True, slots=True)
class _Ranks(Renamed):
    """What was `ranks`, beside `devices`, said that a process of its own trained on each device."""

    key: str = "ranks"
    to: str = "devices"
    values: tuple[tuple[Any, Any], ...] = ()

    def refuse(self, table: Mapping[str, Any]) -> None:
        if self.key in table:
            raise ValueError(
                "ranks: is no key any more; set devices to how many train, all hosts together, and "
                "hosts to how many hosts they are on"
            )

    def apply(self, table: dict[str, Any]) -> None:
        ranks = table.pop(self.key, 1)
        if ranks != 1:
            table[self.to] = ranks
            table["hosts"] = 1 if table.get("sharded") else ranks


class Trainer(Table):
    RENAMED: ClassVar = (
        Renamed("order", "deterministic", (("arrival", False), ("index", True))),
        _Ranks(),
    )

    learning_rate: Annotated[float, Field(gt=0, lt=1)]
    decay_steps: Positive | None = None
    """Batches over which the learning rate falls to 0 as a cosine; without it, it stays."""
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
    checkpoint_every: Positive | None = None
    """Versions from one whose optimizer state is stored to the next; without it, that of every
    version of an adapter, and of every tenth of all weights."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Whether the backward pass computes a block's activations again instead of keeping them;
    selective: all but what its attention has given."""
    micro_batch: Positive | Literal["auto"] = "auto"
    """Samples per forward and backward pass, each with `schedule.tsp_steps` of its steps."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """What "auto" chunks may take of the device; by default most of what it has."""
    deterministic: bool = False
    """Whether gradients are summed in the order of the groups, so that the same seed gives the same
    adapter to the last bit, however many workers there are."""
    threads: Positive = 1
    devices: Positive = 1
    """GPUs that train together, all hosts together. On one host, each with all weights, they are
    of one process; on a CPU, replicas of the network. With `schedule.mode` "fluid": number of
    processes that `digenrl up` starts, each with one GPU; others may join from other hosts."""
    hosts: Positive = 1
    """Hosts that they are on. On several, or where they share the weights, a process of its own
    trains on each device (a rank), and none of them is lent to generate."""
    exchange: Literal["auto", "store", "group"] = "auto"
    """How fluid devices sum what they have trained: over the object store, or by a process group
    (NCCL on GPUs, gloo on CPUs). auto: a process group on GPUs."""
    sharded: bool = False
    """Whether every device holds a share of the weights (FSDP2), or all of them."""

    @property
    def ranks(self) -> int:
        """Processes that the trainer is, a device each; 1 if one process has all devices."""
        return self.devices if self.sharded or self.hosts > 1 else 1
