"""How far the evaluation of a run is: for the HTTP API and for Prometheus."""

from fastapi import APIRouter
from prometheus_client import Gauge
from pydantic import BaseModel, ConfigDict

from digenrl.evaluation.records import EvaluationRecord


class Progress(BaseModel):
    """Describes how far the evaluation of a run is."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={"examples": [{"evaluated": [0, 10], "pending": [20], "alarms": []}]},
    )

    evaluated: list[int] = []
    """Policy versions that have a record."""
    pending: list[int] | None = None
    """Versions that are due and have no record, committed or not; null before the first look."""
    alarms: list[str] = []
    """Alarms for the versions that this process has evaluated, oldest first."""


def routes(progress: Progress) -> APIRouter:
    router = APIRouter(tags=["evaluation"])

    @router.get("/v1/evaluation", operation_id="get_evaluation")
    def evaluation() -> Progress:
        """Return the evaluated versions, the pending ones, and the alarms."""
        return progress

    return router


VERSION = Gauge("digenrl_evaluation_version", "Newest evaluated policy version")

REWARD = Gauge("digenrl_evaluation_reward", "Mean training reward of that version")

SCORE = Gauge(
    "digenrl_evaluation_score",
    "Mean score of that version by scorer; kind is training, or gold if never trained on",
    ["kind", "scorer"],
)

ALARMS = Gauge(
    "digenrl_evaluation_alarms", "Number of gold rewards that fell while the training reward rose"
)

SECONDS = Gauge("digenrl_evaluation_seconds", "Seconds that its evaluation took")

PENDING = Gauge("digenrl_evaluation_pending", "Versions that are due and not evaluated")


def show(record: EvaluationRecord) -> None:
    VERSION.set(record.version)
    REWARD.set(record.quality.reward)
    for kind, scores in (("training", record.quality.rewards), ("gold", record.quality.gold)):
        for scorer, score in scores.items():
            SCORE.labels(kind=kind, scorer=scorer).set(score)
    ALARMS.set(len(record.alarms))
    SECONDS.set(record.seconds)
