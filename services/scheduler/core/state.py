"""Holds what the scheduler knows: immutable, and rebuilt from commit records and streams."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from services.scheduler.core.fluid.fluid_state import FluidState
from services.scheduler.core.tag.controller import Controller, TagDecision
from services.scheduler.core.tag.estimates import Costs, PassCosts
from services.scheduler.core.tag.makespan import TagInputs
from services.scheduler.core.tally import Stage as Stage
from services.scheduler.core.tally import Tally, count_groups
from services.scheduler.core.workers import AssignedFragment as AssignedFragment
from services.scheduler.core.workers import Exclusion as Exclusion
from services.scheduler.core.workers import Workers
from services.scheduler.core.workers import WorkerState as WorkerState
from shared.learning.advantages import Advantages
from shared.learning.prompts import PromptOrder
from shared.learning.windows import Windows
from shared.limits import MAX_PIECES
from shared.messages.contracts import FragmentScored, FragmentSlot, Policy
from shared.messages.records import ExchangeLevels
from shared.recipe.schedule import RunSchedule

Phase = Literal["waiting", "running", "paused", "stopped", "finished", "failed"]
"""waiting: for version 0. finished: every batch is committed. failed: see `State.failure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Describes the run; constant over its life."""

    prompts: PromptOrder
    num_batches: int
    num_groups: int
    group_size: int
    windows: Windows
    """Where the trained steps of a group begin."""
    seed: int
    advantages: Advantages = field(default_factory=Advantages)
    schedule: RunSchedule = field(default_factory=RunSchedule)
    shared_share: float = 0.0
    """Share of the denoising steps that a fragment computes once for all its samples."""
    trained_steps: int = 1
    merged_steps: int = 0
    """Trained steps that a group computes once for all its samples."""
    updates: int = 1
    """Optimizer steps of a batch, each of as many groups, in their order (`trainer.updates`)."""
    trained_samples: int = 0
    """Samples of a group that are trained; 0: all."""
    most_pieces: int = MAX_PIECES
    """Pieces into which fluid devices divide the training of a batch, at most: as many as one
    message can name."""
    needs_encoder: bool = False
    """Whether devices that generate leave the encoding of prompts to encoders."""
    max_attempts: int = 3
    """A fragment that failed this often fails the run."""
    max_losses: int = 5
    """A fragment at which this many workers were lost fails the run: it may be what kills them."""
    max_returns: int = 16
    """A device that returns this many fragments of the newest version in a row, per queue, is
    excluded until there is another version."""
    queue_depth: int = 2
    """Fragments per queue of a device: one in work and one waiting, so that it never waits for a
    message."""
    loan_seconds: float = 20.0
    """After this long without a renewed loan, a borrowed device returns by itself."""

    @property
    def early_groups(self) -> int:
        """Groups of the next batch that may be begun with the version that still generates."""
        return self.num_groups if self.schedule.staleness_limit else 0

    def part(self, update: int) -> range:
        """Return the groups of one of a batch's updates."""
        size = self.num_groups // self.updates
        return range(update * size, (update + 1) * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentState:
    first_sample: int
    num_samples: int
    attempt: int
    stage: Stage = "pending"
    worker: str | None = None
    """Address of the device that has it, while it is issued."""
    given: tuple[tuple[int, str], ...] = ()
    """Attempts, each with the address of a device that was given it, whether or not it is lost."""
    is_shared: bool = False
    """Whether another device may have it as well, which was late with it."""
    slot_taken: bool = False
    """Whether a device believed lost has returned it: its task slot cannot be used again."""
    num_failures: int = 0
    num_losses: int = 0
    generated_at: float = 0.0
    scored: FragmentScored | None = None

    def slot_in(self, batch: int, group: int) -> FragmentSlot:
        return FragmentSlot(
            batch=batch, group=group, first_sample=self.first_sample, attempt=self.attempt
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A group; its samples are cut into fragments in order, as devices have room for work."""

    policy: Policy | None = None
    """Version that generates the group; None before its first fragment is issued."""
    fragments: tuple[FragmentState, ...] = ()
    num_cut: int = 0
    """Samples that belong to a fragment."""
    num_scored: int = 0
    first_attempt: int = 0
    """Attempt of new fragments; larger than the attempt of any discarded fragment."""
    attempt: int = 0
    """How often the group was sent to training without a result."""
    sent: bool = False
    """Whether it was sent to be trained in this attempt."""

    def with_fragment(self, new: FragmentState) -> "GroupState":
        """Add a fragment, or replace the one that begins at the same sample."""
        others = [old for old in self.fragments if old.first_sample != new.first_sample]
        fragments = tuple(sorted([*others, new], key=lambda fragment: fragment.first_sample))
        return replace(
            self,
            fragments=fragments,
            num_cut=sum(f.num_samples for f in fragments),
            num_scored=sum(f.num_samples for f in fragments if f.stage == "scored"),
        )

    @property
    def num_pending(self) -> int:
        """Samples in fragments that wait for a device."""
        return sum(f.num_samples for f in self.fragments if f.stage == "pending")


EMPTY_GROUP = GroupState()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    index: int
    groups: tuple[GroupState, ...]
    opened_at: float = 0.0
    _known: tuple[tuple[GroupState, ...], Tally] | None = field(
        default=None, compare=False, repr=False
    )
    """Groups, and their tally: it holds for no others."""

    @property
    def tally(self) -> Tally:
        """Counts over all groups, made once and kept along by `with_groups`."""
        cached = self._known
        if cached is None or cached[0] is not self.groups:
            cached = self.groups, count_groups(self.groups, EMPTY_GROUP)
            object.__setattr__(self, "_known", cached)
        return cached[1]

    def with_groups(self, changed: Mapping[int, GroupState], first: int = 0) -> "BatchState":
        """The batch with these groups; ``first``: no group before it has anything to issue."""
        tally, groups = self.tally, list(self.groups)
        for index, group in changed.items():
            tally = tally.changed(index, groups[index], group)
            groups[index] = group
        all_groups = tuple(groups)
        return replace(self, groups=all_groups, _known=(all_groups, tally.from_group(first)))

    def count(self, stage: Stage) -> int:
        """Number of fragments at this stage."""
        return self.tally.stages.get(stage, 0)

    def num_uncut(self, group_size: int) -> int:
        return len(self.groups) * group_size - self.tally.cut


def new_batch(plan: Plan, index: int, now: float) -> BatchState:
    return BatchState(index=index, groups=(EMPTY_GROUP,) * plan.num_groups, opened_at=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagState:
    """Decisions of trainer-assisted generation (TAG)."""

    controller: Controller = field(default_factory=Controller)
    samples_left: int = 0
    """Samples that members may still take in the current batch."""
    history: tuple["TagRecord", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRecord:
    """Records what was decided for a batch, and the outcome."""

    batch: int
    decision: TagDecision
    tag_inputs: TagInputs
    """Costs on which the decision was based."""
    opened_at: float
    seconds: float | None = None
    """Seconds from the batch's opening to the next version; None while it is in flight."""

    @property
    def predicted_gain(self) -> float | None:
        """Predicted gain; None while costs are unknown."""
        return self.decision.predicted_gain if self.tag_inputs.train else None

    @property
    def measured_gain(self) -> float | None:
        """Gain over the time predicted without help."""
        off = self.decision.predicted_seconds_off
        if not self.seconds or off is None or not self.tag_inputs.train:
            return None
        return off / self.seconds - 1


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size of fragments that was chosen for a batch, while there is plenty."""

    batch: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    phase: Phase = "waiting"
    recovering: bool = False
    """Whether stored messages are still being read; no commands are issued meanwhile."""
    policy: Policy | None = None
    """The newest committed version."""
    batches: tuple[BatchState, ...] = ()
    """The current batch, then the next one if it was begun early."""
    workers: Workers = field(default_factory=Workers)
    """Live workers by address."""
    costs: Costs = field(default_factory=Costs)
    tag: TagState = field(default_factory=TagState)
    sizing: Sizing | None = None
    """Size of the fragments of the newest batch; None while costs are unknown."""
    trained_at: float = 0.0
    """When the last group of the current batch was trained."""
    ticked_at: float = 0.0
    """When the last tick came."""
    recovered_at: float = -math.inf
    """When all stored messages had been read; the workers of before report after that."""
    pause: int = 0
    """Events that pass before devices are looked at again for the end of a batch; see `assign`."""
    pause_at_failure: bool = False
    """Whether operators want the run paused as soon as an attempt fails."""
    watched: frozenset[tuple[int, int]] = frozenset()
    """Batch and group of what operators had generated again while the run was paused: if it fails
    again, the run is paused again."""
    failure: str | None = None
    goal_reached_by: int | None = None
    """Version by which evaluations have reached the run's goal: it ends with the next version."""
    fluid: FluidState | None = None
    """State of the members' training; None without members."""
    levels: ExchangeLevels = field(default_factory=ExchangeLevels)
    """How the newest step was rounded."""
    draining: frozenset[str] = frozenset()
    """Names of workers that an operator has asked to drain; they may be started again."""

    @property
    def batch(self) -> BatchState | None:
        """The current batch: the one that the newest version trains."""
        return self.batches[0] if self.batches else None

    def policy_of(self, batch: int) -> Policy | None:
        """The version that generates a batch: the newest, or for the one after it a version that
        fluid devices have made and not committed yet, if there is one."""
        fluid = self.fluid
        if fluid is not None and batch == fluid.batch + 1:
            return fluid.provisional or self.policy
        return self.policy

    @property
    def rollout(self) -> list[WorkerState]:
        """Workers that generate, members among them, and are not excluded from work."""
        workers = self.workers
        return [workers[address] for address in workers.roles.places]

    @property
    def only_generate(self) -> list[WorkerState]:
        """Devices that generate and train nothing."""
        roles = self.workers.roles
        found = [self.workers[address] for address in roles.places]
        return [each for each in found if each.address in roles.rollout or each.no_pieces]

    @property
    def members(self) -> list[WorkerState]:
        """Members that are not excluded from work, and train."""
        roles = self.workers.roles
        addresses = (*roles.places, *roles.only_train)
        found = [self.workers[a] for a in addresses if a not in roles.rollout]
        return [each for each in found if not each.no_pieces]

    def find_batch(self, index: int) -> BatchState | None:
        return next((batch for batch in self.batches if batch.index == index), None)

    def find_group(self, batch: int, index: int) -> GroupState | None:
        found_batch = self.find_batch(batch)
        return (
            found_batch.groups[index]
            if found_batch is not None and index < len(found_batch.groups)
            else None
        )

    def find_fragment(self, slot: FragmentSlot) -> FragmentState | None:
        """The fragment, if its batch is open and this is its current attempt."""
        group = self.find_group(slot.batch, slot.group)
        if group is None:
            return None
        for fragment in group.fragments:
            if (fragment.first_sample, fragment.attempt) == (slot.first_sample, slot.attempt):
                return fragment
        return None

    def with_batch(self, batch: BatchState) -> "State":
        batches = tuple(batch if old.index == batch.index else old for old in self.batches)
        return replace(self, batches=batches)

    def with_group(self, batch: int, index: int, group: GroupState) -> "State":
        old = self.find_batch(batch)
        assert old is not None
        return self.with_batch(old.with_groups({index: group}))

    def change_group(
        self, batch: int, index: int, change: Callable[[GroupState], GroupState]
    ) -> "State":
        group = self.find_group(batch, index)
        assert group is not None
        return self.with_group(batch, index, change(group))

    def with_fragment(self, slot: FragmentSlot, new: FragmentState) -> "State":
        """Replace the fragment that begins at the same sample; none if the group was discarded."""

        def replaced(group: GroupState) -> GroupState:
            is_known = any(old.first_sample == new.first_sample for old in group.fragments)
            return group.with_fragment(new) if is_known else group

        return self.change_group(slot.batch, slot.group, replaced)

    def with_worker(self, worker: WorkerState) -> "State":
        return replace(self, workers=self.workers.changed((worker,)))


def first_state(plan: Plan) -> State:
    """Return the state before anything is read: how much members are to help."""
    groups = plan.schedule.fixed_tag
    if groups is None:
        controller = Controller(mode="auto")
    else:
        controller = Controller(mode="fixed" if groups else "off", groups=groups)
    costs = Costs(
        shared_share=plan.shared_share, group_size=plan.group_size,
        passes=PassCosts(usual_rows=plan.group_size),
    )  # fmt: skip
    return State(recovering=True, costs=costs, tag=TagState(controller=controller))
