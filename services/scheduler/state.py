"""What the scheduler knows: immutable, and rebuilt from commit records and streams at any time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shared.contracts import FragmentScored, Policy
from shared.prompts import PromptOrder

Phase = Literal["waiting", "running", "paused", "stopped", "finished", "failed"]
"""waiting: for version 0. finished: every batch is committed. failed: see `State.failure`."""

Stage = Literal["pending", "issued", "generated", "scored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the run consists of; constant over its life."""

    prompts: PromptOrder
    num_batches: int
    num_groups: int
    group_size: int
    fragment_size: int
    window_starts: tuple[int, int]
    """Inclusive range of the first trained step."""
    seed: int
    max_attempts: int = 3
    """A fragment that failed this often fails the run."""
    fragments_per_worker: int = 3
    """How many fragments are out per rollout worker: one in hand, the others next in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentState:
    first_sample: int
    num_samples: int
    stage: Stage = "pending"
    attempt: int = 0
    scored: FragmentScored | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    fragments: tuple[FragmentState, ...]
    attempt: int = 0
    """How often it went back to rollout after the trainer had refused a part of it."""
    sent: bool = False
    """To the trainer, in this attempt."""

    @property
    def whole(self) -> bool:
        return all(fragment.stage == "scored" for fragment in self.fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The batch in flight."""

    index: int
    policy: Policy
    """The version that generates it: strictly on-policy, version ``index``."""
    groups: tuple[GroupState, ...]

    def count(self, stage: Stage) -> int:
        return sum(f.stage == stage for group in self.groups for f in group.fragments)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    phase: Phase = "waiting"
    batch: BatchState | None = None
    policy: Policy | None = None
    """The newest committed version."""
    workers: Mapping[str, str] = field(default_factory=dict)
    """Live workers: name -> service."""
    failure: str | None = None

    @property
    def num_rollout_workers(self) -> int:
        return sum(service == "rollout" for service in self.workers.values())
