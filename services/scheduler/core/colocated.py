"""Colocated execution: every device generates its share of the groups, then trains it.

What systems do that do not disaggregate, as one more schedule of the same core: the baseline, and
a way to use a single GPU. Shares are equal and fixed, as those of data-parallel ranks are.
"""

from services.scheduler.core.state import State, WorkerState


def devices_of(state: State) -> list[WorkerState]:
    """That generate and train, in a fixed order."""
    able = [w for w in state.workers.values() if w.slots and _trains(w) and w.not_asked is None]
    return sorted(able, key=lambda worker: worker.address)


def owner_of(state: State, group: int) -> WorkerState | None:
    """The device that has this group of any batch; None without devices."""
    devices = devices_of(state)
    return devices[group % len(devices)] if devices else None


def _trains(worker: WorkerState) -> bool:
    return worker.service == "trainer" or (worker.service == "rollout" and worker.can_train)
