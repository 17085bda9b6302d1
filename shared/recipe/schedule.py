"""How the devices are kept busy: the recipe's keys, and the whole that scheduler and planner take.

A new key is a field of `Schedule` and the decision that reads it; plans, simulations and
benchmarks carry the whole table.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from shared.messages.records import ChosenLevel
from shared.recipe.fields import NonNegative, Positive, Table


class Schedule(Table):
    """The table `schedule` of a recipe. None of it changes the update (docs/scheduling.md)."""

    mode: Literal["disaggregated", "sequential", "colocated", "fluid"] = "disaggregated"
    """`disaggregated`: some devices generate, and others train and may be lent (`tag`). `fluid`:
    each device generates, trains and takes the optimizer step. `sequential`: a batch is generated,
    then scored, then trained. `colocated`: as `sequential`, and the devices that train
    generate."""
    fragment_size: Positive | Literal["auto"] = "auto"
    """Samples that a device generates at a time; a number has to divide `batch.group_size`. `auto`:
    chosen for the devices, and smaller near the end of a batch."""
    tsp_steps: Positive | Literal["auto"] = "auto"
    """Denoising steps per training pass, at most `sampling.window`."""
    tag: NonNegative | Literal["auto", "off"] = "auto"
    """Number of groups per batch that devices that train may generate, with
    `mode = "disaggregated"`; `off`: none; `auto`: decided for each batch."""
    max_staleness: Literal[0, 1, "auto"] = 0
    """Maximum age of samples in versions. 1: rollout starts the next batch before the optimizer
    step; `auto`: 0 or 1, decided by costs at the start of the run."""
    slot_deadline_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Seconds after which unfinished work is also given to another device. `auto`: ten times the
    usual duration, at least 120; 1,800 for a device without a finished piece of work. Loading of
    weights does not count, for ten times as long, or for 1,800 seconds with `auto`."""

    @property
    def members_generate(self) -> bool:
        """Whether members are given fragments as well."""
        return self.mode in ("fluid", "colocated")

    @property
    def staleness_limit(self) -> Literal[0, 1]:
        """The most steps that a sample may be stale by; 1 while "auto" is undecided."""
        return 1 if self.mode in ("disaggregated", "fluid") and self.max_staleness != 0 else 0

    @property
    def fixed_fragment(self) -> int | None:
        """Samples of a fragment; None if they are chosen for the devices at hand."""
        return self.fragment_size if isinstance(self.fragment_size, int) else None

    @property
    def trainer_generates(self) -> bool:
        """Whether members also generate: at any time, or while they are lent."""
        return self.members_generate or self.fixed_tag != 0

    @property
    def fixed_tag(self) -> int | None:
        """Groups of a batch that TAG may have members generate; None if they are decided batch by
        batch."""
        if self.tag == "off" or self.mode != "disaggregated":
            return 0
        return None if self.tag == "auto" else self.tag

    def changed(self, **keys: Any) -> Self:
        """Return the schedule with some keys replaced, checked as in a recipe."""
        return self.model_validate({**self.model_dump(), **keys})


class RunSchedule(Schedule):
    """The schedule of a run: its table, and related checks of other tables."""

    deterministic: bool = False
    """`trainer.deterministic`: gradients are summed by the index of their groups."""
    down: ChosenLevel = "exact"
    up: ChosenLevel = "exact"
    """The keys of `exchange`."""

    @property
    def tsp(self) -> bool:
        """Whether passes take several denoising steps of a trajectory."""
        return self.tsp_steps != 1
