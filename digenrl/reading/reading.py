"""Computes what a run does, did and needs, in one function of what is known of it.

Page, HTTP API, command line and display render a reading; none computes figures of its own.
"""

from collections.abc import Sequence
from statistics import fmean

from digenrl.reading.alarms import alarms, is_failing
from digenrl.reading.facts import USAGE_BATCHES, EvaluationView, RunFacts
from digenrl.reading.schedule import ScheduleSummary, summarise_schedule
from digenrl.reading.sentences import (
    active_settings,
    bottleneck,
    main_wait,
    slow_scorer,
    status,
    throughput,
)
from digenrl.reading.wording import (
    describe_shortage,
    describe_work,
    figure,
    gpu_words,
    time_left,
    worker_counts,
)
from services.scheduler.core.state import Phase
from services.scheduler.shell.api_load import LoadView, SlowestView
from services.scheduler.shell.api_models import RunView, View, WorkerView
from shared.run.usage import BatchUsage, DeviceUse

SLOW_WORKER_FACTOR = 2.0
"""Times the mean of equal devices from which a worker's host is worth a look."""
WARM_UP_STEPS = 2
"""Steps whose times include the warm-up of devices."""
GENERATION_WAITS = ("waiting_for_rollout", "tail")
"""Waits that a slow device can cause by generating."""


class SlowWorker(SlowestView):
    """The slowest worker per sample, compared with equal devices."""

    is_far_slower: bool
    """Whether it takes twice as long as equal devices, or longer."""


class DeviceTimes(View):
    """Use of a device in the newest batches."""

    shares: dict[DeviceUse, float]
    """Share of its time by use."""
    exchange_seconds: float
    """Mean seconds of a step in which it exchanges gradients; 0 if it exchanges none."""


class RunReading(View):
    """State, history and needs of a run."""

    run: str
    """Name of the run."""
    status: str
    """Present activity, in words."""
    phase: Phase
    """Phase that the scheduler reports, or in which a run that is over has ended."""
    step: int
    """Optimizer steps committed."""
    steps: int
    """Optimizer steps that the recipe asks for."""
    eta_seconds: float | None
    """Seconds until the last step, at the pace of the newest steps."""
    reward_mean: float | None
    """Mean reward of the newest committed batch."""
    seconds_per_step: float | None
    """Median over the newest batches."""
    utilisation: float | None
    """Share of their time that rollout and trainer devices worked, over the newest batches."""
    bottleneck: str
    """For what devices wait most, and which setting may change that; empty if it has failed."""
    throughput: str
    """Samples per second against what is possible, and where to look if they are few."""
    alarms: list[str]
    """A line for each condition that needs attention."""
    load: LoadView | None
    """Throughput against what is possible, and where samples wait, as the API shows it."""
    health: str
    """Live workers with a fault, and one that is far slower than equal ones; empty without
    workers."""
    workers: list[WorkerView]
    """Live workers, as the API shows them."""
    metrics: dict[str, float]
    """Metrics of the newest step (docs/metrics.md)."""
    slowest: SlowWorker | None
    """The worker that takes longest for a sample, if it is far slower than equal devices, or if
    devices wait for generation."""
    devices: dict[str, DeviceTimes]
    """Use of each device in the newest batches."""
    machines: dict[str, str]
    """Worker -> its device and host, in the newest batch; also after the end."""
    device_hours: float | None
    """Hours of all devices so far; a GPU is a device, and so is a host without one."""
    schedule: ScheduleSummary
    """How the devices were used in the newest batches, as summary.json has it of all."""
    evaluations: list[EvaluationView]
    """Evaluated versions, the oldest first."""

    @property
    def queues(self) -> str:
        """Return how many samples wait for what; empty if none waits."""
        queues = self.load.queues if self.load else []
        waiting = [f"{each.samples} {each.queue.replace('_', ' ')}" for each in queues]
        return f"waiting: {', '.join(waiting)}" if any(each.samples for each in queues) else ""

    def lines(self) -> list[str]:
        """Return the reading as a person reads it."""
        left = "" if self.eta_seconds is None else f", {time_left(self.eta_seconds)} left"
        reward = "" if self.reward_mean is None else f", reward {self.reward_mean:.3f}"
        workers = worker_counts(self.workers)
        return [
            f"{self.run}: {self.status}; step {self.step} of {self.steps}{reward}{left}",
            *(f"! {alarm}" for alarm in self.alarms),
            *([self.bottleneck] if self.bottleneck else []),
            *([self.throughput] if self.throughput else []),
            *([self.queues] if self.queues else []),
            *([f"workers: {workers}", self.health] if workers else []),
            *(f"{each.worker}: {gpu_words(each)}" for each in self.workers if each.gpu_use),
            *([f"{self.device_hours:.2f} device hours"] if self.device_hours else []),
            *(f"{each.worker} {each.declines}" for each in self.workers if each.declines),
        ]


