"""Makes the answer about a run's throughput and queues from the scheduler's state."""

import time
from collections.abc import Mapping
from statistics import fmean

from services.scheduler.core.state import Plan, State
from services.scheduler.core.throughput import BatchForecast, forecast_batch
from services.scheduler.core.waiting import WaitingSamples, queues
from services.scheduler.shell.api_load import LoadView, QueueView, SlowestView
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.views import median_step_seconds
from shared.run.usage import per_second


class BatchForecasts:
    """Caches the forecast of the current batch: one forecast per batch and set of devices is
    enough."""

    def __init__(self) -> None:
        self._newest: tuple[tuple[int, int, bool], BatchForecast] | None = None

    def forecast(self, plan: Plan, state: State) -> BatchForecast:
        batch = -1 if state.batch is None else state.batch.index
        key = batch, len(state.workers), bool(state.costs.gradient)
        newest = self._newest
        if newest is None or newest[0] != key or newest[1].forecast_seconds is None:
            self._newest = newest = key, forecast_batch(plan, state)
        return newest[1]


def load_view(scheduler: Scheduler, forecasts: BatchForecasts) -> LoadView:
    plan, state = scheduler.plan, scheduler.state  # immutable: all figures belong to one moment
    forecast, samples = forecasts.forecast(plan, state), plan.num_groups * plan.group_size
    names = {worker.address: worker.name for worker in state.rollout}
    seconds = {
        names[address]: estimate.value
        for address, estimate in state.costs.rollout.items()
        if address in names and estimate.value
    }
    return LoadView(
        samples_per_second=per_second(samples, median_step_seconds(scheduler)),
        forecast_samples_per_second=per_second(samples, forecast.forecast_seconds),
        bound_samples_per_second=per_second(samples, forecast.bound_seconds),
        queues=[
            _queue_view(each, is_running=state.phase == "running")
            for each in queues(plan, state, time.monotonic(), forecast)
        ],
        slowest=slowest(seconds),
    )


def _queue_view(queue: WaitingSamples, *, is_running: bool) -> QueueView:
    oldest, usual = queue.oldest_seconds, queue.usual_seconds
    return QueueView(
        queue=queue.name,
        samples=queue.samples,
        oldest_seconds=None if oldest is None else round(oldest, 3),
        usual_seconds=None if usual is None else round(usual, 3),
        late=is_running and queue.is_late,
        worker=queue.worker or None,
    )


def slowest(seconds: Mapping[str, float]) -> SlowestView | None:
    """Return the worker that takes longest for a sample; None where fewer than two generate.

    Args:
        seconds: measured seconds per sample, by worker.
    """
    if len(seconds) < 2:
        return None
    name = max(seconds, key=lambda worker: seconds[worker])
    return SlowestView(
        worker=name, seconds_per_sample=seconds[name],
        mean_seconds_per_sample=fmean(seconds.values()),
    )  # fmt: skip
