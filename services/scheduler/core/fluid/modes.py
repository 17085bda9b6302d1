"""Permissions of members by `schedule.mode`; exchange, step, commit and recovery know no mode.

                    may be given fragments    may be given pieces of groups
    fluid           all members               as the groups come
    disaggregated   members that are lent     as the groups come
    colocated       all members               once all are scored
    sequential      no member                 once all are scored

Workers that do not train generate in every mode. How early the next batch may begin is
`schedule.max_staleness`, which `fluid` and `disaggregated` may raise.
"""

from services.scheduler.core.state import BatchState, Plan


def has_loans(plan: Plan) -> bool:
    """Return whether members generate only while they are lent."""
    return plan.schedule.mode == "disaggregated"


def concurrency(plan: Plan, declared: int) -> int:
    """Return how many fragments a member is given at a time, of those that it declares."""
    return declared if plan.schedule.members_generate else 0


def lends(plan: Plan, declared: int) -> int:
    """Return how many fragments a member is given at a time while it is lent."""
    return declared if has_loans(plan) else 0


def may_train(plan: Plan, batch: BatchState) -> bool:
    """Return whether groups of a batch may be trained: groups without a score count as scored."""
    overlaps = plan.schedule.mode in ("disaggregated", "fluid")
    return overlaps or batch.tally.scored == len(batch.groups) * plan.group_size
