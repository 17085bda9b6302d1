"""Defines what is known of a run at one moment: what its scheduler and its store report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from digenrl.evaluation.records import EvaluationRecord, Quality
from services.scheduler.shell.api_letters import DeadLetterView
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, View, WorkerView, example
from shared.messages.contracts import TagMode
from shared.recipe.recipe import Recipe
from shared.run.usage import BatchUsage

EXAMPLE_EVALUATION: dict[str, Any] = {
    "version": 10, "settings": "a" * 64, "reward": 0.81, "num_samples": 200,
    "rewards": {"proxy": 0.81}, "gold": {"other": 0.7},
    "figures": {"gold_accuracy": 0.88, "gold_nn": 2.4}, "alarms": [],
}  # fmt: skip
NAMED_FIGURES = ("reward", "num_samples", "rewards", "gold")
"""Figures that every evaluation has, under names of their own."""


class EvaluationView(View):
    """Results of an evaluation of a version, at fixed prompts and seeds."""

    model_config = example(**EXAMPLE_EVALUATION)

    version: int
    """Policy version."""
    settings: str
    """Digest of the evaluation's settings: figures of the same settings can be compared."""
    reward: float
    """Mean training reward."""
    num_samples: int
    """Number of its samples."""
    rewards: dict[str, float]
    """Mean score of each training scorer, without its weight."""
    gold: dict[str, float]
    """Mean score of each reward that is never trained on."""
    figures: dict[str, float]
    """Its other figures, as in summary.json (docs/summary.md)."""
    alarms: list[str]
    """A line for each gold reward that fell while the training reward rose."""

    @property
    def named_figures(self) -> dict[str, float]:
        """All figures that are numbers, gold rewards under their own names."""
        gold = {f"gold {name}": value for name, value in self.gold.items()}
        return {"reward": self.reward} | self.figures | gold


def evaluation_view(record: EvaluationRecord) -> EvaluationView:
    """Return the figures of a record."""
    quality = record.quality
    return EvaluationView(
        version=record.version, settings=record.settings, alarms=list(record.alarms),
        **quality.model_dump(include={*NAMED_FIGURES}), figures=_other_figures(quality),
    )  # fmt: skip


def _other_figures(quality: Quality) -> dict[str, float]:
    """Return the figures that are numbers and have no field of their own."""
    plain = quality.model_dump(exclude={*NAMED_FIGURES})
    return {name: value for name, value in plain.items() if isinstance(value, float)}


class StepFacts(NamedTuple):
    """An optimizer step, from its commit record."""

    version: int
    weights_digest: str
    metrics: Mapping[str, float]
    staleness: Sequence[tuple[int, int]] = ()
    """Steps by which samples were stale, and how many were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that a reading of a run is computed from."""

    run: RunView
    is_live: bool
    """Whether the run is in progress, so that its scheduler has reported ``run``."""
    at: float
    """Time of the reading, in seconds of the Unix clock."""
    load: LoadView | None = None
    workers: Sequence[WorkerView] = ()
    """Live workers."""
    letters: Sequence[DeadLetterView] | None = None
    """Newest dead letters, at most `MAX_LETTERS`; None: not known."""
    tag: TagMode | None = None
    """Mode in force of trainer-assisted generation; None: not known."""
    recipe: Recipe | None = None
    """None: not known."""
    steps: Sequence[StepFacts] = ()
    """Newest steps, the oldest first."""
    usage: Sequence[BatchUsage] = ()
    """Use of the devices in the newest batches, the oldest first."""
    evaluations: Sequence[EvaluationView] = ()
    """Evaluations at one set of settings, the oldest version first."""


MAX_LETTERS = 200
"""Newest dead letters that a reading takes into account."""
USAGE_BATCHES = 20
"""Newest batches whose use of devices is summed up."""
