"""Measures a run: steps and staleness for Prometheus, device use for the report."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.scheduler.core.state import Phase, TagRecord
from services.scheduler.core.throughput import BatchForecast
from services.scheduler.core.waiting import WaitingSamples
from shared.learning.metrics import SCORER_METRICS, STEP_METRICS, split_metric
from shared.messages.contracts import FragmentGenerated, Policy
from shared.messages.workers import Service, WorkerStatus
from shared.run.commits import CommitRecord
from shared.run.usage import BatchUsage, DeviceUse, TagUsage
from shared.telemetry import PUBLISH_LAG, STALENESS, STEP


class StepMetrics(Collector):
    """Exports the newest optimizer step.

    Only the scheduler does so, and only once a step is committed: no process reports zeros for a
    step that it knows nothing about.
    """

    def __init__(self) -> None:
        self._newest: Mapping[str, float] = {}

    def record(self, metrics: Mapping[str, float]) -> None:
        """Take over the metrics of the newest commit record."""
        self._newest = dict(metrics)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, metric in STEP_METRICS.items():
            if name in self._newest:
                yield GaugeMetricFamily(f"digenrl_{name}", metric.meaning, self._newest[name])
        by_scorer = [(*split_metric(name), value) for name, value in self._newest.items()]
        for name, metric in SCORER_METRICS.items():
            family = GaugeMetricFamily(f"digenrl_scorer_{name}", metric.meaning, labels=["scorer"])
            for measured, scorer, value in by_scorer:
                if measured == name and scorer:
                    family.add_metric([scorer], value)
            if family.samples:
                yield family


NEWEST_STEP = StepMetrics()
REGISTRY.register(NEWEST_STEP)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of the run for alarms, at one moment."""

    phase: str
    workers: Mapping[Service, int]
    """Number of workers that report, by service."""
    missing: Collection[Service]
    """Services that the run needs and that no worker provides."""
    seconds_per_step: float | None
    seconds_since_commit: float
    """Seconds since the newest commit, or since this process commands."""
    queues: Sequence[WaitingSamples] = ()
    """Where samples wait."""
    forecast: BatchForecast = field(default_factory=BatchForecast)


class RunMetrics(Collector):
    """Exports metrics of the run on demand; nothing while another scheduler commands."""

    def __init__(self) -> None:
        self.look: Callable[[], RunFigures] | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if self.look is None:
            return
        figures = self.look()
        phase = GaugeMetricFamily("digenrl_phase", "1 for the run's phase", labels=["phase"])
        for each in get_args(Phase):
            phase.add_metric([each], each == figures.phase)
        workers = GaugeMetricFamily(
            "digenrl_workers", "Workers that report, by service", labels=["service"]
        )
        missing = GaugeMetricFamily(
            "digenrl_missing_workers",
            "1 for a service that the run needs and that no worker provides",
            labels=["service"],
        )
        for service, number in figures.workers.items():
            workers.add_metric([service], number)
            missing.add_metric([service], service in figures.missing)
        yield from (phase, workers, missing, *_queue_families(figures.queues))
        for name, what, seconds in (
            (
                "forecast",
                "Seconds of a batch by the schedule's model",
                figures.forecast.forecast_seconds,
            ),
            ("bound", "Seconds of a batch that no schedule beats", figures.forecast.bound_seconds),
        ):
            if seconds is not None:
                yield GaugeMetricFamily(f"digenrl_{name}_seconds", what, seconds)
        yield GaugeMetricFamily(
            "digenrl_seconds_since_commit",
            "Seconds since the newest commit, or since this scheduler commands",
            figures.seconds_since_commit,
        )
        if figures.seconds_per_step is not None:
            yield GaugeMetricFamily(
                "digenrl_seconds_per_step",
                "Median seconds between the newest commits",
                figures.seconds_per_step,
            )


