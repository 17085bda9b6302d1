"""Says how long a batch should take on the devices that there are, by what was learned of them.

forecast   what the schedule's own model says, with the waits that the schedule itself brings about
bound      all work is done, no device is idle and nothing else costs: no schedule is faster

A run that is slower than its forecast is held up by something that is no part of the schedule; one
whose forecast is far from its bound has a schedule, or a split of devices, that leaves some idle.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.fluid.members import MEMBER
from services.scheduler.core.sizing import situation
from services.scheduler.core.state import Plan, State, WorkerState
from services.scheduler.core.supply import fragment_size
from services.scheduler.core.tag.forecast import forecast
from services.scheduler.costs.floor import Rates, least_seconds


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds of a batch; None while the costs of generation or of training are not learned."""

    forecast_seconds: float | None = None
    bound_seconds: float | None = None


def outlook(plan: Plan, state: State) -> Outlook:
    """Return what a batch like the current one takes on the live devices."""
    if not _is_known(state):
        return Outlook()
    queues = sum(worker.concurrency for worker in _generating(plan, state))
    seen = situation(plan, state, fragment_size(plan, state, queues))
    bound = least_seconds(_rates(plan, state), plan.num_groups * plan.group_size, plan.num_groups)
    # One step ahead, the model has trainers help that cannot: no batch takes less than the bound.
    expected = max(bound, forecast(seen, plan.schedule).seconds)
    return Outlook(_finite(expected), _finite(bound))


def per_second(samples: int, seconds: float | None) -> float | None:
    """Return samples per second of a batch that takes so long; None if that is not known."""
    return samples / seconds if seconds else None


def _is_known(state: State) -> bool:
    costs, members = state.costs, state.members
    trains = bool(costs.gradient) if members else costs.train.value is not None
    generates = bool(costs.rollout) or costs.help.value is not None
    return generates and trains and bool(members or state.trainer)


def _generating(plan: Plan, state: State) -> list[WorkerState]:
    trainer = state.trainer
    return [*state.rollout, *([trainer] if trainer is not None else [])]


def _rates(plan: Plan, state: State) -> Iterator[Rates]:
    """Yield samples and groups per second of each device that can do either, lent or not."""
    only_train = [worker for worker in state.members if not worker.concurrency]
    for worker in [*state.rollout, *only_train]:
        trains = state.costs.gradient_seconds(worker.address) if worker.service == MEMBER else None
        yield worker.concurrency * _rate(sample_seconds(state, worker)), _rate(trains or 0.0)
    trainer = state.trainer
    if trainer is not None:
        samples = trainer.concurrency * _rate(sample_seconds(state, trainer))
        yield samples, _rate(state.costs.train.seconds)


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds else 0.0


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) and seconds > 0 else None