def read(facts: RunFacts) -> RunReading:
    """Return the reading of a run."""
    run, load = facts.run, facts.load
    schedule = summarise_schedule(
        [step.staleness for step in facts.steps[-USAGE_BATCHES:]], facts.usage
    )
    waits = main_wait(schedule)
    slowest = None if load is None else slow_worker(load.slowest, facts.workers, waits)
    settings = active_settings(run, facts.recipe, facts.tag) if facts.is_live else None
    advises = settings is not None and run.step > WARM_UP_STEPS
    last = facts.usage[-1] if facts.usage else None
    return RunReading(
        run=run.run, status=status(run, is_live=facts.is_live), phase=run.phase,
        step=run.step, steps=run.steps, eta_seconds=run.eta_seconds, reward_mean=run.reward_mean,
        seconds_per_step=schedule.seconds_per_step, utilisation=schedule.utilisation,
        bottleneck=_bottleneck(facts, schedule, settings),
        throughput=throughput(load, waits, run.run, advises=advises), alarms=alarms(facts),
        load=load, health=health(run, facts.workers, slowest), workers=list(facts.workers),
        metrics=dict(facts.steps[-1].metrics) if facts.steps else {}, slowest=slowest,
        devices=device_times(facts.usage), machines={} if last is None else last.machines,
        device_hours=None if last is None else last.device_hours, schedule=schedule,
        evaluations=list(facts.evaluations),
    )  # fmt: skip


def _bottleneck(facts: RunFacts, schedule: ScheduleSummary, settings: set[str] | None) -> str:
    if facts.run.phase == "failed":  # its alarms name what helps
        return ""
    text = bottleneck(schedule, facts.run.run, settings, fails=is_failing(facts))
    return " ".join(filter(None, (text, slow_scorer(main_wait(schedule), facts.workers))))


def slow_worker(
    slowest: SlowestView | None, workers: Sequence[WorkerView], waits: str
) -> SlowWorker | None:
    """Return the slowest worker per sample, compared with the mean of equal devices; None if they
    are similar and devices do not wait for generation.

    Args:
        waits: for what devices wait most.
    """
    if slowest is None:
        return None
    devices = {each.worker: each.device for each in workers}
    device = devices.get(slowest.worker)
    equal = [
        each.seconds_per_sample for each in workers
        if each.device == device and each.seconds_per_sample is not None
    ]  # fmt: skip
    mean = fmean(equal) if len(equal) > 1 else slowest.mean_seconds_per_sample
    has_equals = device is None or len(equal) > 1
    is_far_slower = has_equals and slowest.seconds_per_sample >= SLOW_WORKER_FACTOR * mean
    if not is_far_slower and waits not in GENERATION_WAITS:
        return None
    return SlowWorker(
        worker=slowest.worker, seconds_per_sample=slowest.seconds_per_sample,
        mean_seconds_per_sample=mean, is_far_slower=is_far_slower,
    )  # fmt: skip


def health(run: RunView, workers: Sequence[WorkerView], slowest: SlowWorker | None) -> str:
    """Return one sentence: which workers have a fault, and which one is far slower than equal
    ones; empty without workers."""
    if not workers:
        return ""
    faults = [f"no worker of {each} reports" for each in run.missing_workers]
    faults += [
        f"{each.worker} is {describe_work(each)}" for each in workers
        if each.refused or each.drain != "no"
    ]  # fmt: skip
    faults += [f"{e.worker} ran out of memory: {describe_shortage(e)}" for e in workers
               if e.memory_shortage]  # fmt: skip
    number = "1 worker reports" if len(workers) == 1 else f"{len(workers)} workers report"
    state = f"{number}{', and ' if faults else ' without a fault'}{'; '.join(faults)}"
    if slowest is None or not slowest.is_far_slower:
        return f"{state}; none is far slower than equal ones."
    own, mean = slowest.seconds_per_sample, slowest.mean_seconds_per_sample
    return (
        f"{state}; {slowest.worker} is far slower than equal ones, with {figure(own)} s per sample "
        f"where the mean is {figure(mean)}: look at its host, or drain it."
    )


def device_times(usage: Sequence[BatchUsage]) -> dict[str, DeviceTimes]:
    """Return what each device did in these batches."""
    sums: dict[str, dict[DeviceUse, float]] = {}
    for batch in usage:
        for device, uses in batch.devices.items():
            seconds_by_use = sums.setdefault(device, {})
            for use, seconds in uses.items():
                seconds_by_use[use] = seconds_by_use.get(use, 0.0) + seconds
    return {
        device: DeviceTimes(
            shares={use: seconds / whole for use, seconds in uses.items()},
            exchange_seconds=uses.get("committing", 0.0) / len(usage),
        )
        for device, uses in sorted(sums.items()) if (whole := sum(uses.values())) > 0
    }  # fmt: skip
