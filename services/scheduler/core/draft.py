"""Collects the changes of many issued fragments before they become one new state.

Opening a batch issues two fragments to every device. A new state for each fragment would copy all
groups and workers each time. The draft is private to the code that issues fragments.
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
    """State before the first fragment; its costs, policy and decisions do not change."""
    now: float
    samples_left: int = field(init=False)
    """Number of samples that lent members may still generate."""
    _workers: dict[str, WorkerState] = field(default_factory=dict)
    _groups: dict[int, dict[int, GroupState]] = field(default_factory=dict)
    """Changed groups, by batch and index of the group."""
    _new_batches: dict[int, BatchState] = field(default_factory=dict)
    """New batches, by number."""
    _origins: dict[tuple[int, int], tuple[Prompt, int]] = field(default_factory=dict)
    """Results of `prompt_and_start` by batch and group."""

    def __post_init__(self) -> None:
        self.samples_left = self.state.tag.samples_left

    def worker(self, address: str) -> WorkerState:
        return self._workers.get(address) or self.state.workers[address]

    def set_worker(self, worker: WorkerState) -> None:
        self._workers[worker.address] = worker

    def open_batch(self, index: int) -> BatchState:
        """Return a batch without the changes of this draft; create the batch if it is new."""
        batch = self.state.find_batch(index) or self._new_batches.get(index)
        if batch is None:
            batch = self._new_batches[index] = new_batch(self.plan, index, self.now)
        return batch

    def group(self, batch: BatchState, index: int) -> GroupState:
        """Return a group with the changes of this draft; ``batch`` is a result of `open_batch`."""
        changed = self._groups.get(batch.index)
        return (changed and changed.get(index)) or batch.groups[index]

    def set_group(self, batch: int, index: int, group: GroupState) -> None:
        self._groups.setdefault(batch, {})[index] = group

    def prompt_and_start(self, batch: int, group: int) -> tuple[Prompt, int]:
        """Return a group's prompt and the first step of its window, from a cache."""
        cached = self._origins.get((batch, group))
        if cached is None:
            plan = self.plan
            cached = self._origins[batch, group] = (
                plan.prompts.of_group(batch, group, plan.num_groups),
                plan.windows.start(plan.seed, batch, group),
            )
        return cached

    def to_state(self, first: dict[int, int]) -> State:
        """Return the state with all changes.

        Args:
            first: for each batch, the first group that may have unissued fragments.
        """
        state = self.state
        batches = (*state.batches, *self._new_batches.values())
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
