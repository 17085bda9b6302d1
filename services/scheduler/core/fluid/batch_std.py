"""Advantages over the standard deviation of a batch: its groups are trained when all are scored.

Fluid devices generate first, so this costs them little: what comes late is only the first pieces of
a batch. All groups are sent at once, under one attempt. If one group is generated again, its
rewards change, and so do the advantages of the whole batch: all groups are sent again.
"""

from dataclasses import replace

from services.scheduler.core.fluid.fluid_state import FluidState
from services.scheduler.core.fragments import requeue_group
from services.scheduler.core.state import BatchState, GroupState, Plan, State

Advantages = list[tuple[float, ...]]


def is_batch_std(plan: Plan) -> bool:
    return plan.advantages.std == "batch"


def batch_advantages(plan: Plan, batch: BatchState) -> Advantages | None:
    """Return the advantages of every group; None while a reward is not known."""
    if any(group.num_scored < plan.group_size for group in batch.groups):
        return None
    return plan.advantages.for_batch([_scored(group) for group in batch.groups])


def requeue_sent_groups(state: State, fluid: FluidState) -> State:
    """Take back all groups of the batch that were sent, and all sums."""
    for index in fluid.groups:
        group = state.find_group(fluid.batch, index)
        if group is not None and group.sent:
            state = state.with_group(fluid.batch, index, requeue_group(group))
        for owner in sorted(fluid.owners(index)):
            fluid = fluid.invalidate_sum(owner)
    for index in list(fluid.groups):
        fluid = fluid.without_group(index)
    return replace(state, fluid=replace(fluid, exchange=None))


def under_one_attempt(plan: Plan, state: State, index: int) -> State:
    """Take back groups of a batch that were not sent again before the scheduler was restarted,
    where others were."""
    batch = state.find_batch(index)
    if batch is None or not is_batch_std(plan):
        return state
    newest = max(group.attempt for group in batch.groups)
    groups = tuple(
        group if group.attempt == newest else replace(group, sent=False, attempt=newest)
        for group in batch.groups
    )
    return state if groups == batch.groups else state.with_batch(replace(batch, groups=groups))


def _scored(group: GroupState) -> tuple[list[float | None], dict[str, list[float | None]]]:
    """Rewards of a group, and the scores that make them up."""
    scored = [each.scored for each in group.fragments if each.scored is not None]
    parts = {name: [s for each in scored for s in each.parts[name]] for name in scored[0].parts}
    return [reward for each in scored for reward in each.rewards], parts
