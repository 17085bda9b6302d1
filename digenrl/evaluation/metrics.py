"""What an evaluator tells Prometheus: the figures of the newest version that it knows."""

from prometheus_client import Gauge

from digenrl.evaluation.records import EvaluationRecord

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
