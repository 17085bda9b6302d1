"""Work of members by `schedule.mode`; exchange, step, commit and recovery are equal in all modes.

                    members that generate     groups are trained
    fluid           all                       as soon as each is scored
    disaggregated   lent members              as soon as each is scored
    colocated       all                       once all groups are scored
    sequential      none                      once all groups are scored

Workers that do not train generate in every mode. `schedule.max_staleness`, which `fluid` and
`disaggregated` may raise, limits how early the next batch begins.
"""

from services.scheduler.core.state import BatchState, Plan


def has_loans(plan: Plan) -> bool:
    """Return whether members generate only while they are lent."""
    return plan.schedule.mode == "disaggregated"


def concurrency(plan: Plan, declared: int) -> int:
    """Return the number of fragments that a member generates at a time; it declares a maximum."""
    return declared if plan.schedule.members_generate else 0


def lent_concurrency(plan: Plan, declared: int) -> int:
    """Return the number of fragments that a member generates at a time while it is lent."""
    return declared if has_loans(plan) else 0


def may_train(plan: Plan, batch: BatchState) -> bool:
    """Return whether groups of a batch may be trained; a failed score counts as a score."""
    overlaps = plan.schedule.mode in ("disaggregated", "fluid")
    return overlaps or batch.tally.scored == len(batch.groups) * plan.group_size
