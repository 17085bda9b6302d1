"""The newest optimizer step in Prometheus' words: by the scheduler alone, and not before one is
committed, so that no process reports zeros of a step that it knows nothing of."""

from collections.abc import Iterator, Mapping

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shared.learning.metrics import SCORER_METRICS, STEP_METRICS, scorer_of


class StepMetrics(Collector):
    def __init__(self) -> None:
        self._newest: Mapping[str, float] = {}

    def record(self, metrics: Mapping[str, float]) -> None:
        """Of the newest commit record."""
        self._newest = dict(metrics)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, metric in STEP_METRICS.items():
            if name in self._newest:
                yield GaugeMetricFamily(f"digenrl_{name}", metric.meaning, self._newest[name])
        by_scorer = [(*scorer_of(name), value) for name, value in self._newest.items()]
        for name, metric in SCORER_METRICS.items():
            family = GaugeMetricFamily(f"digenrl_scorer_{name}", metric.meaning, labels=["scorer"])
            for measured, scorer, value in by_scorer:
                if measured == name and scorer:
                    family.add_metric([scorer], value)
            if family.samples:
                yield family


NEWEST_STEP = StepMetrics()
REGISTRY.register(NEWEST_STEP)
