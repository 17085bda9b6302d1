"""The schedules that are compared: each is the one before and one technique more."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

SEQUENTIAL = "sequential"
FAST_ALONE = "fast alone"
ONE_STEP = "+one step"

Part = Literal["equal", "slowed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    name: str
    changes: Mapping[str, Any]
    """Keys of the recipe that it sets."""
    warm_up: int = 1
    """First batches that are not measured."""
    overlaps: bool = True
    """Whether both devices work for most of the time, as they do in the bound."""
    baseline: bool = False
    """True for the baseline of the comparison."""
    most_batches: int | None = None
    """Limit of measured batches, where all are alike: nothing goes over from one to the next."""

    @property
    def slug(self) -> str:
        """Returns what its runs are named after."""
        return self.name.removeprefix("+").replace(" ", "-").lower()


STRICT = 2
LONG = 1
"""Batches, where each is long; there are as many rounds."""
TAG_WARM_UP = 4
"""Two batches without help and one with a little, for TAG to learn what they cost, and the first
that it plans."""


def modes_of(part: Part, *, window: int, group_size: int) -> tuple[Mode, ...]:
    """Returns the modes in the order of the table; TSP trains the ``window`` in one pass.

    Fragments are whole groups: on one thread, a sample in a quarter of a group takes half as long
    again as one in a whole group, which is more than smaller ones save at the end of a batch.
    """
    alone = Mode(
        name=FAST_ALONE,
        changes={
            "schedule.mode": "colocated",
            "schedule.tsp_steps": window,
            "schedule.fragment_size": group_size,
            "schedule.max_staleness": 0,
            "rollout.workers": 0,
        },
        overlaps=False,
        baseline=True,
        most_batches=LONG,
    )
    sequential = Mode(
        name=SEQUENTIAL,
        changes={
            "schedule.mode": "sequential",
            "schedule.tsp_steps": 1,
            "schedule.tag": "off",
            "schedule.max_staleness": 0,
            "schedule.fragment_size": group_size,
        },
        overlaps=False,
        most_batches=LONG,
    )
    gap = replace(
        _more(sequential, "+GAP", {"schedule.mode": "disaggregated"}), most_batches=STRICT
    )
    tsp = _more(gap, "+TSP", {"schedule.tsp_steps": window})
    tag = replace(
        _more(tsp, "+TAG", {"schedule.tag": "auto"}), warm_up=TAG_WARM_UP, most_batches=None
    )
    one_step = _more(tag, ONE_STEP, {"schedule.max_staleness": 1})
    ladder: dict[Part, tuple[Mode, ...]] = {
        "equal": (sequential, gap, tsp, tag, one_step),
        "slowed": (alone, one_step),
    }
    return ladder[part]


def _more(mode: Mode, name: str, changes: Mapping[str, Any]) -> Mode:
    return replace(mode, name=name, changes={**mode.changes, **changes}, overlaps=True)
