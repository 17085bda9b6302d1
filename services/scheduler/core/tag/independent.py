"""Decides how many groups a trainer of independent devices generates.

Each device changes over on its own, at no cost, so help needs no guard and no probe.
"""

import math

from services.scheduler.core.tag.makespan import TagInputs, best_groups


def share(tag_inputs: TagInputs, *, one_step: bool) -> int:
    """Groups of the batch that opens; in proportion to the devices if nothing is learned yet."""
    queues = len(tag_inputs.rollout)
    if not tag_inputs.rollout:
        return tag_inputs.groups
    if not tag_inputs.train:
        return tag_inputs.groups * tag_inputs.trainer_queues // (tag_inputs.trainer_queues + queues)
    return _twice_the_balance(tag_inputs) if one_step else best_groups(tag_inputs)


def _twice_the_balance(tag_inputs: TagInputs) -> int:
    """Twice the balanced share, for one-step asynchrony.

    In balance, P - k groups take the rollout devices as long as k groups and all training take the
    trainer's. Help finds unissued work only in every second batch, so it may be twice as much; with
    more, rollout would get a whole batch ahead and wait.
    """
    fragments, groups = tag_inputs.fragments_per_group, tag_inputs.groups
    generate = fragments / sum(1 / seconds for seconds in tag_inputs.rollout)
    helped = fragments * tag_inputs.help / max(1, tag_inputs.trainer_queues)
    balanced = groups * (generate - tag_inputs.train) - tag_inputs.commit
    return min(groups, math.ceil(2 * max(0.0, balanced / (generate + helped))) + 1)
