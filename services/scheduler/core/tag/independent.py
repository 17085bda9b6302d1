"""How many groups a fluid trainer generates: its devices change over on their own, at no cost.

No guard and no probe: help costs no switch, and what a device generates it does not wait for.
"""

import math

from services.scheduler.core.tag.makespan import Situation, best_groups


def share(situation: Situation, *, one_step: bool) -> int:
    """Groups of the batch that opens. Nothing learned yet: in proportion to the devices."""
    lanes = len(situation.rollout)
    if not situation.rollout:
        return situation.groups
    if not situation.train:
        return situation.groups * situation.trainer_slots // (situation.trainer_slots + lanes)
    return _twice_the_balance(situation) if one_step else best_groups(situation)


def _twice_the_balance(situation: Situation) -> int:
    """With one-step asynchrony.

    Balanced, P - k groups take the rollout devices as long as k groups and all training take the
    trainer's. Help finds something unissued in every second batch only, so it may be twice as much;
    more, and rollout would get a whole batch ahead and wait.
    """
    fragments, groups = situation.fragments_per_group, situation.groups
    generate = fragments / sum(1 / seconds for seconds in situation.rollout)
    helped = fragments * situation.help / max(1, situation.trainer_slots)
    balanced = groups * (generate - situation.train) - situation.commit
    return min(groups, math.ceil(2 * max(0.0, balanced / (generate + helped))) + 1)
