"""How many groups a fluid trainer generates: its devices change over on their own, at no cost.

No guard and no probe: help costs no switch, and what a device generates it does not wait for.
"""

import math

from services.scheduler.core.tag.makespan import TagInputs, best_groups


def share(tag_inputs: TagInputs, *, one_step: bool) -> int:
    """Groups of the batch that opens. Nothing learned yet: in proportion to the devices."""
    queues = len(tag_inputs.rollout)
    if not tag_inputs.rollout:
        return tag_inputs.groups
    if not tag_inputs.train:
        return tag_inputs.groups * tag_inputs.trainer_queues // (tag_inputs.trainer_queues + queues)
    return _twice_the_balance(tag_inputs) if one_step else best_groups(tag_inputs)


def _twice_the_balance(tag_inputs: TagInputs) -> int:
    """With one-step asynchrony.

    Balanced, P - k groups take the rollout devices as long as k groups and all training take the
    trainer's. Help finds something unissued in every second batch only, so it may be twice as much;
    more, and rollout would get a whole batch ahead and wait.
    """
    fragments, groups = tag_inputs.fragments_per_group, tag_inputs.groups
    generate = fragments / sum(1 / seconds for seconds in tag_inputs.rollout)
    helped = fragments * tag_inputs.help / max(1, tag_inputs.trainer_queues)
    balanced = groups * (generate - tag_inputs.train) - tag_inputs.commit
    return min(groups, math.ceil(2 * max(0.0, balanced / (generate + helped))) + 1)
