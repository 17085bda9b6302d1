"""Measures a run: steps and staleness for Prometheus, device use for the report."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from shared.messages.workers import GpuUse, Service, WorkerStatus
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
    gpu_use: Mapping[str, GpuUse] = field(default_factory=dict)
    """Use of GPUs by worker; workers on one GPU have the same."""


LABELLED_METRICS: Sequence[tuple[str, str, str, Callable[[RunFigures], Mapping[str, float]]]] = (
    ("phase", "1 for the run's phase", "phase",
     lambda run: {each: each == run.phase for each in get_args(Phase)}),
    ("workers", "Workers that report, by service", "service",
     lambda run: dict(run.workers.items())),
    ("missing_workers", "1 for a service that the run needs and that no worker provides", "service",
     lambda run: {each: each in run.missing for each in run.workers}),
    ("queue_samples", "Samples that wait, by queue", "queue",
     lambda run: {each.name: each.samples for each in run.queues}),
    ("queue_oldest_seconds", "Seconds for which the oldest waits", "queue",
     lambda run: {each.name: each.oldest_seconds or 0.0 for each in run.queues}),
    ("queue_late", "1 if it waits far longer than it should", "queue",
     lambda run: {each.name: each.is_late for each in run.queues}),
    ("gpu_memory_bytes", "Bytes in use on a worker's GPUs, also by other processes", "worker",
     lambda run: {worker: use.memory_bytes for worker, use in run.gpu_use.items()}),
    ("gpu_utilisation", "Share of the last second in which a kernel ran", "worker",
     lambda run: {worker: use.utilisation for worker, use in run.gpu_use.items()}),
    ("gpu_watts", "Power of a worker's GPUs", "worker",
     lambda run: {worker: use.watts for worker, use in run.gpu_use.items()}),
)  # fmt: skip
"""Metrics of the run: name, meaning, label, and values by label."""
PLAIN_METRICS: Sequence[tuple[str, str, Callable[[RunFigures], float | None]]] = (
    ("forecast_seconds", "Seconds of a batch by the schedule's model",
     lambda run: run.forecast.forecast_seconds),
    ("bound_seconds", "Seconds of a batch that no schedule beats",
     lambda run: run.forecast.bound_seconds),
    ("seconds_since_commit", "Seconds since the newest commit, or since this scheduler commands",
     lambda run: run.seconds_since_commit),
    ("seconds_per_step", "Median seconds between the newest commits",
     lambda run: run.seconds_per_step),
)  # fmt: skip
"""Metrics of the run without a label; a metric without a value is left out."""


class RunMetrics(Collector):
    """Exports metrics of the run on demand; nothing while another scheduler commands."""

    def __init__(self) -> None:
        self.look: Callable[[], RunFigures] | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if self.look is None:
            return
        figures = self.look()
        for name, meaning, label, values_of in LABELLED_METRICS:
            family = GaugeMetricFamily(f"digenrl_{name}", meaning, labels=[label])
            for each, value in values_of(figures).items():
                family.add_metric([each], value)
            yield family
        for name, meaning, value_of in PLAIN_METRICS:
            if (number := value_of(figures)) is not None:
                yield GaugeMetricFamily(f"digenrl_{name}", meaning, number)


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
