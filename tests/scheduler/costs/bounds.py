"""The bound of a batch whose devices are split for good."""

import math
from collections.abc import Mapping

from services.scheduler.costs.profile import Profile, Role
from services.scheduler.costs.seconds import generation_work, speed, training_work


def split_bound(profile: Profile, rollout: Mapping[str, int], trainer: Mapping[str, int]) -> float:
    """Return the least time of a batch if no device is lent."""

    def seconds(work: float, devices: Mapping[str, int], role: Role) -> float:
        rate = sum(count * speed(profile, kind, role) for kind, count in devices.items())
        return work / rate if rate else math.inf

    return max(
        seconds(generation_work(profile), rollout, "rollout"),
        seconds(training_work(profile), trainer, "trainer"),
    )
