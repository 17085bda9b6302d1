"""How much room a run needs in the streams of its broker."""

from services.scheduler.core.state import Plan
from shared.messages.contracts import MAX_FRAGMENTS_PER_GROUP
from shared.messages.volume import BatchVolume, prompt_bytes


def stream_needs(plan: Plan) -> dict[str, int]:
    """Most bytes by name of the stream.

    With `schedule.fragment_size = "auto"` the number of devices decides how small fragments become,
    and nobody knows how many will join: counted are as many as a group may have.
    """
    fixed, size = plan.schedule.fixed_fragment, plan.group_size
    return BatchVolume(
        groups=plan.num_groups,
        group_size=size,
        fragments_per_group=size // fixed if fixed else min(size, MAX_FRAGMENTS_PER_GROUP),
        scorers=max(1, len(plan.advantages.weights)),
        prompt_bytes=prompt_bytes(plan.prompts.prompts, plan.num_groups),
    ).needs()
