"""A mutable copy of the state in which fragments are being issued; no other code sees the copy.

Opening a batch issues two fragments to every device. Each as a state of its own would be as many
copies of all groups and workers; here the changes are collected, and one state is made of them.
"""

from dataclasses import dataclass, field, replace

from services.scheduler.core.state import (
    BatchState,
    GroupState,
    Plan,
    State,
    WorkerState,
    new_batch,
)
from shared.messages.contracts import Prompt


@dataclass(slots=True)
class StateDraft:
    plan: Plan
    state: State
    """State before anything was issued; its costs, policy and decisions do not change."""
    now: float
    samples_left: int = field(init=False)
    """Samples that lent members may still take."""
    _workers: dict[str, WorkerState] = field(default_factory=dict)
    _groups: dict[int, dict[int, GroupState]] = field(default_factory=dict)
    """Changed groups by batch and index."""
    _begun: dict[int, BatchState] = field(default_factory=dict)
    """Batches that were begun here."""
    _origins: dict[tuple[int, int], tuple[Prompt, int]] = field(default_factory=dict)
    """Results of `origin` by batch and group."""

    def __post_init__(self) -> None:
        self.samples_left = self.state.tag.samples_left

    def worker(self, address: str) -> WorkerState:
        return self._workers.get(address) or self.state.workers[address]

    def set_worker(self, worker: WorkerState) -> None:
        self._workers[worker.address] = worker

    def begin(self, index: int) -> BatchState:
        """The batch as it was before; one that is begun early is new."""
        batch = self.state.find_batch(index) or self._begun.get(index)
        if batch is None:
            batch = self._begun[index] = new_batch(self.plan, index, self.now)
        return batch

    def group(self, batch: BatchState, index: int) -> GroupState:
        """A group of ``batch``, which is as it was before, as it is now."""
        changed = self._groups.get(batch.index)
        return (changed and changed.get(index)) or batch.groups[index]

    def set_group(self, batch: int, index: int, group: GroupState) -> None:
        self._groups.setdefault(batch, {})[index] = group

    def origin(self, batch: int, group: int) -> tuple[Prompt, int]:
        """Return a group's prompt and the first step of its window, which are found once for all of
        its fragments."""
        cached = self._origins.get((batch, group))
        if cached is None:
            plan = self.plan
            cached = self._origins[batch, group] = (
                plan.prompts.of_group(batch, group, plan.num_groups),
                plan.windows.start(plan.seed, batch, group),
            )
        return cached

    def done(self, first: dict[int, int]) -> State:
        """The state with all changes.

        Args:
            first: for a batch, a group before which none has anything to issue.
        """
        state = self.state
        batches = (*state.batches, *self._begun.values())
        batches = tuple(
            batch.with_groups(self._groups.get(batch.index, {}), first.get(batch.index, 0))
            if batch.index in self._groups or batch.index in first
            else batch
            for batch in batches
        )
        tag = state.tag
        if self.samples_left != tag.samples_left:
            tag = replace(tag, samples_left=self.samples_left)
        workers = state.workers
        if self._workers:
            workers = workers.changed(self._workers.values())
        return replace(state, batches=batches, workers=workers, tag=tag)
