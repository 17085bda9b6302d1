"""Derives from the state what each device does and, if it waits, for whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.core.state import Plan, State, WorkerState
from shared.limits import MAX_CHANGES
from shared.run.usage import Change, DeviceUse, Timeline


def uses(plan: Plan, state: State) -> dict[str, DeviceUse]:
    """Use of every live worker, by name."""
    waits_for = _waits_for(plan, state)  # the same for all, so fragments are counted once
    is_scoring = any(batch.count("generated") for batch in state.batches)
    scores: DeviceUse = "scoring" if is_scoring else waits_for
    uses_by_device: dict[str, DeviceUse] = {}
    for worker in state.workers.values():
        match worker.service:
            case "reward":
                uses_by_device[worker.name] = scores
            case "member":
                uses_by_device[worker.name] = _member_use(state, worker) or waits_for
            case _:
                uses_by_device[worker.name] = "generating" if worker.assigned else waits_for
    return uses_by_device


def _member_use(state: State, worker: WorkerState) -> DeviceUse | None:
    """Return the use of a member; None if it waits."""
    fluid = state.fluid
    if worker.assigned and worker.concurrency:
        return "generating"
    if fluid is None:
        return None
    if fluid.queues.get(worker.address):
        return "training"
    is_exchanging = fluid.exchange is not None and fluid.provisional is None
    return "committing" if is_exchanging else None


def _waits_for(plan: Plan, state: State) -> DeviceUse:
    batch = state.batch
    if state.phase == "paused":
        return "paused"
    if batch is None:
        return "waiting_for_trainer"
    if batch.count("issued") or batch.count("pending") or batch.num_uncut(plan.group_size):
        return "tail"
    return "waiting_for_reward" if batch.count("generated") else "waiting_for_trainer"


@dataclass(slots=True)
class UsageMeter:
    """Adds up seconds per device and use between two commits, and notes when a use changed."""

    devices: dict[str, dict[DeviceUse, float]] = field(default_factory=dict)
    changes: dict[str, list[Change]] = field(default_factory=dict)
    since: float | None = None
    began: float = 0.0
    """When the batch was opened."""

    def advance(self, now: float, current: Mapping[str, DeviceUse]) -> None:
        """Add the time since the previous call, for which ``current`` has held."""
        if self.since is None:
            self.began = now
        else:
            for name, use in current.items():
                seconds_by_use = self.devices.setdefault(name, {})
                seconds_by_use[use] = seconds_by_use.get(use, 0.0) + now - self.since
                self._note(name, use)
            if len(self.changes) > len(current):
                for name in self.changes.keys() - current.keys():
                    self._note(name, None)
        self.since = now

    def _note(self, name: str, use: DeviceUse | None) -> None:
        """Note what a device has done since the previous call, if it did something else before."""
        changes = self.changes.setdefault(name, [])
        if (not changes or changes[-1][1] != use) and len(changes) < MAX_CHANGES:
            changes.append((round((self.since or 0.0) - self.began, 3), use))

    def move(self, name: str, seconds: float, source: DeviceUse, target: DeviceUse) -> None:
        """Count some time of ``source`` as ``target``, as the device itself reports."""
        seconds_by_use = self.devices.setdefault(name, {})
        moved = min(seconds, seconds_by_use.get(source, 0.0))
        seconds_by_use[source] = seconds_by_use.get(source, 0.0) - moved
        seconds_by_use[target] = seconds_by_use.get(target, 0.0) + moved

    def timeline(self, batch: int) -> Timeline:
        """Return what was noted since the batch was opened."""
        seconds = 0.0 if self.since is None else round(self.since - self.began, 3)
        devices = {name: tuple(changes) for name, changes in sorted(self.changes.items())}
        return Timeline(batch=batch, seconds=seconds, devices=devices)

    def take(self) -> dict[str, dict[DeviceUse, float]]:
        """Return what was added up, and start again from zero."""
        devices, self.devices = self.devices, {}
        self.changes, self.began = {}, self.since or 0.0
        return {
            name: {
                use: round(seconds, 3)
                for use, seconds in seconds_by_use.items()
                if seconds >= 0.0005
            }
            for name, seconds_by_use in devices.items()
        }
