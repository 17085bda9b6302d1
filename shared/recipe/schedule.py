"""How the devices are kept busy: the recipe's keys, and the whole that scheduler and planner take.

A new key is a field of `Schedule` and the decision that reads it; plans, simulations and
benchmarks carry the whole table.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from shared.recipe.fields import NonNegative, Positive, Renamed, Table


class Schedule(Table):
    """The table `schedule` of a recipe. None of it changes the update (docs/scheduling.md)."""

    RENAMED: ClassVar = (Renamed("mode", "mode", (("naive", "sequential"),)),)

    mode: Literal["pipelined", "sequential", "colocated", "fluid"] = "pipelined"
    """sequential: a whole batch is generated, then scored, then trained. colocated: the same, with
    every device generating its share of the groups and then training it. fluid: every process of
    the trainer holds the weights and their optimizer, generates while there is something to
    generate, and trains what is ready (`Trainer.devices` processes)."""
    fragment_size: Positive | Literal["auto"] = "auto"
    """Samples that one device generates at a time. auto: chosen for the devices at hand, and
    smaller towards the end of a batch."""
    tsp_steps: Positive | Literal["auto"] = "auto"
    """Denoising steps of a trajectory per forward and backward pass."""
    tag: NonNegative | Literal["auto", "off"] = "auto"
    """Groups of a batch that the trainer generates while it would wait."""
    max_staleness: Literal[0, 1, "auto"] = 0
    """1: at the tail of batch k, rollout begins batch k + 1 with version k. auto: decided by costs
    when the run begins (`services.scheduler.planning.staleness`)."""
    early_fraction: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of the next batch's groups that may be begun early. auto: all."""
    slot_deadline_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Seconds after which what a device has not finished is given to another one beside it. auto:
    ten times what it took before, 120 at least; 1,800 for one that has not finished anything."""

    @property
    def is_fluid(self) -> bool:
        """Whether devices have no roles: each generates, trains and takes the optimizer step."""
        return self.mode == "fluid"

    @property
    def staleness_limit(self) -> Literal[0, 1]:
        """The most steps that a sample may be stale by; 1 while "auto" is undecided."""
        return 1 if self.mode in ("pipelined", "fluid") and self.max_staleness != 0 else 0

    @property
    def early_share(self) -> float:
        return 1.0 if self.early_fraction == "auto" else self.early_fraction

    def early_groups(self, groups: int) -> int:
        """Returns how many of the next batch's ``groups`` may be begun early."""
        return max(1, int(self.early_share * groups)) if self.staleness_limit else 0

    @property
    def fixed_fragment(self) -> int | None:
        """Samples of a fragment; None if they are chosen for the devices at hand."""
        return self.fragment_size if isinstance(self.fragment_size, int) else None

    @property
    def lends_trainer(self) -> bool:
        """Whether the trainer's devices may generate."""
        return self.mode == "colocated" or self.fixed_tag != 0

    @property
    def fixed_tag(self) -> int | None:
        """Groups of a batch that TAG may have the trainer generate; None if they are decided batch
        by batch."""
        if self.tag == "off" or self.mode != "pipelined":
            return 0
        return None if self.tag == "auto" else self.tag

    def changed(self, **keys: Any) -> Self:
        """Returns the schedule with some keys set anew, checked as in a recipe."""
        return self.model_validate({**self.model_dump(), **keys})


class RunSchedule(Schedule):
    """The schedule of a run: its table, and what other tables of the recipe say of it."""

    deterministic: bool = False
    """`trainer.deterministic`: the trainer takes groups by their index, and waits for each."""
    holds_groups: bool = False
    """Whether the trainer holds groups until it has all of the batch (`Tables.batch_std`)."""
    gradient_help: bool = False
    """`rollout.can_train`: rollout devices that can hold what it takes compute gradients while the
    trainer is behind."""

    @property
    def tsp(self) -> bool:
        """Whether passes take several denoising steps of a trajectory."""
        return self.tsp_steps != 1
