"""Forecasts how long a batch should take on the present devices, from learned costs.

forecast   the schedule's own model, with the waits that the schedule causes
bound      all work is done, no device is idle and overheads are 0: no schedule is faster

A run slower than its forecast is delayed by something outside of the schedule. A forecast far from
its bound means that the schedule, or the split of devices, leaves some devices idle.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.fluid.members import MEMBER
from services.scheduler.core.sizing import situation
from services.scheduler.core.state import Plan, State, WorkerState
from services.scheduler.core.tag.forecast import forecast
from services.scheduler.core.unissued import fragment_size
from services.scheduler.costs.floor import Rates, least_seconds


@dataclass(frozen=True, slots=True)
class BatchForecast:
    """Seconds of a batch; None while the costs of generation or of training are not learned."""

    forecast_seconds: float | None = None
    bound_seconds: float | None = None


def forecast_batch(plan: Plan, state: State) -> BatchForecast:
    """Return what a batch like the current one takes on the live devices."""
    if not _is_known(state):
        return BatchForecast()
    queues = sum(_at_once(worker) for worker in _all_devices(state))
    inputs = situation(plan, state, fragment_size(plan, state, queues))
    bound = least_seconds(_rates(state), plan.num_groups * plan.group_size, plan.num_groups)
    # One step ahead, the model has members help that cannot: no batch takes less than the bound.
    expected = max(bound, forecast(inputs, plan.schedule).seconds)
    return BatchForecast(_finite(expected), _finite(bound))


def _is_known(state: State) -> bool:
    return bool(state.costs.rollout and state.costs.gradient and state.members)


def _rates(state: State) -> Iterator[Rates]:
    """Yield samples and groups per second of each device that can do either, lent or not."""
    for worker in _all_devices(state):
        trains = state.costs.gradient_seconds(worker.address) if worker.service == MEMBER else None
        yield _at_once(worker) * _rate(sample_seconds(state, worker)), _rate(trains or 0.0)


def _all_devices(state: State) -> list[WorkerState]:
    return [*state.only_generate, *state.members]


def _at_once(worker: WorkerState) -> int:
    """Return how many fragments a device generates at a time, lent or not."""
    return max(worker.concurrency, worker.lent_concurrency)


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds else 0.0


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) and seconds > 0 else None
