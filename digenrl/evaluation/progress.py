"""How far the evaluation of a run is, for people and for `digenrl up`."""

from dataclasses import dataclass, field

from fastapi import APIRouter
from prometheus_client import Gauge
from pydantic import BaseModel, ConfigDict

from digenrl.evaluation.records import EvaluationRecord


@dataclass(slots=True)
class Progress:
    evaluated: list[int] = field(default_factory=list)
    """Policy versions that have a record."""
    pending: list[int] | None = None
    """Versions that are due and have none, committed or not; None before the first look."""
    alarms: list[str] = field(default_factory=list)
    """Versions that this process has evaluated, oldest first."""


class EvaluationView(BaseModel):
    """How far the evaluation of a run is."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        from_attributes=True,
        json_schema_extra={"examples": [{"evaluated": [0, 10], "pending": [20], "alarms": []}]},
    )

    evaluated: list[int]
    """Policy versions that have a record."""
    pending: list[int] | None
    """Versions that are due and have none, committed or not; null before the first look."""
    alarms: list[str]
    """Versions that this process has evaluated, oldest first."""


def routes(progress: Progress) -> APIRouter:
    router = APIRouter(tags=["evaluation"])

    @router.get("/v1/evaluation", operation_id="get_evaluation")
    def evaluation() -> EvaluationView:
        """Which versions are evaluated, which are to be, and the alarms that were raised."""
        return EvaluationView.model_validate(progress)

    return router


VERSION = Gauge("digenrl_evaluation_version", "Newest policy version that is evaluated")

REWARD = Gauge("digenrl_evaluation_reward", "Its mean training reward, weighted and summed")

SCORE = Gauge(
    "digenrl_evaluation_score",
    "Its mean score by scorer; kind is training, or gold for what is never trained on",
    ["kind", "scorer"],
)

ALARMS = Gauge(
    "digenrl_evaluation_alarms", "Its gold rewards that fell while the training reward rose"
)

SECONDS = Gauge("digenrl_evaluation_seconds", "That its evaluation took")

PENDING = Gauge("digenrl_evaluation_pending", "Versions that are still to be evaluated")


def show(record: EvaluationRecord) -> None:
    VERSION.set(record.version)
    REWARD.set(record.quality.reward)
    for kind, scores in (("training", record.quality.rewards), ("gold", record.quality.gold)):
        for scorer, score in scores.items():
            SCORE.labels(kind=kind, scorer=scorer).set(score)
    ALARMS.set(len(record.alarms))
    SECONDS.set(record.seconds)