def _queue_families(queues: Iterable[WaitingSamples]) -> list[GaugeMetricFamily]:
    samples = GaugeMetricFamily(
        "digenrl_queue_samples", "Samples that wait, by queue", labels=["queue"]
    )
    oldest = GaugeMetricFamily(
        "digenrl_queue_oldest_seconds", "Seconds for which the oldest waits", labels=["queue"]
    )
    late = GaugeMetricFamily(
        "digenrl_queue_late", "1 if it waits far longer than it should", labels=["queue"]
    )
    for each in queues:
        samples.add_metric([each.name], each.samples)
        oldest.add_metric([each.name], each.oldest_seconds or 0.0)
        late.add_metric([each.name], each.is_late)
    return [samples, oldest, late]


RUN = RunMetrics()
REGISTRY.register(RUN)


def measure_commit(record: CommitRecord) -> None:
    STEP.set(record.policy.version)
    if record.batch is None:
        return
    NEWEST_STEP.record(record.metrics)
    for group in record.trained:
        staleness = record.batch - group.policy_version
        STALENESS.labels(steps=staleness).inc(len(group.rewards))


@dataclass(slots=True)
class PublishLag:
    """Measures the time from an optimizer step to the first fragment generated with its result,
    which fluid devices and those that fetch from them begin before the version is committed."""

    _published_at: float | None = None
    """When the step of the newest version began, until a worker has generated with it."""
    _early: tuple[Policy, float] | None = None
    """The newest version that is not committed yet, and when its first fragment was begun."""

    def publish(self, policy: Policy, at: float) -> None:
        """Note a commit, and when its optimizer step began, in monotonic seconds."""
        early, self._early = self._early, None
        if early is not None and early[0] == policy:
            PUBLISH_LAG.observe(max(0.0, early[1] - at))
            self._published_at = None
        else:
            self._published_at = at

    def observe(self, event: FragmentGenerated, newest: Policy | None, now: float) -> None:
        """Record a fragment, with the newest committed version."""
        begun, policy = now - event.seconds, event.policy
        if newest is None or policy.version > newest.version:
            if self._early is None or self._early[0] != policy:
                self._early = policy, begun
            return
        if self._published_at is not None and policy == newest:
            PUBLISH_LAG.observe(max(0.0, begun - self._published_at))
            self._published_at = None


def batch_usage(
    record: CommitRecord,
    seconds: float,
    devices: dict[str, dict[DeviceUse, float]],
    tag: TagRecord | None,
    forecast: BatchForecast,
    workers: Sequence[WorkerStatus],
    hours_before: float,
) -> BatchUsage:
    """Return the devices' use of time in the batch of a commit record, for the report.

    Args:
        hours_before: hours of all devices in the batches before.
    """
    assert record.batch is not None
    hosts = {each.host for each in workers}
    gpus = {(each.host, gpu) for each in workers for gpu in each.device.gpu.split(",") if gpu}
    num_devices = len(gpus) + len(hosts - {host for host, _ in gpus})
    return BatchUsage(
        batch=record.batch,
        seconds=round(seconds, 3),
        devices=devices,
        tag=None if tag is None else _tag_usage(tag, record),
        samples=sum(len(group.rewards) for group in record.trained),
        forecast_seconds=forecast.forecast_seconds,
        bound_seconds=forecast.bound_seconds,
        machines={
            each.worker: f"{each.device.kind} {each.device.gpu}".rstrip() + f" on {each.host}"
            for each in workers
        },
        device_hours=round(hours_before + num_devices * seconds / 3600, 6),
    )


def _tag_usage(entry: TagRecord, record: CommitRecord) -> TagUsage:
    members = {share.worker for share in record.shares}
    helped = sum(
        count
        for group in record.trained
        for (_, count, _), worker in zip(group.fragments, group.workers, strict=True)
        if worker in members
    )
    decision = entry.decision
    return TagUsage(
        groups=decision.groups,
        samples_helped=helped,
        reason=decision.reason,
        predicted_gain=entry.predicted_gain,
        measured_gain=entry.measured_gain,
    )
