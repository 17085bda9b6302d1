"""What `schedule.mode` lets a member do; exchange, step, commit and recovery know no mode.

                fluid                    colocated                  sequential
    fragments   all members              all members                only workers that do not train
    pieces      of groups as they come   once the batch is scored   once the batch is scored

How early the next batch may begin is `schedule.max_staleness`, which only `fluid` may raise.
"""

from services.scheduler.core.state import BatchState, Plan


def concurrency(plan: Plan, declared: int) -> int:
    """Return how many fragments a member is given at a time, of those that it declares."""
    return declared if plan.schedule.members_generate else 0


def may_train(plan: Plan, batch: BatchState) -> bool:
    """Return whether groups of a batch may be trained: groups without a score count as scored."""
    overlaps = plan.schedule.mode in ("pipelined", "fluid")
    return overlaps or batch.tally.scored == len(batch.groups) * plan.group_size
