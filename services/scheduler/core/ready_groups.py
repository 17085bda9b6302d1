"""Finds the groups that are whole and may be trained."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.core.fluid import modes
from services.scheduler.core.fragments import is_dropped
from services.scheduler.core.retries import lacks_scores
from services.scheduler.core.state import BatchState, GroupState, Plan, State
from shared.messages.contracts import TrainGroup


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A whole group that no device trains yet."""

    batch: BatchState
    index: int
    group: GroupState


def ready_groups(plan: Plan, state: State) -> Iterator[ReadyGroup]:
    """Complete groups that have not been sent to training.

    Dropped groups wait for all other groups of their update, except in deterministic mode: they
    take no time to train, and operators may fix the cause of their failure and have them generated
    again. If the batch has no other group, the run fails; after it resumes, nothing of the batch
    has been trained. While the run is paused, all groups with samples that could not be scored
    wait.
    """
    for batch in state.batches:
        if not modes.may_train(plan, batch):
            continue
        ready = [
            ReadyGroup(batch, index, group)
            for index in sorted(batch.tally.maybe_whole)
            if (group := batch.groups[index]).num_scored == plan.group_size
            and not waits_for_a_mend(state, group)
        ]
        dropped = {r.index for r in ready if lacks_scores(r.group) and is_dropped(plan, r.group)}
        if dropped and len(dropped) == len(ready) and not batch.tally.sent:
            continue
        if plan.schedule.deterministic:  # they are trained in their order
            yield from ready
        else:
            yield from _dropped_last(plan, batch, ready, dropped)


def _dropped_last(
    plan: Plan, batch: BatchState, ready: list[ReadyGroup], dropped: set[int]
) -> Iterator[ReadyGroup]:
    """Yield groups that are not dropped, then those that are and whose update lacks no other."""
    whole = {each.index for each in ready}
    yield from (each for each in ready if each.index not in dropped)
    if not dropped:
        return
    size = plan.num_groups // plan.updates
    lacking = {
        index // size
        for index, group in enumerate(batch.groups)
        if index not in whole and not group.sent
    }
    yield from (r for r in ready if r.index in dropped and r.index // size not in lacking)


def waits_for_a_mend(state: State, group: GroupState) -> bool:
    """Whether operators have paused the run to fix the cause of failed scoring."""
    return state.phase == "paused" and lacks_scores(group)


def train_command(plan: Plan, ready: ReadyGroup) -> TrainGroup:
    """Return the command to train the group."""
    group = ready.group
    scored = tuple(fragment.scored for fragment in group.fragments if fragment.scored)
    assert group.policy is not None
    rewards = [reward for part in scored for reward in part.rewards]
    return TrainGroup(
        batch=ready.batch.index,
        group=ready.index,
        attempt=group.attempt,
        policy=group.policy,
        fragments=scored,
        advantages=plan.advantages.for_group(
            rewards,
            {name: [s for part in scored for s in part.parts[name]] for name in scored[0].parts},
        ),
        dropped=plan.advantages.why_dropped(rewards),
    )
